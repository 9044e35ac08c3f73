"""A limit below what is in use: the pages over it are never allocated from, so they drain."""

from __future__ import annotations

from kvelastic import _vmm
from kvelastic.pool.layout import PageLayout
from kvelastic.pool.pool import native_geometry

MIB = 1 << 20
PAGES = 8
LAYOUT = PageLayout(block_bytes=64 << 10, buffers=4, blocks_per_page=8, extent_bytes=2 * MIB)


def make() -> _vmm.Pool:
    memory = _vmm.Range.reserve(_vmm.HostDriver(), native_geometry(LAYOUT, PAGES))
    total = PAGES * LAYOUT.page_bytes
    return _vmm.Pool(
        memory, max_blocks=PAGES * 8, limit_bytes=total, capacity_bytes=total, preallocate=False
    )


def pages_of(ids: list[int]) -> set[int]:
    return {LAYOUT.page_of(block) for block in ids}


def test_pages_over_the_limit_get_no_new_blocks() -> None:
    pool = make()
    ids = pool.alloc(8 * PAGES - 1)
    assert ids is not None
    by_page = [[b for b in ids if LAYOUT.page_of(b) == page] for page in range(PAGES)]
    # Pages 0 to 3 are nearly full of used blocks, the others hold one each; all hold cached ones.
    for page, blocks in enumerate(by_page):
        keep = 5 if page < 4 else 1
        pool.cache(blocks[keep : keep + 2])
        pool.free(blocks[keep + 2 :])
    state = pool.set_limit(4 * LAYOUT.page_bytes)
    assert state["state"] == "shrinking"
    assert pool.available_size() == 4 * 8 - 1 - (4 * 5 + 4), "what the limit has room for"
    more = pool.alloc(pool.available_size())
    assert more is not None
    assert pages_of(more) <= {0, 1, 2, 3}, "pages over the limit were allocated from"
    pool.check_integrity()
    # The engine gives back what was on the pages over the limit: it holds, with no further call.
    for page in range(4, PAGES):
        pool.free(by_page[page][:1])
    assert pool.limit_state()["state"] == "applied"
    assert pool.mapped_bytes == 4 * LAYOUT.page_bytes
    assert pool.available_size() == 4
    pool.check_integrity()


def test_limit_is_reached_under_continuous_load() -> None:
    """Requests come and go: the pages to drain stay the same ones, so nothing new delays them."""
    pool = make()
    running = [pool.alloc(3) for _ in range((8 * PAGES - 1) // 3)]
    # In another order than they came, so that every page has blocks of many of them.
    running = running[::3] + running[1::3] + running[2::3]
    before = len(running)
    assert pool.set_limit(4 * LAYOUT.page_bytes)["state"] == "shrinking"
    for _ in range(before):
        ended = running.pop(0)
        assert ended is not None
        pool.free(ended)
        while (started := pool.alloc(3)) is not None:
            running.append(started)
        pool.check_integrity()
    assert pool.limit_state()["state"] == "applied"
    assert pool.mapped_bytes == 4 * LAYOUT.page_bytes
    # All that the limit has room for can be used, and all of the device once it is raised again.
    while running:
        pool.free(running.pop() or [])
    assert len(pool.alloc(4 * 8 - 1) or []) == 4 * 8 - 1
    pool.set_limit(PAGES * LAYOUT.page_bytes)
    assert len(pool.alloc(4 * 8) or []) == 4 * 8
    pool.check_integrity()


def test_lower_limit_drops_reservations_before_cached_blocks() -> None:
    """Nobody uses it yet: it makes way, before anything cached, and allocs take what there is."""
    pool = make()
    used = pool.alloc(4)
    cached = pool.alloc(4)
    assert used is not None
    assert cached is not None
    pool.cache(cached)
    assert pool.try_to_reserve(8 * PAGES - 16)
    state = pool.set_limit(2 * LAYOUT.page_bytes)
    assert (state["state"], state["over_bytes"]) == ("applied", 0)
    assert pool.mapped_bytes == 2 * LAYOUT.page_bytes
    assert pool.stats()["blocks_reserved"] == 0
    assert pool.stats()["blocks_cached"] == 4, "what had contents went before what had none"
    pool.check_integrity()
    assert len(pool.alloc(pool.available_size()) or []) == 2 * 8 - 1 - 4
    pool.check_integrity()


def test_limit_met_by_parked_pages_keeps_reservations() -> None:
    pool = make()
    pool.free(pool.alloc(8 * PAGES - 1) or [])
    assert pool.try_to_reserve(8)
    assert pool.set_limit(4 * LAYOUT.page_bytes)["state"] == "applied"
    assert pool.stats()["blocks_reserved"] == 8
    pool.check_integrity()


def test_reservation_fails_while_over_the_limit() -> None:
    pool = make()
    by_page: dict[int, list[int]] = {}
    for block in pool.alloc(8 * PAGES - 1) or []:
        by_page.setdefault(LAYOUT.page_of(block), []).append(block)
    for blocks in by_page.values():
        pool.free(blocks[2:])
    assert pool.set_limit(3 * LAYOUT.page_bytes)["state"] == "shrinking"
    assert pool.available_size() > 0
    assert not pool.try_to_reserve(1)
    assert pool.stats()["blocks_reserved"] == 0
    pool.check_integrity()
