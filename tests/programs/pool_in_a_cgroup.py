"""An instance in a memory cgroup of 256 MiB, which its KV cache fills; then it wants more heap.

pool_in_a_cgroup.py CGROUP SCENARIO      # a function below; ends with 0 where all of it held
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from processes import LineProgram
from waiting import wait_until

MIB = 1 << 20
LIMIT_BYTES = 256 * MIB
MARGIN_BYTES = 16 * MIB
PAGES = 512
STEP_BYTES = 4 * MIB


class Instance:
    """A pool with its maintenance thread, as an engine has it."""

    def __init__(self) -> None:
        from native_pools import LAYOUTS, Memory

        from kvelastic import _vmm
        from kvelastic.shared import segment

        self.page_blocks = LAYOUTS["paged"].blocks_per_page
        self.pool = Memory(LAYOUTS["paged"], PAGES).pool()
        name = f"kvtest_cgroup_{os.getpid()}_{random.randrange(1 << 40):x}"
        self.segment = segment.create(name, engine="test", device="host")
        self.maintenance = _vmm.MaintenanceThread.start(
            self.pool, self.segment.control_block, idle_trim_s=-1.0, watch_memory=True
        )
        self._machine = _vmm.HostMemory()

    def fill(self) -> list[list[int]]:
        """All blocks that can be had, a page's worth each."""
        self.pool.alloc(self.page_blocks - 1)  # beside the null block
        got = list(iter(lambda: self.pool.alloc(self.page_blocks), None))
        assert len(got) * 2 * MIB > LIMIT_BYTES / 4, "there was little to be had"
        return got

    def left_bytes(self) -> int:
        """Of the cgroup, which is tighter than the machine."""
        left: int = self._machine.look()[0]["left_bytes"]
        return left

    def looked(self) -> None:
        """Return when the maintenance thread has looked once more, from beginning to end."""
        looks = self.maintenance.memory_looks
        wait_until(
            lambda: self.maintenance.memory_looks >= looks + 2,
            "the maintenance thread does not look",
        )

    def next_availability_epoch(self, seen: int) -> int:
        """Return the availability epoch once it has changed."""
        wait_until(
            lambda: self.pool.availability_epoch != seen, "nobody says that something has come"
        )
        count: int = self.pool.availability_epoch
        return count

    def close(self) -> None:
        self.pool.check_integrity()
        self.maintenance.stop()
        self.segment.close()


@contextlib.contextmanager
def instance() -> Iterator[Instance]:
    one = Instance()
    yield one
    one.close()


def heap(size_bytes: int) -> bytearray:
    return bytearray(b"\1") * size_bytes


@contextlib.contextmanager
def another_process(size_bytes: int) -> Iterator[LineProgram]:
    """A process of the same cgroup that holds so much until its input ends."""
    program = f"held = b'1' * {size_bytes}; print(1, flush=True); import sys; sys.stdin.read()"
    with LineProgram("-c", program) as process:
        assert process.read() == "1"
        yield process


def caches_are_evicted_for_the_heap() -> None:
    with instance() as one:
        for blocks in one.fill():
            one.pool.cache(blocks)
        before = one.pool.mapped_bytes
        held = []
        for _ in range(20):
            held.append(heap(STEP_BYTES))
            wait_until(lambda: one.left_bytes() >= MARGIN_BYTES, "caches keep what the heap needs")
        given = before - one.pool.mapped_bytes
        assert 60 * MIB <= given <= 110 * MIB, given
        assert one.pool.stats()["blocks_cached"] > 0, "more was dropped than was needed"


def requests_are_preempted_for_the_heap() -> None:
    with instance() as one:
        requests = one.fill()

        def engine_step() -> bool:
            """Over the limit an engine preempts, one request at a time."""
            if one.pool.is_over_limit and requests:
                one.pool.free(requests.pop())
            return one.left_bytes() >= MARGIN_BYTES // 2

        held = []
        for _ in range(20):
            held.append(heap(STEP_BYTES))
            wait_until(engine_step, "requests keep what the heap needs")
        assert len(requests) * 2 * MIB > 20 * MIB, "more was preempted than was needed"


def recurring_peak_stays_free() -> None:
    with instance() as one:
        first = one.pool.alloc(2 * one.page_blocks)
        assert first is not None
        step = heap(60 * MIB)
        one.looked()
        del step
        one.looked()
        for blocks in one.fill():
            one.pool.cache(blocks)
        for _ in range(3):
            step = heap(60 * MIB)
            del step


def refused_alloc_is_notified_of_free_memory() -> None:
    with instance() as one, another_process(40 * MIB) as other:
        one.fill()
        got, seen = None, one.pool.availability_epoch
        assert one.pool.alloc(one.page_blocks) is None
        other.finish()
        while got is None:  # there may be one for a moment before, at the very edge
            seen = one.next_availability_epoch(seen)
            got = one.pool.alloc(one.page_blocks)


def lowered_cgroup_limit_is_respected() -> None:
    from memory_cgroup import MemoryCgroup

    cgroup = MemoryCgroup.at(Path(sys.argv[1]))
    with instance() as one:
        for blocks in one.fill():
            one.pool.cache(blocks)
        for _ in range(10):
            cgroup.limit(cgroup.held_bytes() + STEP_BYTES)
            wait_until(lambda: one.left_bytes() >= MARGIN_BYTES, "the lower limit is not seen")


if __name__ == "__main__":
    (Path(sys.argv[1]) / "cgroup.procs").write_text(str(os.getpid()))
    globals()[sys.argv[2]]()
