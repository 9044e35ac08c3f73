"""scripts/engines: an engine's newest release is compared, installed, probed and tried."""

from __future__ import annotations

import datetime
import importlib
import shutil
import subprocess
import sys
import sysconfig
import time
import zipfile
from pathlib import Path
from types import ModuleType

import needs
import pytest
from processes import run_python
from waiting import DEADLINE_S

ROOT = Path(__file__).parents[2]
NEWEST = ROOT / "scripts" / "_engines" / "newest.py"
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
def test_new_parameter_and_missing_function_are_reported(
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


@pytest.fixture
def newest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(NEWEST.parent))
    module = importlib.import_module("newest")
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    return module


def test_engine_that_is_not_installed_is_unreached(
    newest: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overlay.packages_of", lambda engine: None)
    row = newest.try_newest("vllm", time.monotonic() + DEADLINE_S)
    assert (row.is_green, row.reason) == (False, "vllm is not installed here; run scripts/setup")


def test_no_engine_starts_without_time_left(
    newest: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    monkeypatch.setattr("overlay.packages_of", lambda engine: PACKAGES)
    row = newest.try_newest("vllm", time.monotonic() - 1)
    assert row.reason == "no time left for: look for the newest vllm"
    line = row.line(datetime.date(2026, 11, 27))
    assert line == "| vLLM | 2026-11-27 " + 4 * "| not reached " + "|\n"


def test_rows_that_passed_replace_those_of_readme(newest: ModuleType) -> None:
    day = datetime.date(2026, 12, 1)
    green = newest.Row("sglang", "0.6.1", list(newest.COLUMNS))
    failed = newest.Row("vllm", "0.35.0", ["probe"], "the battery failed")
    old = ["| vLLM 0.34.0 | 2026-11-27 | yes |\n", "| SGLang 0.5.23 | 2026-11-27 | yes |\n"]
    page = f"before\n{newest.BEGIN}\n{''.join(old)}{newest.END}\nafter\n"
    table = f"{newest.HEAD}{old[0]}| SGLang 0.6.1 | 2026-12-01 | yes | yes | yes | yes |\n"
    changed = newest.with_rows(page, [green, failed], day)
    assert changed == f"before\n{newest.BEGIN}\n{table}{newest.END}\nafter\n"
    assert newest.with_rows(changed, [failed], day) == changed
    assert green.line(day) in newest.with_rows((ROOT / "README.md").read_text(), [green], day)
    with pytest.raises(ValueError, match="has no"):
        newest.with_rows("another page", [green], day)


def test_steps_passed_before_a_failure_count(
    newest: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = importlib.import_module("overlay").Release("sglang", "0.6.1", Path(sys.executable))
    program = tmp_path / "engine_battery.py"
    monkeypatch.setattr(newest, "__file__", str(tmp_path / "newest.py"))
    monkeypatch.setattr(newest, "ROOT", tmp_path)
    failing = """print('{"passed": "tokens"}'); raise AssertionError("the tokens differ")"""
    for text, reason in (
        (failing, "the battery failed, AssertionError: the tokens differ"),
        ("""print('{"passed": "tokens"}', flush=True)\nwhile True: pass""", "the time ended"),
    ):
        program.write_text(text)
        row = newest.Row("sglang")
        left_s = DEADLINE_S if text is failing else 2.0
        with pytest.raises(newest.NotReachedError, match=reason):
            newest.try_out(release, row, time.monotonic() + left_s)
        assert row.passed == ["tokens"] or text is not failing


def test_a_release_runs_beside_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel that pip would have fetched, with a new dependency and native code for a GPU."""
    monkeypatch.syspath_prepend(str(NEWEST.parent))
    overlay = importlib.import_module("overlay")
    installed = tmp_path / "site-packages"
    for name, version in (("vllm", "0.33.0+cpu"), ("torch", "2.13.0"), ("numpy", "2.3")):
        info = installed / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        info.joinpath("METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
    installed.joinpath("vllm").mkdir()
    installed.joinpath("vllm", "_C.abi3.so").write_text("for CPUs")

    def fetch(engine: str, version: str, folder: Path, end_s: float) -> Path:
        wheel = folder / f"vllm-{version}-py3-none-any.whl"
        needs_these = (
            "torch==2.14",
            "numpy>=2",
            "orjson>=3",
            "flashinfer_python",
            "ray; extra=='r'",
        )
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("vllm/__init__.py", "")
            archive.writestr("vllm/_C.abi3.so", "for GPUs")
            archive.writestr(
                f"vllm-{version}.dist-info/METADATA",
                f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
                + "".join(f"Requires-Dist: {each}\n" for each in needs_these),
            )
        return wheel

    commands: list[list[str]] = []
    monkeypatch.setattr(overlay, "packages_of", lambda engine: installed)
    monkeypatch.setattr(overlay, "newest_version", lambda engine, end_s: "0.34.0")
    monkeypatch.setattr(overlay, "fetch", fetch)
    monkeypatch.setattr(overlay, "run", lambda command, end_s, what: commands.append(command))
    release = overlay.install("vllm", tmp_path / "build", 0.0)
    assert (release.version, release.kernels) == ("0.34.0", "0.33.0")
    assert release.environment == {"PYTHONPATH": str(release.overlay)}
    assert (release.overlay / "vllm" / "_C.abi3.so").read_text() == "for CPUs"
    assert (release.overlay / "vllm-0.34.0+cpu.dist-info").is_dir()
    assert [command[-1] for command in commands] == ["orjson>=3"]
    # The second time it is there, and a release that is installed needs no folder.
    assert overlay.install("vllm", tmp_path / "build", 0.0) == release
    assert len(commands) == 1
    monkeypatch.setattr(overlay, "newest_version", lambda engine, end_s: "0.33.0")
    assert overlay.install("vllm", tmp_path / "build", 0.0).overlay is None


@pytest.mark.slow
@needs.sglang
def test_sglang_is_found_in_its_own_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(NEWEST.parent))
    newest = importlib.import_module("newest")
    packages = newest.packages_of("sglang")
    assert packages is not None
    assert newest.compare("sglang", packages, packages) == []
    lines = newest.compare("sglang", packages, tmp_path)
    assert any(
        line.startswith("gone     sglang.srt.managers.scheduler:Scheduler") for line in lines
    )


def test_wheel_option_requires_the_engine_option() -> None:
    done = run_python(NEWEST, "--wheel", "x.whl", exit_code=2)
    assert "--wheel needs --engine" in done.stderr
