"""An instance on host memory that keeps kvcached's segment, named NAME."""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

from waiting import wait_until

from kvelastic import config
from kvelastic.device.selection import resolve
from kvelastic.pool.layout import PageLayout
from kvelastic.pool.pool import ElasticPool, local_range, open_pool

NAME = f"kvc_test_{os.getpid()}"
FILE = Path("/dev/shm", NAME)
MIB = 1 << 20
CAPACITY_BYTES = 1 << 30


def opened() -> ElasticPool:
    """A pool with the variables of this process."""
    settings = config.load()
    device = resolve("cpu", settings)
    layout = PageLayout.solve(64 << 10, 4, page_size_bytes=settings.page_size_bytes)
    return open_pool(
        settings,
        layout,
        64,
        num_blocks=400,
        block_tokens=16,
        engine="vLLM",
        devices=[device],
        memory=local_range(device),
    )


def values(path: Path = FILE) -> tuple[int, int, int]:
    """The file's limit, used and preallocated bytes."""
    limit_bytes, used_bytes, ahead_bytes = struct.unpack("<3q", path.read_bytes())
    return limit_bytes, used_bytes, ahead_bytes


def write_limit(limit_bytes: int) -> None:
    """Set the limit as a client does."""
    with FILE.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.pwrite(file.fileno(), struct.pack("<q", limit_bytes), 0)


def limit_of(pool: ElasticPool) -> int:
    """The limit that the pool applies."""
    return int(pool.segment.control_block.read_usage()["limit_bytes"])


def wait_for_limit(pool: ElasticPool, limit_bytes: int) -> None:
    """Return once the pool applies the limit."""
    wait_until(lambda: limit_of(pool) == limit_bytes, f"the limit is not {limit_bytes}")
