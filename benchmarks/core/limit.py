"""A limit lowered from outside on an idle instance: until it is acknowledged, until it holds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.harness import Figure

NAME = f"bench_limit_{os.getpid()}"
GIVEN_BACK = 256 << 20
HIGH = 512 << 20

OWNER = """
import sys
from kvelastic.integration.vllm import interfaces as kvi
kvi.init_kvelastic(device="cpu")
manager = kvi.get_kv_cache_manager(20000, 16, 512, 8)
blocks = 512 * 2**20 // (2 * 8 * 16 * 512) - 64
pool = manager._pool.blocks
for line in sys.stdin:            # one line: fill the cache; the answer: it is filled
    pool.take_changes()
    pool.clear()
    pool.take_changes()
    ids = manager.alloc(blocks)
    pool.cache(ids)
    print("filled", flush=True)
"""


def memfd_bytes(pid: int) -> int:
    """What the instance's memory holds at the operating system."""
    total = 0
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            if "memfd:kvelastic" in str(fd.readlink()):
                total += fd.stat().st_blocks * 512
    return total


def figures() -> list[Figure]:
    from kvelastic.shared import segment

    environment = os.environ | {
        "KVELASTIC_IPC_NAME": NAME,
        "KVELASTIC_HOST_MEMORY": "1G",
        "KVELASTIC_LIMIT": "512M",
        "KVELASTIC_MAX_CACHED_TOKENS": "-1",
        "KVELASTIC_IDLE_TRIM_SECONDS": "-1",
    }
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdin is not None
    assert owner.stdout is not None
    seen = Figure("limit lowered, idle: acknowledged", "ms", [], "<= 1 ms")
    back = Figure("limit lowered, idle: 256 MiB back", "ms", [], "p99 <= 5 ms")
    try:
        for _ in range(100):
            owner.stdin.write("fill\n")
            owner.stdin.flush()
            owner.stdout.readline()
            with segment.open_writable(NAME) as instance, instance.writing() as control_block:
                held = memfd_bytes(owner.pid)
                start = time.perf_counter_ns()
                revision = control_block.write_request(limit_bytes=held - GIVEN_BACK)
                assert control_block.wait_ack(revision, 5.0)
                seen.samples.append((time.perf_counter_ns() - start) / 1e6)
                assert control_block.wait_ack(revision, 5.0, settled=True)
                back.samples.append((time.perf_counter_ns() - start) / 1e6)
                given = held - memfd_bytes(owner.pid)
                assert given >= GIVEN_BACK, f"{given} bytes came back"
                assert control_block.wait_ack(
                    control_block.write_request(limit_bytes=HIGH), 5.0, settled=True
                )
        back.note = f"{given >> 20} MiB seen to be back in the memfd's blocks, every time"
    finally:
        owner.stdin.close()
        owner.wait(10)
    return [seen, back]
