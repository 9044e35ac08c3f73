"""`arrivals`: what goes up when blocks can be had that could not be had before, and who waits."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator

import pytest
from native_pools import HUGE, alloc
from two_pools import BLOCKS_PER_PAGE, PAGES, TwoPools

from kvelastic import _vmm

FOREVER_S = -1.0


@pytest.fixture
def shared() -> Iterator[TwoPools]:
    made = TwoPools(f"kvparrive-{os.getpid()}-{random.randrange(1 << 40):x}")
    yield made
    made.close()


def test_it_goes_up_with_what_comes_and_not_with_what_goes(shared: TwoPools) -> None:
    pool, _ = shared.pools

    def comes(what: str, act: Callable[[], object]) -> None:
        before = pool.arrivals
        act()
        assert pool.arrivals > before, what

    def goes(what: str, act: Callable[[], object]) -> None:
        before = pool.arrivals
        act()
        assert pool.arrivals == before, what

    comes("a page", lambda: pool.ensure(4))
    goes("nothing", lambda: pool.ensure(4))
    before = pool.arrivals
    ids = alloc(pool, 4)
    assert pool.arrivals == before, "an alloc of what was there"
    comes("blocks given back", lambda: pool.free(ids[:2]))
    comes("blocks cached, which an alloc may evict", lambda: pool.cache(ids[2:]))
    goes("cached blocks used again", lambda: pool.touch(ids[2:]))
    goes("a limit lowered", lambda: pool.set_limit(HUGE))
    comes("a limit raised", lambda: pool.set_limit(PAGES * HUGE))
    pool.free(ids[2:])
    goes("sleep", pool.sleep)
    comes("a wake", pool.wake)
    goes("a failed try", lambda: pool.alloc(PAGES * BLOCKS_PER_PAGE + 1))


def test_who_waits_hears_of_what_came_before_and_of_what_comes(shared: TwoPools) -> None:
    pool, _ = shared.pools
    ids = pool.alloc(4)
    seen = pool.arrivals
    assert pool.wait_for_arrival(seen, 0.001) == seen
    pool.free(ids or [])
    assert pool.wait_for_arrival(seen, FOREVER_S) > seen, "it came before the wait"
    ids = pool.alloc(4)
    seen = pool.arrivals
    other = threading.Thread(target=pool.free, args=(ids,))
    other.start()
    assert pool.wait_for_arrival(seen, FOREVER_S) > seen
    other.join()


def test_a_page_that_a_neighbour_gives_up_ends_the_wait(shared: TwoPools) -> None:
    """With no alloc in between: the keeper gets what the last one could not have."""
    a, b = shared.pools
    ids = b.alloc(PAGES * BLOCKS_PER_PAGE - 1)
    assert ids is not None
    keeper = _vmm.Keeper.start(a, shared.segments[0].record, idle_trim_s=FOREVER_S)
    try:
        seen = a.arrivals
        a.enter()  # in a session nobody waits, as in a step of an engine
        try:
            assert a.ensure(4) == 0
        finally:
            a.exit()
        b.cache(ids)  # idle from here on, and nobody rings: the next ask finds it
        giving = _vmm.Keeper.start(b, shared.segments[1].record, idle_trim_s=FOREVER_S)
        try:
            while (now := a.wait_for_arrival(seen, FOREVER_S)) == seen:
                pass
            assert now > seen
            assert a.available_mapped() >= BLOCKS_PER_PAGE - 1
        finally:
            giving.stop()
    finally:
        keeper.stop()


def test_what_is_awaited_is_asked_for_as_long_as_somebody_waits(shared: TwoPools) -> None:
    """An ask lapses when nobody has repeated it for a while; a wait repeats it."""
    a, b = shared.pools
    ids = b.alloc(PAGES * BLOCKS_PER_PAGE - 1)
    assert ids is not None
    keeper = _vmm.Keeper.start(a, shared.segments[0].record, idle_trim_s=FOREVER_S)
    try:
        seen = a.arrivals
        assert a.alloc(4) is None
        for _ in range(60):  # more than twice as long as an ask lasts by itself
            assert a.wait_for_arrival(seen, 0.01) == seen
        b.free(ids)
        b.trim()  # there is room now, and nobody but the keeper of the first looks for it
        while a.wait_for_arrival(seen, 0.01) == seen:
            pass
        assert a.available_mapped() >= BLOCKS_PER_PAGE - 1
    finally:
        keeper.stop()
