"""What users install is built and tried as they would: scripts/wheel, with this Python.

scripts/wheel without arguments does it with every Python of the machine, and installs torch anew.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ABI = "abi3" if sys.version_info >= (3, 12) else f"cp{sys.version_info[0]}{sys.version_info[1]}"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with an sdist and a wheel, both checked in a clean environment."""
    out = tmp_path_factory.mktemp("wheel") / "dist"
    done = subprocess.run(
        [
            ROOT / "scripts" / "wheel",
            f"--python={sys.executable}",
            f"--torch-of={sysconfig.get_paths()['purelib']}",
            f"--out={out}",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.mark.matrix
@pytest.mark.timeout(3600)
def test_wheel_is_manylinux_and_contains_the_package(built: Path) -> None:
    [wheel] = built.glob("*.whl")
    assert f"-{ABI}-manylinux" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "kvelastic.pth" in names
    assert "kvelastic/cli/kvctl.py" in names
    assert "kvelastic/controller/dashboard/index.html" in names
    assert [name for name in names if name.startswith(("tests/", "benchmarks/", "scripts/"))] == []


@pytest.mark.matrix
@pytest.mark.timeout(3600)
def test_sdist_has_tests_and_docs(built: Path) -> None:
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "vmm_csrc/bind/module.cpp"} <= names
    assert {"tests/conftest.py", "scripts/setup", "docs/ARCHITECTURE.md"} <= names
    assert [name for name in names if name.startswith((".venv", "build/", "dist/"))] == []


def test_compiler_warnings_are_errors_only_in_own_builds() -> None:
    """Only the project's own builds say so, by CMake's own variable."""
    assert "Werror" not in (ROOT / "CMakeLists.txt").read_text()
    assert "CMAKE_COMPILE_WARNING_AS_ERROR=ON" in (ROOT / "scripts" / "setup").read_text()
