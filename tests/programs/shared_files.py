"""Which files in shared memory the processes of a server use, to see later that they are gone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

SHM = Path("/dev/shm")


def in_use_by(pids: Iterable[int]) -> set[Path]:
    """Files in /dev/shm that one of the processes has mapped; a process that is gone has none."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                path = line.partition("/")[1] + line.partition("/")[2]
                if path.startswith(f"{SHM}/"):
                    found.add(Path(path.removesuffix(" (deleted)")))
    return found


def left(files: Iterable[Path]) -> list[Path]:
    """Those of `files` that are still there."""
    return sorted(file for file in files if file.exists())


def remove(files: Iterable[Path]) -> None:
    """Remove what is left of a server that was killed; only what is this user's own goes."""
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
