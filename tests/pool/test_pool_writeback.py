"""Blocks with keys: clean ones go first, what is evicted is demoted or dropped, shrinking waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from native_pools import LAYOUTS, Memory, alloc

from kvelastic import _vmm, errors

PAGES = 6
B = 8
NO_KEY = bytes(16)


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def keys(ids: list[int], salt: int = 0) -> bytes:
    return b"".join(key(block + salt + 1) for block in ids)


def filled(memory: Memory, **options: bool) -> tuple[_vmm.Pool, list[int]]:
    """A pool whose every block is cached under a key."""
    pool = memory.pool(**options)
    pool.use_tiers(limit_wait_s=3600, sleep_wait_s=3600, reclaim_wait_s=3600)
    ids = sorted(pool.alloc(pool.available_size()) or [])
    pool.cache(ids, keys(ids))
    return pool, ids


@contextmanager
def demoter(pool: _vmm.Pool, *, most: int = 5, works: bool = True) -> Iterator[dict[bytes, int]]:
    """A thread that copies whatever is wanted; yields how often each key was read."""
    kept: dict[bytes, int] = {}
    attending = threading.Event()
    ending = threading.Event()

    def serve() -> None:
        while not ending.is_set():
            attending.set()
            if pool.next_demotion(3600) is None:
                continue
            batch = pool.begin_writeback(most)
            for i in range(0, len(batch.keys), 16):
                kept[batch.keys[i : i + 16]] = kept.get(batch.keys[i : i + 16], 0) + 1
            pool.end_writeback(batch.ticket, [works] * len(batch.ids))

    pool.next_demotion(0)
    thread = threading.Thread(target=serve)
    thread.start()
    attending.wait()
    try:
        yield kept
    finally:
        ending.set()
        while thread.is_alive():
            pool.stop_demotions()
            thread.join(0.01)


def test_clean_block_is_evicted_before_older_dirty_ones() -> None:
    pool, ids = filled(Memory(LAYOUTS["paged"], PAGES))
    clean = ids[10:12]
    assert pool.mark_clean([*clean, ids[0]], keys([*clean, ids[1]])) == 2
    assert pool.alloc(3) == [*clean, ids[0]]
    assert pool.take_changes() == [(clean[0], -2), (clean[1], -2), (ids[0], -1)]
    stats = pool.stats()
    assert (stats["blocks_demoted"], stats["blocks_dropped"]) == (2, 1)
    pool.check_integrity()


def test_without_tiers_no_eviction_counts_as_dropped() -> None:
    memory = Memory(LAYOUTS["paged"], 2)
    pool = memory.pool()
    ids = alloc(pool, 15)
    pool.cache(ids)
    assert pool.alloc(2) is not None
    stats = pool.stats()
    assert (stats["blocks_evicted"], stats["blocks_dropped"]) == (2, 0)


def test_freed_blocks_do_not_count_as_dropped() -> None:
    pool, ids = filled(Memory(LAYOUTS["paged"], PAGES))
    pool.free(ids[:5])
    pool.clear()
    assert pool.stats()["blocks_dropped"] == 0


@pytest.mark.parametrize("how", ["limit", "sleep"])
def test_limit_and_sleep_wait_for_writeback(how: str) -> None:
    memory = Memory(LAYOUTS["paged"], PAGES)
    pool, ids = filled(memory)
    with demoter(pool) as kept:
        if how == "limit":
            pool.set_limit(2 * memory.layout.page_bytes)
        else:
            assert pool.sleep()["mapped_bytes"] == 0
    stats = pool.stats()
    assert stats["blocks_dropped"] == 0
    gone = [block for block, to in pool.take_changes() if to == -2]
    assert stats["blocks_demoted"] == len(gone) >= 4 * B - 1
    assert {key(block + 1) for block in gone} <= set(kept)
    assert set(kept.values()) == {1}, "none was copied twice"
    if how == "sleep":
        assert sorted(gone) == ids
    pool.check_integrity()


def test_failing_tier_ends_the_writeback_wait() -> None:
    memory = Memory(LAYOUTS["paged"], PAGES)
    pool, _ = filled(memory)
    with demoter(pool, works=False) as kept:
        pool.sleep()
    assert len(kept) == 5, "one batch, and no second one"
    assert pool.stats()["blocks_dropped"] == PAGES * B - 1


def test_without_a_demoter_sleep_does_not_wait() -> None:
    pool, _ = filled(Memory(LAYOUTS["paged"], PAGES))
    pool.sleep()
    pool.wake()
    ids = alloc(pool, 9)
    pool.cache(ids, keys(ids))
    with demoter(pool):
        pass
    pool.sleep()
    assert pool.stats()["blocks_dropped"] == PAGES * B - 1 + 9


def test_stalled_demoter_costs_only_the_deadline() -> None:
    pool, _ = filled(Memory(LAYOUTS["paged"], PAGES))
    pool.use_tiers(limit_wait_s=0.05, sleep_wait_s=0.05)
    assert pool.next_demotion(0) is None
    assert pool.sleep()["mapped_bytes"] == 0
    assert pool.stats()["blocks_dropped"] == PAGES * B - 1


def test_invalid_keys_and_blocks_are_rejected() -> None:
    pool = Memory(LAYOUTS["paged"], 2).pool()
    ids = alloc(pool, 3)
    with pytest.raises(errors.InvalidArgumentError, match="give 16 for each"):
        pool.cache(ids, keys(ids)[:-1])
    with pytest.raises(errors.DoubleFreeError):
        pool.cache([ids[0], ids[0]], keys([1, 2]))
    assert pool.stats()["blocks_cached"] == 0
    pool.free(ids[2:])
    for wrong, error in (
        ([ids[2]], errors.UnknownBlockError),
        ([0], errors.NullBlockError),
        ([10**12], errors.UnknownBlockError),
    ):
        with pytest.raises(error):
            pool.name_blocks(wrong, key(1))
    pool.name_blocks(ids[:2], keys(ids[:2]))
    pool.cache(ids[:2])
    assert pool.begin_writeback(9).keys == keys(ids[:2])
    with pytest.raises(ValueError, match="nan"):
        pool.next_demotion(float("nan"))


def test_writeback_flags_must_match_the_block_count() -> None:
    pool, _ = filled(Memory(LAYOUTS["paged"], 2))
    batch = pool.begin_writeback(3)
    with pytest.raises(errors.InvalidArgumentError, match="3 blocks"):
        pool.end_writeback(batch.ticket, [True])
    assert pool.end_writeback(batch.ticket, [True] * 3) == 3
    assert pool.end_writeback(batch.ticket, [True] * 3) == 0
    assert pool.stats()["blocks_clean"] == 3
    assert pool.forget_copies() == 3


def test_page_stays_mapped_during_its_copy() -> None:
    memory = Memory(LAYOUTS["paged"], PAGES)
    pool, _ = filled(memory)
    batch = pool.begin_writeback(3)
    read = {memory.page_of(block) for block in batch.ids}
    pool.sleep()
    assert {page for page in range(PAGES) if memory.range.is_mapped(page)} == read
    staging = _vmm.Staging(3, pool.record_bytes)
    pool.copy_out(batch.ids, staging, [0, 1, 2])
    pool.end_writeback(batch.ticket, [True] * 3)
    assert pool.sleep()["mapped_bytes"] == 0
    pool.check_integrity()


def test_block_changed_during_writeback_is_reported() -> None:
    pool, ids = filled(Memory(LAYOUTS["paged"], 2))
    batch = pool.begin_writeback(4)
    assert pool.still_unchanged(batch.ticket) == [True] * 4
    pool.touch([ids[1]])
    pool.free([ids[2]])
    assert pool.alloc(1) == [ids[2]], "free at once, while it is read"
    assert pool.still_unchanged(batch.ticket) == [True, True, False, True]
    assert pool.end_writeback(batch.ticket, [True, True, False, True]) == 3
    assert pool.still_unchanged(batch.ticket) == []


def test_cleaned_blocks_stay_cached() -> None:
    pool, ids = filled(Memory(LAYOUTS["paged"], PAGES))
    assert pool.clean(3600) == len(ids), "nobody copies: it answers at once"
    with demoter(pool):
        assert pool.clean(3600) == 0
    stats = pool.stats()
    assert stats["blocks_clean"] == stats["blocks_cached"] == len(ids)
    assert pool.take_changes() == []


def test_blocks_over_the_cache_bound_are_demoted() -> None:
    pool = Memory(LAYOUTS["paged"], PAGES).pool(max_cached_blocks=10)
    pool.use_tiers()
    assert pool.next_demotion(0) is None  # from here on a thread copies
    ids = sorted(alloc(pool, 30))
    pool.cache(ids, keys(ids))
    assert pool.stats()["blocks_cached"] == 30
    batch = pool.begin_writeback(25)
    pool.end_writeback(batch.ticket, [True] * 25)
    stats = pool.stats()
    assert stats["blocks_cached"] == 10
    assert (stats["blocks_demoted"], stats["blocks_dropped"]) == (20, 0)
    pool.check_integrity()


def test_keyless_blocks_over_the_cache_bound_are_evicted() -> None:
    pool = Memory(LAYOUTS["paged"], PAGES).pool(max_cached_blocks=10)
    pool.use_tiers()
    assert pool.next_demotion(0) is None
    ids = sorted(alloc(pool, 30))
    pool.cache(ids[:12], keys(ids[:12]))
    pool.cache(ids[12:])
    assert pool.stats()["blocks_cached"] == 12, "those with keys wait for a copy"
    batch = pool.begin_writeback(30)
    assert batch.ids == ids[:12]
    pool.end_writeback(batch.ticket, [True] * 12)
    assert pool.stats()["blocks_cached"] == 10
    pool.check_integrity()


def test_refused_blocks_over_the_cache_bound_are_dropped() -> None:
    pool = Memory(LAYOUTS["paged"], PAGES).pool(max_cached_blocks=10)
    pool.use_tiers()
    assert pool.next_demotion(0) is None
    ids = sorted(alloc(pool, 30))
    pool.cache(ids, keys(ids))
    batch = pool.begin_writeback(5)
    pool.end_writeback(batch.ticket, [False] * 5)
    assert pool.stats()["blocks_cached"] == 10
    assert pool.stats()["blocks_dropped"] == 20
