"""The availability epoch increases when more blocks become available, and wakes waiters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from native_pools import HUGE, alloc
from two_pools import BLOCKS_PER_PAGE, PAGES, TwoPools
from waiting import wait_until

from kvelastic import _vmm
from kvelastic.shared import ledger

FOREVER_S = -1.0


def test_availability_epoch_rises_only_with_new_blocks(shared: TwoPools) -> None:
    pool, _ = shared.pools

    def comes(what: str, act: Callable[[], object]) -> None:
        before = pool.availability_epoch
        act()
        assert pool.availability_epoch > before, what

    def goes(what: str, act: Callable[[], object]) -> None:
        before = pool.availability_epoch
        act()
        assert pool.availability_epoch == before, what

    comes("a page", lambda: pool.ensure(4))
    goes("nothing", lambda: pool.ensure(4))
    before = pool.availability_epoch
    ids = alloc(pool, 4)
    assert pool.availability_epoch == before, "an alloc of what was there"
    comes("blocks given back", lambda: pool.free(ids[:2]))
    comes("blocks cached, which an alloc may evict", lambda: pool.cache(ids[2:]))
    goes("cached blocks used again", lambda: pool.touch(ids[2:]))
    goes("a limit lowered", lambda: pool.set_limit(HUGE))
    comes("a limit raised", lambda: pool.set_limit(PAGES * HUGE))
    pool.free(ids[2:])
    goes("sleep", pool.sleep)
    comes("a wake", pool.wake)
    goes("a failed try", lambda: pool.alloc(PAGES * BLOCKS_PER_PAGE + 1))


def test_waiter_sees_earlier_and_later_releases(shared: TwoPools) -> None:
    pool, _ = shared.pools
    ids = pool.alloc(4)
    seen = pool.availability_epoch
    assert pool.wait_for_epoch(seen, 0.001) == seen
    pool.free(ids or [])
    assert pool.wait_for_epoch(seen, FOREVER_S) > seen, "it came before the wait"
    ids = pool.alloc(4)
    seen = pool.availability_epoch
    other = threading.Thread(target=pool.free, args=(ids,))
    other.start()
    assert pool.wait_for_epoch(seen, FOREVER_S) > seen
    other.join()


@contextmanager
def waiting(shared: TwoPools) -> Iterator[threading.Thread]:
    """A thread that waits for memory in the first pool, which has a maintenance thread.

    An ask that is not repeated lapses after 250 ms. In the body it has lasted longer than twice
    that, by the wait alone.
    """
    pool, name = shared.pools[0], shared.segments[0].name

    def request_age_s() -> float:
        members = [one for info in ledger.list_ledgers() for one in info.members]
        return next(one.ask_s for one in members if one.name == name and one.ask_bytes > 0)

    def lasts() -> bool:
        try:
            return request_age_s() > 0.6
        except StopIteration:  # it has not asked yet, or before the thread waited
            with pool.session():  # in it no call waits, as in a step of an engine
                assert pool.ensure(4) == 0
            return False

    maintenance = _vmm.MaintenanceThread.start(
        pool, shared.segments[0].control_block, idle_trim_s=FOREVER_S
    )
    seen = pool.availability_epoch
    waiter = threading.Thread(target=pool.wait_for_epoch, args=(seen, FOREVER_S), daemon=True)
    waiter.start()
    try:
        wait_until(lasts, "the wait does not repeat the ask")
        assert (waiter.is_alive(), pool.availability_epoch) == (True, seen)
        yield waiter
    finally:
        maintenance.stop()


@pytest.mark.slow
def test_page_released_by_neighbour_ends_the_wait(shared: TwoPools) -> None:
    """With no alloc in between: the maintenance thread gets what the last one could not have."""
    a, b = shared.pools
    ids = alloc(b, PAGES * BLOCKS_PER_PAGE - 1)
    with waiting(shared) as waiter:
        b.cache(ids)  # idle from here on, and nobody rings: the next ask finds it
        giving = _vmm.MaintenanceThread.start(
            b, shared.segments[1].control_block, idle_trim_s=FOREVER_S
        )
        try:
            waiter.join()
            assert a.available_mapped() >= BLOCKS_PER_PAGE - 1
        finally:
            giving.stop()


@pytest.mark.slow
def test_reclaim_request_stands_while_a_thread_waits(shared: TwoPools) -> None:
    a, b = shared.pools
    ids = alloc(b, PAGES * BLOCKS_PER_PAGE - 1)
    with waiting(shared) as waiter:
        b.free(ids)
        b.trim()  # there is room now; only the first pool's maintenance thread looks
        waiter.join()
        assert a.available_mapped() >= BLOCKS_PER_PAGE - 1
