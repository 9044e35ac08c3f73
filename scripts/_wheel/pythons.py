"""Finds the Pythons of this machine that kvelastic supports, one of each version."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

OLDEST = 10
NEWEST = 20
"""Minor versions of Python 3 from `OLDEST` up to, but not including, `NEWEST` are looked for."""


@dataclass(frozen=True)
class Interpreter:
    """A Python and its version, major and minor."""

    path: Path
    version: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.version[0]}.{self.version[1]}"


def look_at(path: Path) -> Interpreter:
    """Return a Python with its version. Raises SystemExit if it is not a Python or too old."""
    code = "import sys; print(*sys.version_info[:2])"
    try:
        done = subprocess.run([path, "-c", code], capture_output=True, text=True, check=True)
        major, minor = map(int, done.stdout.split())
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"{path} does not run as a Python: {error}") from error
    if (major, minor) < (3, OLDEST):
        raise SystemExit(f"{path} is Python {major}.{minor}; kvelastic needs 3.{OLDEST} or later")
    return Interpreter(path, (major, minor))


def find_all() -> list[Interpreter]:
    """Return the Pythons of PATH and of pyenv, oldest first."""
    found = []
    for minor in range(OLDEST, NEWEST):
        of_pyenv = sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python"))
        named = shutil.which(f"python3.{minor}")
        for candidate in [*reversed(of_pyenv), *([Path(named)] if named else [])]:
            # pyenv's shims are on PATH even for versions that are not enabled.
            try:
                python = look_at(candidate)
            except SystemExit:
                continue
            if python.version == (3, minor):
                found.append(python)
                break
    return found
