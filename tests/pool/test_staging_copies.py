"""Whole blocks, all buffers side by side, to memory between blocks and stores, and back."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from functools import partial
from pathlib import Path

import pytest
from native_pools import LAYOUTS, Memory, alloc
from ring_scheduler import Scheduler

from kvelastic import _vmm, errors

EVERY_LAYOUT = sorted(LAYOUTS)


def fill(memory: Memory, block: int, salt: int) -> bytes:
    """Writes every byte of a block; answers them as a record has them."""
    record = b""
    for buffer in range(memory.layout.buffers):
        at = memory.range.address + memory.layout.offset_bytes(block, buffer, memory.pages)
        part = bytes((salt + buffer + i) % 251 for i in range(memory.layout.block_bytes))
        ctypes.memmove(at, part, len(part))
        record += part
    return record


@pytest.mark.slow
@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_tier_object_holds_the_block_of_all_buffers(layout: str) -> None:
    memory = Memory(LAYOUTS[layout], 6)
    pool = memory.pool()
    ids = alloc(pool, 3)
    records = [fill(memory, block, 10 * i) for i, block in enumerate(ids)]
    staging = _vmm.Staging(4, pool.record_bytes)
    pool.copy_out(ids, staging, [3, 0, 2])
    assert [bytes(staging.view(slot)) for slot in (3, 0, 2)] == records
    pool.copy_in(staging, [0, 2, 3], ids)
    pool.copy_out(ids, staging, [1, 1, 1])
    assert bytes(staging.view(1)) == records[0], "the last one: what was in slot 3"
    fresh = alloc(pool, 1)
    pool.copy_in(staging, [2], fresh)
    pool.copy_out(fresh, staging, [1])
    assert bytes(staging.view(1)) == records[2]
    assert staging.address(1) % 4096 == 0


def test_invalid_copy_is_rejected_and_copies_nothing() -> None:
    memory = Memory(LAYOUTS["paged"], 4)
    pool = memory.pool()
    ids = alloc(pool, 2)
    staging = _vmm.Staging(2, pool.record_bytes)
    staging.view(0)[:] = b"\7" * pool.record_bytes
    for wrong, slots in ((ids, [0, 2]), (ids, [0, -1]), (ids, [0]), ([ids[0], 10**9], [0, 1])):
        with pytest.raises(errors.InvalidArgumentError):
            pool.copy_out(wrong, staging, slots)
    unmapped = memory.layout.first_id(3)
    with pytest.raises(errors.InvalidArgumentError, match="on no mapped page"):
        pool.copy_out([ids[0], unmapped], staging, [0, 1])
    with pytest.raises(errors.InvalidArgumentError, match="a block has"):
        pool.copy_out(ids, _vmm.Staging(2, pool.record_bytes + 4096), [0, 1])
    with pytest.raises(errors.InvalidArgumentError, match="slots"):
        _vmm.Staging(0, 1)
    with pytest.raises(errors.InvalidArgumentError):
        _vmm.Staging(1 << 40, 1 << 20)
    with pytest.raises(errors.InvalidArgumentError):
        staging.view(2)
    assert bytes(staging.view(0)) == b"\7" * pool.record_bytes


def test_view_keeps_the_staging_memory_alive() -> None:
    view = _vmm.Staging(1, 8192).view(0)
    view[0], view[8191] = 1, 2
    assert (len(view), view[0], view[8191]) == (8192, 1, 2)


def test_driver_failure_while_copying_raises() -> None:
    memory = Memory(LAYOUTS["paged"], 4)
    pool = memory.pool()
    ids = alloc(pool, 1)
    staging = _vmm.Staging(1, pool.record_bytes)
    memory.driver.arm(1)
    with pytest.raises(errors.MappingError, match="copy_host"):
        pool.copy_out(ids, staging, [0])
    memory.driver.arm(0)
    pool.copy_out(ids, staging, [0])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["paged", "per buffer"])
def test_tier_object_has_a_part_per_rank(layout: str) -> None:
    with Scheduler(layout, ranks=3) as scheduler, scheduler.all_workers() as workers:
        pool = scheduler.pool
        ids = alloc(pool, 20)
        for block in ids:
            for worker in workers:
                worker.ask(f"write {block} {(block + 7 * worker.rank) % 251 + 1}")
        part = scheduler.layout.block_bytes * scheduler.layout.buffers
        assert pool.record_bytes == 3 * part
        staging = _vmm.Staging(20, pool.record_bytes)
        slots = list(range(20))
        pool.copy_out(ids, staging, slots)
        for block, slot in zip(ids, slots, strict=True):
            for rank in range(3):
                said = staging.view(slot)[rank * part : (rank + 1) * part]
                assert said[0] == said[part - 1] == (block + 7 * rank) % 251 + 1
        pool.copy_in(staging, slots, list(reversed(ids)))
        for block, other in zip(ids, reversed(ids), strict=True):
            for worker in workers:
                told = worker.ask(f"read {other}")
                assert told == str((block + 7 * worker.rank) % 251 + 1)
        bigger = _vmm.Staging(30, pool.record_bytes)
        pool.copy_out(ids[:1], bigger, [29])
        assert bigger.view(29)[0] == staging.view(19)[0]


def test_copy_failure_of_one_rank_fails_the_call() -> None:
    with Scheduler(ranks=3) as scheduler, scheduler.all_workers() as workers:
        pool = scheduler.pool
        ids = alloc(pool, 4)
        staging = _vmm.Staging(4, pool.record_bytes)
        workers[1].ask("arm 1 1")
        with pytest.raises(errors.MappingError, match=r"rank 1\): copy_host"):
            pool.copy_out(ids, staging, [0, 1, 2, 3])
        pool.copy_out(ids, staging, [0, 1, 2, 3])
        pool.check_integrity()


def test_staging_attach_failure_is_undone_on_every_rank() -> None:
    with Scheduler(ranks=3) as scheduler, scheduler.all_workers() as workers:
        pool = scheduler.pool
        ids = alloc(pool, 1)
        part = scheduler.layout.block_bytes * scheduler.layout.buffers
        first, second = (_vmm.Staging(1, pool.record_bytes) for _ in range(2))
        pool.copy_out(ids, first, [0])
        before = resource.prlimit(workers[1].pid, resource.RLIMIT_NOFILE)
        resource.prlimit(workers[1].pid, resource.RLIMIT_NOFILE, (0, before[1]))
        with pytest.raises(errors.MappingError, match=r"rank 1\).*staging"):
            pool.copy_out(ids, second, [0])
        resource.prlimit(workers[1].pid, resource.RLIMIT_NOFILE, before)
        for worker in workers:
            worker.ask(f"write {ids[0]} {50 + worker.rank}")
        pool.copy_out(ids, first, [0])
        assert [first.view(0)[rank * part] for rank in range(3)] == [50, 51, 52]


def allocated_bytes() -> int:
    """Of all staging memory of this process."""
    allocated = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the folder itself
            if str(entry.readlink()).startswith("/memfd:kvelastic-staging"):
                allocated += entry.stat().st_blocks * 512
    return allocated


def test_populated_staging_has_all_its_memory() -> None:
    """Also what does not fill a huge page at the end, and with the contents of before."""
    staging = _vmm.Staging(3, 3 << 20)
    assert staging.address(0) % (2 << 20) == 0, "else no huge page can be mapped there"
    before_bytes = allocated_bytes()
    staging.view(1)[:3] = b"abc"
    staging.populate()
    assert allocated_bytes() - before_bytes == 9 << 20
    assert bytes(staging.view(1)[:4]) == b"abc\0"


def test_forked_child_cannot_use_the_staging_memory() -> None:
    staging = _vmm.Staging(2, 4096)
    staging.view(0)[0] = 7
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (partial(staging.view, 0), partial(staging.address, 0), staging.populate):
            with pytest.raises(errors.DeviceUnavailableError, match="forked child"):
                call()
            refused += 1
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert staging.view(0)[0] == 7
