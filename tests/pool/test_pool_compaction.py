"""Cached blocks that move into holes of fuller pages, so that theirs can be given back."""

from __future__ import annotations

import pytest
from native_pools import LAYOUTS, Memory, evicted

from kvelastic import _vmm, errors

B = 8
PAGES = 6


def cached_on(memory: Memory, pool: _vmm.Pool, kept: dict[int, int]) -> list[int]:
    """Fills the pool, tags every block, and keeps `kept[page]` cached blocks of each page."""
    ids = pool.alloc(pool.available_size())
    assert ids is not None
    for tag, block in enumerate(ids):
        memory.write(block, tag % 250 + 1)
    chosen = []
    for page in range(PAGES):
        blocks = [block for block in ids if memory.page_of(block) == page]
        chosen += blocks[: kept.get(page, 0)]
    pool.free([block for block in ids if block not in chosen])
    pool.cache(chosen)
    return chosen


def tags(memory: Memory, blocks: list[int]) -> list[set[int]]:
    return [memory.read(block) for block in blocks]


def current_ids(pool: _vmm.Pool, blocks: list[int]) -> list[int]:
    """Where the blocks are after what has happened; they must not have been evicted."""
    where = {block: block for block in blocks}
    for block, to in pool.take_changes():
        assert to != -1, "evicted"
        origin = next(first for first, at in where.items() if at == block)
        where[origin] = to
    return [where[block] for block in blocks]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["paged", "per buffer", "block that divides no page"])
def test_compaction_empties_pages_and_keeps_contents(layout: str) -> None:
    memory = Memory(LAYOUTS[layout], PAGES)
    pool = memory.pool(movable=True)
    blocks = cached_on(memory, pool, {1: 2, 2: 1, 3: 3, 4: 1, 5: 1})
    before = tags(memory, blocks)
    while pool.compact():
        pool.check_integrity()
    assert tags(memory, current_ids(pool, blocks)) == before
    pool.trim()
    with_null_block = len(blocks) + 1
    assert pool.stats()["pages_mapped"] == -(-with_null_block // memory.layout.blocks_per_page)
    memory.range.check_integrity()


def test_moved_blocks_keep_their_eviction_order() -> None:
    memory = Memory(LAYOUTS["paged"], PAGES)
    pool = memory.pool(movable=True)
    blocks = cached_on(memory, pool, {1: 2, 2: 1, 3: 3})
    while pool.compact():
        pass
    where = current_ids(pool, blocks)
    pool.trim()
    pool.set_limit(pool.mapped_bytes)
    assert pool.alloc(pool.available_size() - len(where)) is not None, "every hole"
    for block in where:
        assert pool.alloc(1) == [block]
        assert pool.take_changes() == [(block, -1)]


def test_lowered_limit_compacts_before_evicting() -> None:
    memory = Memory(LAYOUTS["paged"], PAGES)
    pool = memory.pool(movable=True)
    blocks = cached_on(memory, pool, {1: 2, 2: 2, 3: 2, 4: 2})
    before = tags(memory, blocks)
    assert pool.set_limit(2 * memory.layout.page_bytes)["state"] == "applied"
    assert tags(memory, current_ids(pool, blocks)) == before


def test_pool_without_movable_blocks_evicts() -> None:
    memory = Memory(LAYOUTS["paged"], PAGES)
    pool = memory.pool()
    cached_on(memory, pool, {1: 2, 2: 1})
    assert pool.compact() == 0
    pool.set_limit(memory.layout.page_bytes)
    assert len(evicted(pool)) == 3


def test_failed_copy_leaves_every_block_in_place() -> None:
    memory = Memory(LAYOUTS["paged"], PAGES)
    pool = memory.pool(movable=True)
    blocks = cached_on(memory, pool, {1: 2, 2: 1, 3: 3})
    before, stats = tags(memory, blocks), pool.stats()
    memory.driver.arm(1)
    with pytest.raises(errors.MappingError):
        pool.compact()
    assert pool.take_changes() == []
    assert tags(memory, blocks) == before
    assert pool.stats() == stats
    pool.check_integrity()
    assert pool.compact() > 0


def test_holes_in_parked_pages_are_not_compacted() -> None:
    memory = Memory(LAYOUTS["paged"], PAGES)
    pool = memory.pool(movable=True)
    used = pool.alloc(B - 1)  # all of page 0
    blocks = pool.alloc(3)
    assert used is not None
    assert blocks is not None
    pool.cache(blocks)
    pool.ensure(3 * B)
    assert pool.stats()["pages_parked"] > 0
    assert pool.compact() == 0
