"""What kvelastic uses of posix_ipc, for a machine where it is not installed and nothing can be.

`scripts/gpu` puts this folder on the path there, and its page says so. The call is the standard
library's own shm_open, which is what posix_ipc makes too.
"""

from __future__ import annotations

import _posixshmem
import os

O_CREX = os.O_CREAT | os.O_EXCL


class Error(Exception):
    """Never raised here: shm_open fails with OSError."""


class SharedMemory:
    """A new object of this size; `fd` is the caller's to close."""

    def __init__(self, name: str, flags: int, mode: int, size: int) -> None:
        self.fd: int = _posixshmem.shm_open(name, flags | os.O_RDWR, mode=mode)
        os.ftruncate(self.fd, size)
