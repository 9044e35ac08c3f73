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
def test_one_wheel_for_this_python_and_many_systems(built: Path) -> None:
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
def test_the_sdist_has_what_its_tests_and_docs_need(built: Path) -> None:
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "vmm_csrc/bind/module.cpp"} <= names
    assert {"tests/conftest.py", "scripts/setup", "docs/ARCHITECTURE.md"} <= names
    assert [name for name in names if name.startswith((".venv", "build/", "dist/"))] == []


def test_a_warning_of_another_compiler_is_no_error() -> None:
    """Only the project's own builds say so, by CMake's own variable."""
    assert "Werror" not in (ROOT / "CMakeLists.txt").read_text()
    assert "CMAKE_COMPILE_WARNING_AS_ERROR=ON" in (ROOT / "scripts" / "setup").read_text()
