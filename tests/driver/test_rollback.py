"""After a failed batch everything is as it was before: bytes held, too. Complements test_faults."""

from __future__ import annotations

import pytest
from native_pools import HUGE, LAYOUTS, Memory, evicted

from kvelastic import errors

PAGES = 8
layouts = pytest.mark.parametrize("name", ["paged", "per buffer"])


def calls_of(memory: Memory, work) -> int:
    memory.driver.arm(0)
    work()
    return memory.driver.calls


@layouts
@pytest.mark.parametrize("recycled", [0, 2], ids=["nothing kept", "two pages kept"])
def test_failed_map_leaves_held_bytes_unchanged(name: str, recycled: int) -> None:
    batch = [1, 2, 4, 7]
    trial = Memory(LAYOUTS[name], PAGES)
    calls = calls_of(trial, lambda: trial.range.map(batch))
    for fail_at in range(1, calls + 1):
        memory = Memory(LAYOUTS[name], PAGES)
        memory.range.map([0, *range(5, 5 + recycled)])
        memory.range.unmap(list(range(5, 5 + recycled)))
        held, handles = memory.range.held_bytes, memory.host.stats()
        memory.driver.arm(fail_at)
        try:
            memory.range.map(batch)
        except errors.DriverError:
            after = memory.host.stats()
            assert memory.range.held_bytes == held, f"call {fail_at}"
            assert memory.held_at_the_os() == held, f"call {fail_at}"
            alive = after["creates"] - after["destroys"]
            assert alive == handles["creates"] - handles["destroys"]
            assert [p for p in range(PAGES) if memory.range.is_mapped(p)] == [0]
        else:
            assert recycled, "every call of a map can fail"  # fewer creates where some are kept


@layouts
def test_failed_destroy_is_retried_by_the_next_call(name: str) -> None:
    """The pool says that the memory is given back; so it must be, at the latest by the next."""
    memory = Memory(LAYOUTS[name], PAGES)
    pool = memory.pool()
    ids = pool.alloc(40)
    assert ids is not None
    pool.free(ids)
    unmaps = calls_of(memory, pool.trim)
    ids = pool.alloc(40)
    assert ids is not None
    pool.free(ids)
    memory.driver.arm(unmaps)  # the last call of the trim: a destroy
    pool.trim()
    assert pool.mapped_bytes == memory.layout.page_bytes
    assert memory.held_at_the_os() == memory.range.held_bytes == memory.layout.page_bytes
    ids = pool.alloc(40)
    assert ids is not None
    pool.free(ids)
    memory.driver.arm(unmaps - 1, 10**9)  # and for a while it cannot be destroyed at all
    pool.trim()
    assert memory.held_at_the_os() == memory.range.held_bytes > memory.layout.page_bytes
    memory.driver.arm(0)
    ids = pool.alloc(3 * 8)
    assert ids is not None
    pool.free(ids)
    pool.trim()
    assert memory.held_at_the_os() == memory.range.held_bytes == memory.layout.page_bytes


@layouts
@pytest.mark.parametrize("count", [1, 10**9], ids=["once", "for ever"])
def test_alloc_out_of_memory_returns_none_without_changes(name: str, count: int) -> None:
    memory = Memory(LAYOUTS[name], PAGES)
    pool = memory.pool()
    ids = pool.alloc(3 * 8 - 1)
    assert ids is not None
    for block in ids:
        memory.write(block, 9)
    pool.cache(ids[:6])
    before = pool.stats()
    for fail_at in range(1, 40 if count == 1 else 2):
        memory.driver.arm(fail_at, count)
        got = pool.alloc(30)
        memory.driver.arm(0)
        if memory.range.failed:
            pytest.fail("a create or map that fails can be undone")
        if got is not None:
            pool.free(got)
            pool.trim()
            break
        assert evicted(pool) == [], f"call {fail_at}: contents were dropped for nothing"
        after = pool.stats()
        assert after["alloc_failures"] == before["alloc_failures"] + fail_at
        same = ("blocks_used", "blocks_cached", "pages_mapped", "blocks_available")
        assert {k: after[k] for k in same} == {k: before[k] for k in same}
        assert pool.mapped_bytes == memory.held_at_the_os() == memory.range.held_bytes
    assert all(memory.read(block) == {9} for block in ids)
    pool.check_integrity()


def test_alloc_out_of_memory_evicts_cached_blocks() -> None:
    memory = Memory(LAYOUTS["paged"], PAGES)
    pool = memory.pool()
    ids = pool.alloc(3 * 8 - 1)
    assert ids is not None
    pool.cache(ids[:6])
    memory.driver.arm(1, 10**9)
    got = pool.alloc(6)
    memory.driver.arm(0)
    assert sorted(got or ()) == sorted(ids[:6])
    assert evicted(pool) == ids[:6]
    assert memory.held_at_the_os() == 3 * HUGE


@layouts
def test_pool_with_failed_unmap_refuses_allocations(name: str) -> None:
    """An unmap failed and could not be undone: no block of those pages may be touched again."""
    memory = Memory(LAYOUTS[name], PAGES)
    pool = memory.pool()
    ids = pool.alloc(5 * 8 - 1)
    assert ids is not None
    pool.free([block for block in ids if memory.page_of(block) in {1, 3, 4}])
    memory.driver.arm(2, 10**9)  # the second run stays mapped, the first is not mapped again
    with pytest.raises(errors.PoolFailedError):
        pool.trim()
    memory.driver.arm(0)
    assert memory.range.failed
    for call in (
        lambda: pool.alloc(1),
        lambda: pool.ensure(10),
        lambda: pool.try_to_reserve(1),
    ):
        with pytest.raises(errors.PoolFailedError):
            call()
    assert pool.available_size() == 0
    assert pool.available_mapped() == 0
    mine = [block for block in ids if memory.page_of(block) in {0, 2}]
    for block in mine:
        memory.write(block, 5)
    pool.free(mine)  # what is the caller's can still be given back
    pool.check_integrity()
    memory.give_up()
