"""The memory files of host drivers that a process has open.

before = open_memfds()
driver = _vmm.HostDriver()
(inode,) = open_memfds().keys() - before.keys()
"""

from __future__ import annotations

import contextlib
from pathlib import Path


def held_bytes(pid: int) -> int:
    """What the kernel holds for the files of that process."""
    return sum(fd.stat().st_blocks * 512 for fd in open_memfds(pid).values())


def open_memfds(pid: int | None = None) -> dict[int, Path]:
    """Where each is found under /proc, by inode: descriptors are reused, inodes are not."""
    found = {}
    for fd in Path(f"/proc/{pid or 'self'}/fd").iterdir():
        # Another thread, or the collector, may close any of them between two looks at it; so does
        # this very listing with its own.
        with contextlib.suppress(FileNotFoundError):
            if str(fd.readlink()).split()[0] == "/memfd:kvelastic":  # and not -staging, of tiers
                found[fd.stat().st_ino] = fd
    return found
