"""A client of kvcached's segment that knows nothing of kvelastic: struct, mmap and fcntl.

kvcached_client.py NAME read             # prints limit, used and preallocated bytes
kvcached_client.py NAME limit BYTES      # as kvctl of kvcached does: the whole struct, by mmap
kvcached_client.py NAME hold             # takes the lock, prints "held" and keeps it
kvcached_client.py NAME keep             # maps the file once, and sets each limit that it reads
kvcached_client.py NAME random SEED      # writes random limits until it is killed
kvcached_client.py NAME random SEED N    # writes N random limits
"""

from __future__ import annotations

import fcntl
import mmap
import random
import struct
import sys
from pathlib import Path

VALUES = struct.Struct("<3q")


def main(name: str, what: str, *more: str) -> None:
    """Do one thing, as the module's first lines list."""
    path = Path("/dev/shm", name)
    if what == "random":
        pick = random.Random(more[0])
        left = int(more[1]) if more[1:] else -1
        while left:
            set_limit(path, pick.choice([pick.randrange(1 << 30), -1, 0, 1, (1 << 63) - 1]))
            left -= 1
        return
    if what == "limit":
        set_limit(path, int(more[0]))
        return
    if what == "keep":
        with path.open("r+b") as file, mmap.mmap(file.fileno(), VALUES.size) as memory:
            for line in sys.stdin:
                fcntl.flock(file, fcntl.LOCK_EX)
                memory[:8] = struct.pack("<q", int(line))
                fcntl.flock(file, fcntl.LOCK_UN)
                print("set", flush=True)
        return
    with path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX if what == "hold" else fcntl.LOCK_SH)
        if what == "hold":
            print("held", flush=True)
            sys.stdin.read()
        with mmap.mmap(file.fileno(), VALUES.size, access=mmap.ACCESS_READ) as memory:
            print(*VALUES.unpack(memory[:]))


def set_limit(path: Path, limit_bytes: int) -> None:
    """Change the first field, and write all three back."""
    with path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with mmap.mmap(file.fileno(), VALUES.size) as memory:
            _, used_bytes, ahead_bytes = VALUES.unpack(memory[:])
            memory[:] = VALUES.pack(limit_bytes, used_bytes, ahead_bytes)


if __name__ == "__main__":
    main(*sys.argv[1:])
