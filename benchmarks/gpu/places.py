"""Where `scripts/gpu` keeps what, and what its children find on their path."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "gpu"
"""Not in git, and kept between the parts of a run."""
RESULTS = Path(__file__).parent / "results"
NATIVE = BUILD / f"native-{sys.version_info.major}.{sys.version_info.minor}"
TREE = BUILD / "tree"
"""kvelastic as an install would lay it out, of links: PYTHONPATH has it, and no pip is needed."""
_STAND_INS = Path(__file__).parent / "stand_ins"


def stood_in_for() -> list[str]:
    """Packages that kvelastic needs, are not installed, and have a stand-in here."""
    names = sorted(path.stem for path in _STAND_INS.glob("*.py"))
    return [name for name in names if importlib.util.find_spec(name) is None]


def environment(*, installed: bool) -> dict[str, str]:
    """This process's own, with the paths of the tree, and nothing that steers kvelastic."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("KVSIM_", "KVELASTIC_", "ENABLE_KVELASTIC"))
    }
    paths = [] if installed else [TREE]
    paths += [ROOT, ROOT / "tests" / "programs"]
    paths += [_STAND_INS] if stood_in_for() else []
    before = [kept["PYTHONPATH"]] if kept.get("PYTHONPATH") else []
    return kept | {
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *before]),
        # Else the folder that a program runs in comes first: the root, whose kvelastic has no
        # native module.
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": os.environ.get("PYTHONDONTWRITEBYTECODE", "1"),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }


def is_installed() -> bool:
    """Whether this Python finds this checkout with its native module, as scripts/setup has it."""
    asks = "import sys, kvelastic, kvelastic._vmm; print(kvelastic.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", asks],
        check=False, cwd="/", env=environment(installed=True), capture_output=True, text=True,
    )  # fmt: skip
    return done.returncode == 0 and Path(done.stdout.strip()).is_relative_to(ROOT / "kvelastic")


def simulator(machine: Path) -> dict[str, str]:
    """The environment of the simulated driver, built where it is not; `machine` is its file.

    Raises `CalledProcessError` or `OSError` where it cannot be built.
    """
    built = subprocess.run(
        [ROOT / "tests" / "sim" / "build"], check=True, capture_output=True, text=True
    )
    return {
        "LD_LIBRARY_PATH": built.stdout.strip(),
        "KVSIM_MACHINE": str(machine),
        "KVSIM_MEMORY": "12G",  # a sparse file
        "KVSIM_CONTEXT_BYTES": "500M",
        "KVSIM_UNREADABLE": "1",
    }


def is_built() -> bool:
    """Whether the tree has a native module, made from the sources as they are."""
    from benchmarks.gpu.native_sources import digest

    stamp = NATIVE / "digest"
    return (
        stamp.is_file()
        and stamp.read_text() == digest()
        and any((TREE / "kvelastic").glob("_vmm*.so"))
    )
