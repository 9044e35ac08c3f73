"""Which files in shared memory the processes of a server use, to see later that they are gone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

SHM = Path("/dev/shm")


def in_use_by(pids: Iterable[int]) -> set[Path]:
    """Files in /dev/shm that one of the processes has mapped; a process that is gone has none."""
    return {Path(path) for _, path in _mapped(pids)}


def renamed_in_use_by(pids: Iterable[int]) -> set[Path]:
    """The same by their present names. A semaphore's creator has it mapped under an earlier one."""
    inodes = {inode for inode, _ in _mapped(pids)}
    with os.scandir(SHM) as entries:
        return {Path(entry.path) for entry in entries if entry.inode() in inodes}


def _mapped(pids: Iterable[int]) -> Iterator[tuple[int, str]]:
    """The inodes and names of files in /dev/shm, one for each mapping."""
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                path = line.partition("/")[1] + line.partition("/")[2]
                if path.startswith(f"{SHM}/"):
                    yield int(line.split()[4]), path.removesuffix(" (deleted)")


def left(files: Iterable[Path]) -> list[Path]:
    """Those of `files` that are still there."""
    return sorted(file for file in files if file.exists())


def remove(files: Iterable[Path]) -> None:
    """Remove what is left of a server that was killed; only what is this user's own goes."""
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
