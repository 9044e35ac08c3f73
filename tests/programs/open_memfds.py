"""The memory files of host drivers that this process has open.

before = open_memfds()
driver = _vmm.HostDriver()
(inode,) = open_memfds().keys() - before.keys()
"""

from __future__ import annotations

import contextlib
from pathlib import Path


def open_memfds() -> dict[int, Path]:
    """Where each is found under /proc, by inode: descriptors are reused, inodes are not."""
    found = {}
    for fd in Path("/proc/self/fd").iterdir():
        # Another thread, or the collector, may close any of them between two looks at it; so does
        # this very listing with its own.
        with contextlib.suppress(FileNotFoundError):
            if "memfd:kvelastic" in str(fd.readlink()):
                found[fd.stat().st_ino] = fd
    return found
