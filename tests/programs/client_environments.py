"""Programs that control kvcached, from the package index, each in an environment of its own.

    python = kvcached_environment()      # skips the test where the package cannot be had
    run_python("-m", "kvcached.cli.kvctl", "list", python=python)

An environment is made once and stays in build/clients.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from waiting import DEADLINE_S

from benchmarks.gpu.carried.pack import KVCACHED

ROOT = Path(__file__).parents[2]
AIBRIX = "aibrix==0.8.0"


def kvcached_environment() -> Path:
    """The Python of an environment with kvcached's package but for its extension."""
    folder = _folder(KVCACHED)
    if not _is_complete(folder):
        _create(folder)
        _install(folder, "numpy", "posix_ipc", "wrapt", "setuptools>=64", "wheel")
        fake = ROOT / "tests" / "fakes" / "torch_for_kvcached.py"
        shutil.copy(fake, _packages(folder) / "torch.py")
        _install(folder, "--no-deps", "--no-build-isolation", KVCACHED)
        _complete(folder)
    return folder / "bin" / "python"


def aibrix_environment() -> Path:
    """The Python of an environment with AIBrix's agent, and after it this environment's packages.

    The agent starts engines by its own Python. So it runs with the engine's versions of FastAPI
    and others, and not with those that it wants.
    """
    if sys.version_info >= (3, 13):
        pytest.skip(f"{AIBRIX} needs a Python before 3.13")
    folder = _folder(AIBRIX)
    if not _is_complete(folder):
        _create(folder)
        _install(folder, "--no-deps", AIBRIX, "structlog", "tenacity")
        here = sysconfig.get_paths()["purelib"]
        (_packages(folder) / "this.pth").write_text(f"import site; site.addsitedir({here!r})\n")
        _complete(folder)
    return folder / "bin" / "python"


def _folder(requirement: str) -> Path:
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return ROOT / "build" / "clients" / f"{requirement.replace('==', '-')}-python{version}"


def _is_complete(folder: Path) -> bool:
    return (folder / "installed").is_file()


def _complete(folder: Path) -> None:
    (folder / "installed").touch()


def _create(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)


def _packages(folder: Path) -> Path:
    (packages,) = folder.glob("lib/python*/site-packages")
    return packages


def _install(folder: Path, *what: str) -> None:
    """Skips the test if pip fails, as it does without a network."""
    python = str(folder / "bin" / "python")
    options = ["--disable-pip-version-check", "-q", "--retries=1", "--no-input"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", *options, *what],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"pip cannot install {' '.join(what)}: {done.stderr.strip()[-300:]}")
