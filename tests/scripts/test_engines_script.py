"""scripts/engines: what an integration touches, compared with a wheel of another release."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import needs
import pytest
from processes import run_python

NEWEST = Path(__file__).parents[2] / "scripts" / "_engines" / "newest.py"
PACKAGES = Path(sysconfig.get_paths()["purelib"])
CHANGED = "vllm/v1/core/block_pool.py"


def run(wheel: Path) -> subprocess.CompletedProcess[str]:
    return run_python(NEWEST, f"--wheel={wheel}", "--engine=vllm", exit_code=None)


def pack(wheel: Path) -> Path:
    """What the integration touches of vLLM as it is installed, without one file."""
    modules = {
        name.partition(":")[0] for name in importlib.import_module("touched").touched("vllm")
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for module in modules:
            path = PACKAGES / module.replace(".", "/")
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            name = str(file.relative_to(PACKAGES))
            if name != CHANGED:
                archive.write(file, name)
    return wheel


def with_text(wheel: Path, name: str, text: str) -> Path:
    """A copy of a wheel, with this text in the file that it lacks."""
    made = wheel.with_name(name)
    shutil.copyfile(wheel, made)
    with zipfile.ZipFile(made, "a") as archive:
        archive.writestr(CHANGED, text)
    return made


@pytest.mark.slow
@needs.vllm
def test_a_parameter_that_is_new_and_a_function_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(NEWEST.parent))
    text = (PACKAGES / CHANGED).read_text()

    without = pack(tmp_path / "without.whl")
    same = run(with_text(without, "same.whl", text))
    assert (same.returncode, same.stderr) == (0, "")
    assert "0 differ" in same.stdout

    made = "def __init__(\n        self,"
    assert made in text
    other = run(with_text(without, "other.whl", text.replace(made, f"{made} another,")))
    assert other.returncode == 1
    assert "changed  vllm.v1.core.block_pool:BlockPool" in other.stdout
    assert "self, another" in other.stdout

    gone = run(without)
    assert gone.returncode == 1
    assert "gone     vllm.v1.core.block_pool:BlockPool" in gone.stdout


def test_an_engine_that_is_not_installed_is_no_engine_without_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(NEWEST.parent))
    newest = importlib.import_module("newest")
    monkeypatch.setattr(newest, "ENGINES", ("none",))
    monkeypatch.setattr(sys, "argv", ["engines", "--newest"])
    assert newest.main() == 1
    assert "none is not installed here" in capsys.readouterr().out


@pytest.mark.slow
@needs.sglang
def test_sglang_is_looked_for_in_its_own_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(NEWEST.parent))
    newest = importlib.import_module("newest")
    packages = newest.installed("sglang")
    assert packages is not None
    assert newest.compare("sglang", packages, packages) == []
    lines = newest.compare("sglang", packages, tmp_path)
    assert any(
        line.startswith("gone     sglang.srt.managers.scheduler:Scheduler") for line in lines
    )


def test_usage_is_checked() -> None:
    done = run_python(NEWEST, "--wheel", "x.whl", exit_code=2)
    assert "--wheel needs --engine" in done.stderr
