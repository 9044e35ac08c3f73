"""A scheduler that would preempt waits in its session for memory that others were asked for.

The wait may be longer than any test, so what ends it is what the test does.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator

import pytest
from native_pools import HUGE
from two_pools import BLOCKS_PER_PAGE, PAGES, TwoPools
from waiting import wait_until

from kvelastic import _vmm
from kvelastic.pool.scheduling.blocks import SchedulerBlocks
from kvelastic.shared import ledger

LONGER_THAN_A_TEST_S = 3600.0
A_PAGE_AND_MORE = BLOCKS_PER_PAGE + 1


@pytest.fixture
def shared() -> Iterator[TwoPools]:
    name = f"kvwait-{os.getpid()}-{random.randrange(1 << 40):x}"
    made = TwoPools(name, reclaim_wait_s=LONGER_THAN_A_TEST_S)
    yield made
    made.close()


def cache_all(pool: _vmm.Pool, pages: int = PAGES) -> list[int]:
    """Fill that many pages with what no request needs."""
    ids = pool.alloc(pages * BLOCKS_PER_PAGE - 1)
    assert ids is not None
    pool.cache(ids)
    return ids


def prepare(pool: _vmm.Pool, count: int) -> int:
    blocks = SchedulerBlocks(pool)
    with blocks.session():
        return blocks.prepare(count)


def is_asked(shared: TwoPools, which: int) -> bool:
    name = shared.segments[which].name
    members = [member for info in ledger.list_ledgers() for member in info.members]
    return any(member.wanted_bytes > 0 for member in members if member.name == name)


def test_idle_neighbour_releases_pages_within_the_step(shared: TwoPools) -> None:
    a, b = shared.pools
    cache_all(b)
    b.report_busy(False)
    maintenance = _vmm.MaintenanceThread.start(b, shared.segments[1].control_block)
    try:
        assert prepare(a, A_PAGE_AND_MORE) == A_PAGE_AND_MORE
    finally:
        maintenance.stop()
    assert b.mapped_bytes == (PAGES - 2) * HUGE, "no more was taken than was needed"
    assert b.stats()["blocks_cached"] == (PAGES - 2) * BLOCKS_PER_PAGE - 1
    shared.check()


def test_step_does_not_wait_for_a_busy_neighbour(shared: TwoPools) -> None:
    a, b = shared.pools
    cache_all(b)
    b.report_busy(True)
    assert prepare(a, A_PAGE_AND_MORE) < A_PAGE_AND_MORE


def test_pool_evicts_its_own_cache_before_waiting(shared: TwoPools) -> None:
    a, b = shared.pools
    cache_all(a, 2)
    cache_all(b, PAGES - 2)
    b.report_busy(False)  # and nobody serves it
    assert prepare(a, A_PAGE_AND_MORE) == A_PAGE_AND_MORE


def test_request_of_another_instance_ends_the_wait(shared: TwoPools) -> None:
    """In the session nothing is given: who outranks it would wait as long as it does."""
    a, b = shared.pools
    cache_all(a, 1)
    cache_all(b, PAGES - 1)
    b.report_busy(False)  # and nobody serves it
    found: list[int] = []
    step = threading.Thread(target=lambda: found.append(prepare(a, A_PAGE_AND_MORE)))
    step.start()
    wait_until(lambda: is_asked(shared, 1), "it has asked, and waits")
    assert step.is_alive()
    shared.ledgers[1].member.set_priority(1)
    assert shared.ledgers[1].member.request_memory(PAGES << 21)
    step.join()
    assert found[0] < A_PAGE_AND_MORE
