"""Which block an alloc gives, which it evicts, and which mistakes it tells."""

from __future__ import annotations

import pytest
from native_pools import HUGE, LAYOUTS, Memory, evicted

from kvelastic import errors

B = 8  # blocks a page of the paged layout
PAGES = 5


@pytest.fixture
def memory():
    return Memory(LAYOUTS["paged"], PAGES)


def full(memory, pool):
    """All blocks of the pool, by page."""
    ids = pool.alloc(PAGES * B - 1)
    return [[b for b in ids if memory.page_of(b) == page] for page in range(PAGES)]


# ------------------------------------------------------------------------------------ which page


@pytest.mark.parametrize(
    ("open_blocks", "count", "taken"),
    [
        # free blocks of pages 0 to 4         of which pages the blocks come
        ((2, 5, 3, 7, 0), 3, [2]),  # the fullest that holds all three
        ((2, 5, 3, 7, 0), 2, [0]),
        ((2, 5, 3, 7, 0), 4, [1]),
        ((2, 5, 3, 7, 0), 7, [3]),
        ((2, 5, 3, 7, 0), 8, [0, 3]),  # no page holds all: the emptiest, then what fits the rest
        ((2, 5, 3, 7, 0), 10, [2, 3]),
        ((0, 0, 1, 8, 0), 1, [2]),  # a parked page is for when nothing else will do
        ((0, 0, 1, 8, 0), 2, [2, 3]),
        ((0, 8, 0, 8, 0), 2, [3]),  # the page that was parked last
        ((1, 1, 1, 1, 1), 5, [0, 1, 2, 3, 4]),
        ((0, 6, 0, 6, 0), 6, [1]),  # first come, first taken
    ],
)
def test_alloc_takes_the_fullest_page_that_fits(memory, open_blocks, count, taken):
    pool = memory.pool()
    pages = full(memory, pool)
    for page, number in enumerate(open_blocks):
        if number:
            pool.free(pages[page][:number])
    ids = pool.alloc(count)
    assert sorted({memory.page_of(block) for block in ids}) == taken
    pool.check_integrity()


def test_alloc_over_limit_fills_the_fullest_page_first(memory):
    pool = memory.pool()
    pages = full(memory, pool)
    for page, number in ((1, 6), (2, 7), (3, 6), (4, 1)):
        pool.free(pages[page][:number])
    assert pool.set_limit(3 * HUGE)["state"] == "shrinking"
    assert [memory.page_of(block) for block in pool.alloc(2)] == [4, 1]
    pool.check_integrity()


# ---------------------------------------------------------------------------------------- evicted


def test_alloc_evicts_least_recently_cached_blocks_first(memory):
    pool = memory.pool()
    pages = full(memory, pool)
    order = [pages[3][2], pages[1][0], pages[4][7], pages[1][1]]
    pool.cache(order[:2])
    pool.cache(order[2:])
    assert pool.alloc(1) == order[:1]
    assert pool.has_evicted
    assert evicted(pool) == order[:1]
    assert not pool.has_evicted
    pool.touch(order[1:2])  # used since: the others go first
    pool.cache(order[1:2])
    assert sorted(pool.alloc(2)) == sorted(order[2:])
    assert evicted(pool) == order[2:]
    assert pool.alloc(2) is None
    assert evicted(pool) == []
    pool.check_integrity()


def test_free_block_is_taken_before_a_cached_one(memory):
    pool = memory.pool()
    pages = full(memory, pool)
    pool.cache(pages[2][:3])
    pool.free(pages[1][:2])
    assert set(pool.alloc(2)) == set(pages[1][:2])
    assert not pool.has_evicted


def test_new_page_is_mapped_before_evicting_cached_blocks(memory):
    pool = memory.pool()
    ids = pool.alloc(2 * B - 1)
    pool.cache(ids)
    assert pool.alloc(1) is not None
    assert not pool.has_evicted
    assert pool.mapped_bytes == 3 * HUGE


def test_cheapest_page_is_evicted_first(memory):
    pool = memory.pool()
    pages = full(memory, pool)
    for page, kept in ((1, 5), (2, 2), (3, 8), (4, 3)):
        pool.cache(pages[page][:kept])
        if kept < B:
            pool.free(pages[page][kept:])
    for limit, gone in ((4, pages[2][:2]), (3, pages[4][:3]), (2, pages[1][:5]), (1, pages[3])):
        assert pool.set_limit(limit * HUGE)["state"] == "applied"
        assert sorted(evicted(pool)) == sorted(gone)
        assert memory.held_at_the_os() == limit * HUGE
        pool.check_integrity()


def test_parked_pages_are_released_before_cached_ones(memory):
    pool = memory.pool()
    pages = full(memory, pool)
    pool.cache(pages[1])
    pool.free(pages[2] + pages[3])
    pool.set_limit(3 * HUGE)
    assert evicted(pool) == []
    assert pool.stats()["blocks_cached"] == B


@pytest.mark.parametrize("bound", [0, 1, 5, B, 11])
def test_cached_blocks_stay_within_the_bound(memory, bound):
    pool = memory.pool(max_cached_blocks=bound)
    ids = pool.alloc(3 * B - 1)
    for block in ids:
        pool.cache([block])
        assert pool.stats()["blocks_cached"] <= bound
    gone = evicted(pool)
    assert len(gone) == len(set(gone)) == len(ids) - bound
    assert pool.stats()["blocks_cached"] == bound
    kept = [block for block in ids if block not in set(gone)]
    if kept:
        pool.touch(kept)
    pool.check_integrity()


def test_cache_bound_evicts_whole_pages_if_equally_cheap(memory):
    pool = memory.pool(max_cached_blocks=B)
    pages = full(memory, pool)
    pool.cache(pages[1][:2])
    pool.free(pages[1][2:])
    pool.cache(pages[2])  # 2 too many: page 1 as a whole is just those two
    assert sorted(evicted(pool)) == sorted(pages[1][:2])
    pool.cache(pages[3][:1])  # 1 too many: no page is that cheap, so the oldest goes
    assert evicted(pool) == pages[2][:1]


# ------------------------------------------------------------------------------------- mistakes


def states(pool):
    names = ("blocks_used", "blocks_cached", "blocks_reserved", "blocks_available", "pages_mapped")
    return {name: pool.stats()[name] for name in names}


def test_invalid_ids_raise_and_change_nothing():
    for name, layout in LAYOUTS.items():
        memory = Memory(layout, PAGES)
        pool = memory.pool()
        ids = pool.alloc(PAGES * layout.blocks_per_page - 1)
        pool.free(ids[1:2])
        pool.cache(ids[2:3])
        good, free, cached = ids[0], ids[1], ids[2]
        before = states(pool)
        last = layout.first_id(PAGES - 1) + layout.blocks_per_page - 1
        unknown = [-1, last + 1, 1 << 40, (1 << 63) - 1, -(1 << 63)]
        unknown += [i for i in range(1, last) if not layout.is_valid(i, PAGES)][:3]
        for call in (pool.free, pool.cache, pool.touch):
            fine = cached if call.__name__ == "touch" else good
            for block in unknown:
                with pytest.raises(errors.UnknownBlockError, match=str(block)):
                    call([fine, block])
            with pytest.raises(errors.NullBlockError):
                call([fine, 0])
            with pytest.raises(errors.DoubleFreeError, match=str(free)):
                call([fine, free])
            with pytest.raises(errors.DoubleFreeError):
                call([cached, cached])
            with pytest.raises((TypeError, OverflowError)):
                call([fine, 1 << 63])
            with pytest.raises(TypeError):
                call([fine, 1.0])
        with pytest.raises(errors.DoubleFreeError):
            pool.touch([good])
        with pytest.raises(errors.DoubleFreeError):
            pool.cache([cached])
        assert states(pool) == before, name
        pool.check_integrity()


@pytest.mark.parametrize("call", ["free", "cache", "touch"])
def test_reserved_block_cannot_be_freed_cached_or_touched(memory, call):
    """It was never handed out, so only a mistake can name it."""
    pool = memory.pool()
    assert pool.try_to_reserve(B - 1)
    before = states(pool)
    for block in range(1, B):
        with pytest.raises(errors.DoubleFreeError):
            getattr(pool, call)([block])
    assert states(pool) == before
    assert sorted(pool.alloc(B - 1)) == list(range(1, B))
    pool.check_integrity()


def test_unsatisfiable_counts_return_none(memory):
    pool = memory.pool()
    before = states(pool)
    for count in (PAGES * B, 1 << 31, 1 << 32, 1 << 62, (1 << 64) - 1):
        assert pool.alloc(count) is None
        assert not pool.try_to_reserve(count)
        assert pool.ensure(count) == 0
    for count in (-1, 1 << 64, 1.5, "1", None):
        with pytest.raises(TypeError):
            pool.alloc(count)
    assert pool.alloc(0) == []
    assert states(pool) == before
    assert memory.held_at_the_os() == 0
    assert pool.try_to_reserve(3)
    assert not pool.try_to_reserve((1 << 64) - 1)
    assert pool.stats()["blocks_reserved"] == 3


@pytest.mark.parametrize(
    "options",
    [{"max_blocks": 0}, {"max_blocks": 1}, {"min_reserved_pages": 3, "max_reserved_pages": 2}],
    ids=str,
)
def test_invalid_pool_options_are_rejected(memory, options):
    with pytest.raises(errors.InvalidArgumentError):
        memory.pool(**options)


# ---------------------------------------------------------------------------------- reservations


def test_reserved_blocks_serve_the_next_alloc(memory):
    pool = memory.pool()
    assert pool.try_to_reserve(10)
    assert pool.try_to_reserve(5)
    assert pool.stats()["blocks_reserved"] == 15
    maps = memory.host.stats()["maps"]
    memory.driver.arm(1, 10**9)  # whatever it needs is there: no driver call is made
    ids = pool.alloc(15)
    memory.driver.arm(0)
    assert len(ids) == 15
    assert memory.host.stats()["maps"] == maps
    assert pool.stats()["blocks_reserved"] == 0
    assert not pool.try_to_reserve(pool.available_size() + 1)
    assert pool.try_to_reserve(pool.available_size())
    pool.free_reserved()
    assert pool.available_size() == PAGES * B - 1 - 15


def test_at_most_max_blocks_are_in_use(memory):
    pool = memory.pool(max_blocks=11)
    assert pool.available_size() == 10
    ids = pool.alloc(10)
    assert pool.alloc(1) is None
    assert pool.ensure(1) == 0
    pool.cache(ids[:4])
    assert pool.available_size() == 4
    assert len(pool.alloc(4)) == 4


def test_clear_invalidates_all_blocks(memory):
    pool = memory.pool()
    ids = pool.alloc(20)
    pool.cache(ids[:5])
    assert pool.try_to_reserve(4)
    pool.clear()
    assert sorted(evicted(pool)) == sorted(ids[:5])
    assert pool.stats()["blocks_used"] == pool.stats()["blocks_reserved"] == 0
    assert pool.available_size() == PAGES * B - 1
    for block in ids:
        with pytest.raises(errors.DoubleFreeError):
            pool.free([block])
    assert len(set(pool.alloc(PAGES * B - 1))) == PAGES * B - 1
    pool.check_integrity()


# --------------------------------------------------------------------------------------- limits


def test_shrink_then_grow_hands_out_each_block_once(memory):
    pool = memory.pool(limit_bytes=3 * HUGE)
    first = pool.alloc(10)
    for block in first:
        memory.write(block, 1)
    assert pool.set_limit(2 * HUGE)["state"] == "applied"
    assert pool.set_limit(PAGES * HUGE)["state"] == "applied"
    second = pool.alloc(pool.available_size())
    assert len({*first, *second}) == PAGES * B - 1
    for block in second:
        memory.write(block, 2)
    assert all(memory.read(block) == {1} for block in first)
    assert all(memory.read(block) == {2} for block in second)
    assert memory.held_at_the_os() == PAGES * HUGE


@pytest.mark.parametrize(
    ("limit", "pages"),
    [
        (0, 1),
        (1, 1),
        (HUGE - 1, 1),
        (HUGE, 1),
        (3 * HUGE - 1, 2),
        (9 * HUGE, 4),
        ((1 << 64) - 1, 4),
    ],
)
def test_limit_is_rounded_to_pages_of_the_device(memory, limit, pages):
    pool = memory.pool(capacity_bytes=4 * HUGE)
    state = pool.set_limit(limit)
    assert state == {
        "state": "applied",
        "limit_bytes": limit,
        "effective_limit_bytes": pages * HUGE,
        "mapped_bytes": 0,
        "over_bytes": 0,
    }
    assert pool.available_size() == pages * B - 1
    assert len(pool.alloc(pages * B - 1)) == pages * B - 1
    assert memory.held_at_the_os() == pages * HUGE


def test_ensure_maps_within_the_limit_and_evicts_nothing(memory):
    pool = memory.pool(limit_bytes=3 * HUGE)
    assert pool.ensure(1) == B - 1
    assert memory.held_at_the_os() == HUGE
    ids = pool.alloc(B - 1)
    pool.cache(ids[:4])
    assert pool.ensure(B) == B + 4
    assert memory.held_at_the_os() == 2 * HUGE
    assert pool.ensure(2 * B) == 2 * B + 4
    assert pool.ensure(2 * B + 1) == 2 * B + 4, "only eviction would make one more"
    assert pool.ensure(3 * B) == 2 * B + 4
    assert not pool.has_evicted
    assert pool.available_mapped() == 2 * B + 4
    pool.check_integrity()
