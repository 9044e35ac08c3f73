"""Benchmarks and the demo find what they import: they share programs with the tests, which move."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import needs
import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = sorted(path.parent.name for path in ROOT.glob("benchmarks/*/__main__.py"))


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_tells_its_options(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    command = "scripts/gpu" if name == "gpu" else f"scripts/bench {name}"
    assert done.stdout.startswith(f"usage: {command}")


@needs.vllm
def test_the_demo_finds_what_it_runs() -> None:
    paths = ROOT / "scripts" / "_demo", ROOT / "tests" / "programs"
    done = subprocess.run(
        [sys.executable, "-c", "import demo"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_the_folder_above_the_repository_is_not_searched_for_packages(tmp_path: Path) -> None:
    """What lies there by chance, a checkout of triton say, is nobody's package."""
    done = subprocess.run(
        [sys.executable, "-c", "import sys, kvelastic.cli; print(*sys.path, sep='\\n')"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert str(ROOT.parent) not in done.stdout.splitlines()
