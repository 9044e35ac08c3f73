"""The lock of a whole file, which the kernel frees when its holder ends."""

from __future__ import annotations

import fcntl
import time


def lock_within(fd: int, wait_s: float) -> bool:
    """Take an exclusive flock() on an open file. Returns False after `wait_s` without it.

    Polls every 2 ms. Release the lock with `fcntl.flock(fd, LOCK_UN)`, or close the file.
    """
    deadline_s = time.monotonic() + wait_s
    while not _try_lock(fd):
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(0.002)  # flock() has no timeout
    return True


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
