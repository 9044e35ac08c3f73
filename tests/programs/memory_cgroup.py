"""A memory cgroup of a test's own, in version 1 or 2 of their interface.

with MemoryCgroup.make() as cgroup:    # skips the test where none can be made
    cgroup.add(pid); cgroup.limit(200 << 20)
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

import pytest

MOUNTS = Path("/sys/fs/cgroup")


class Files(NamedTuple):
    """What one version of the interface calls its files."""

    limit: str
    usage: str
    kills: str
    """The file that counts, behind `oom_kill`, whom the kernel has killed."""
    file_cache: tuple[str, str]
    """Of memory.stat: files that the kernel can read again."""


V1 = Files(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "memory.oom_control",
    ("total_inactive_file", "total_active_file"),
)
V2 = Files("memory.max", "memory.current", "memory.events", ("inactive_file", "active_file"))


class MemoryCgroup:
    def __init__(self, path: Path, files: Files) -> None:
        self.path = path
        self._files = files

    @classmethod
    def make(cls) -> MemoryCgroup:
        """Below that of this process, or else below the top. Skips the test where none can be."""
        why = "there is no memory cgroup"
        for top, own, files in _places():
            parent = top / own.strip("/")
            folder = parent if parent.is_dir() else top
            made = cls(folder / f"kvtest_{os.getpid()}_{os.urandom(4).hex()}", files)
            try:
                made.path.mkdir()
                if made._can_limit():
                    return made
                why = f"{made.path} has no {files.limit} that can be written"
                made.path.rmdir()
            except OSError as error:
                why = str(error)
        pytest.skip(f"no memory cgroup can be made here: {why}")

    @classmethod
    def at(cls, path: Path) -> MemoryCgroup:
        """One that is there."""
        return cls(path, V1 if (path / V1.limit).exists() else V2)

    def _can_limit(self) -> bool:
        with contextlib.suppress(OSError):
            self.limit(1 << 50)
            return True
        return False

    def __enter__(self) -> MemoryCgroup:
        return self

    def __exit__(self, *_: object) -> None:
        """Pre: all that was in it has ended."""
        self.path.rmdir()

    def child(self) -> MemoryCgroup:
        """One more inside it, without a limit of its own."""
        made = MemoryCgroup(self.path / "inner", self._files)
        made.path.mkdir()
        return made

    def add(self, pid: int) -> None:
        """Move a process into it; what that process starts from now on is in it, too."""
        (self.path / "cgroup.procs").write_text(str(pid))

    def limit(self, limit_bytes: int) -> None:
        (self.path / self._files.limit).write_text(str(limit_bytes))

    def held_bytes(self) -> int:
        """What its processes hold and the kernel cannot take back: no cached files."""
        stat = self._numbers("memory.stat")
        used = int((self.path / self._files.usage).read_text())
        return used - sum(stat[name] for name in self._files.file_cache)

    def oom_kills(self) -> int:
        """How many processes in it the kernel has killed for want of memory."""
        return self._numbers(self._files.kills)["oom_kill"]

    def _numbers(self, file: str) -> dict[str, int]:
        lines = (self.path / file).read_text().splitlines()
        return {name: int(value) for name, value in (line.split() for line in lines)}


def _places() -> list[tuple[Path, str, Files]]:
    """Mount, path of this process's cgroup below it, and names of its files."""
    found = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            found.append((MOUNTS / "memory", path, V1))
        elif not controllers:
            found.append((MOUNTS, path, V2))
    return found
