"""Memory that goes from an idle model to a busy one: 1 GiB, between two processes.

They take turns: who has had the memory keeps it as cached contents and is idle, the other one's
alloc takes it. Beside it, what the kernel alone takes to make as much memory for one process that
asks nobody: it is a floor on the host, where what another process had must be zeroed on its way.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from benchmarks.harness import Figure

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "programs"))
from ledger_instance import BLOCKS_PER_PAGE, PAGE_BYTES, Instance

MOVED_BYTES = 1 << 30
PAGES = MOVED_BYTES // PAGE_BYTES
BLOCKS = PAGES * BLOCKS_PER_PAGE
SPARE_PAGES = 8
"""For each one's null block, and what it may hold besides."""
IDLE_S = 0.6
"""Longer than the 500 ms after which an instance counts as idle."""


def kernel_ms() -> float:
    """New pages for as many bytes, on a driver of its own: created, mapped and there."""
    from kvelastic import _vmm

    geometry = _vmm.Geometry(
        pages=PAGES, extent_bytes=PAGE_BYTES, block_bytes=PAGE_BYTES // 16, blocks_per_page=16
    )
    memory = _vmm.Range.reserve(_vmm.HostDriver(), geometry)
    start = time.perf_counter_ns()
    memory.map(list(range(PAGES)))
    took_ms = (time.perf_counter_ns() - start) / 1e6
    memory.unmap(list(range(PAGES)))
    memory.trim()
    return took_ms


def figures(rounds: int) -> list[Figure]:
    figure = Figure(
        "1 GiB from an idle model's cache to a busy one", "ms", [], "<= 50 ms",
        "the kernel: 1 GiB of new pages",
    )  # fmt: skip
    device = {
        "KVELASTIC_HOST_MEMORY": str(MOVED_BYTES + SPARE_PAGES * PAGE_BYTES),
        "KVELASTIC_LEDGER": f"bench-moving-{os.getpid()}",
        "KVELASTIC_MAX_CACHED_TOKENS": "-1",
        "KVELASTIC_PAGE_PREALLOC_ENABLED": "false",
        "KVELASTIC_IDLE_TRIM_SECONDS": "-1",
        "KVELASTIC_RECLAIM_WAIT": "30",
    }
    with Instance(**device) as a, Instance(**device) as b:
        cache(a, a.alloc(BLOCKS))
        for number in range(rounds):
            taker = b if number % 2 == 0 else a
            figure.floor_samples.append(kernel_ms())
            time.sleep(IDLE_S)
            told = taker.ask("alloc_timed", BLOCKS)
            assert told["ids"] is not None, "the memory did not come"
            figure.samples.append(told["s"] * 1e3)
            cache(taker, told["ids"])
    return [figure]


def cache(instance: Instance, ids: list[int] | None) -> None:
    assert ids is not None
    instance.cache(ids)
    instance.ask("take_evicted")
