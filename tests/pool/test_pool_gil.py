"""Blocks that need no page are taken without letting go of Python's lock.

An engine has other threads that want it: those that read requests and write answers. Whoever lets
go of it in the middle of a step stands still until they are done, and the workers with it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from native_pools import LAYOUTS, Memory
from two_pools import BLOCKS_PER_PAGE
from two_pools import PAGES as DEVICE_PAGES
from waiting import wait_until

PAGES = 3
CALLS = 5_000
NEVER_S = 1e6
"""Of the interpreter's switch interval: nobody has to let go of the lock."""
NOT_YET_AGAIN_S = 0.008
"""Others are asked for memory again after 10 ms."""
STEPS = 200
"""That take much less time."""
TO_THE_LOCK_S = 0.05
"""Enough for a thread that was woken to come to where it waits for the lock."""


@contextmanager
def wanting() -> Iterator[list[bool]]:
    """Another thread wants Python's lock, always; the list grows whenever it has had it."""
    had: list[bool] = []
    begin, end = threading.Event(), threading.Event()

    def want() -> None:
        begin.wait()
        while not end.is_set():
            had.append(True)
            time.sleep(0)  # lets go of it

    thread = threading.Thread(target=want)
    thread.start()
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(NEVER_S)
    try:
        begin.set()
        until = time.perf_counter() + TO_THE_LOCK_S
        while time.perf_counter() < until:
            pass
        yield had
    finally:
        sys.setswitchinterval(interval_s)
        end.set()
        thread.join()


def calls(work: Callable[[], object], times: int = CALLS) -> bool:
    """Whether another thread had Python's lock while `work` was called many times."""
    with wanting() as had:
        for _ in range(times):
            work()
        return bool(had)


@pytest.fixture
def memory() -> Memory:
    return Memory(LAYOUTS["paged"], PAGES)


@pytest.mark.slow
def test_mapping_call_releases_the_gil(memory) -> None:
    """The test can fail: this call takes time, and lets others run."""
    pool = memory.pool()

    def map_and_unmap() -> None:
        pool.free(pool.alloc(2 * BLOCKS_PER_PAGE))
        pool.trim()

    wait_until(lambda: calls(map_and_unmap, 500))


def test_mapped_free_blocks_are_allocated_under_the_gil(memory) -> None:
    pool = memory.pool()
    pool.free(pool.alloc(BLOCKS_PER_PAGE))

    def step() -> None:
        with_memory = pool.ensure(4)
        assert with_memory >= 4
        pool.free(pool.alloc(4))

    assert not calls(step)


def test_alloc_with_a_full_cache_keeps_the_gil(memory) -> None:
    """A full prefix cache: the usual state of an engine that has worked for a while."""
    pool = memory.pool()
    pool.cache(pool.alloc(PAGES * BLOCKS_PER_PAGE - 1))

    def step() -> None:
        assert pool.ensure(4) == PAGES * BLOCKS_PER_PAGE - 1
        ids = pool.alloc(4)
        pool.take_changes()
        pool.cache(ids)

    assert not calls(step)


def test_alloc_beyond_the_pool_keeps_the_gil(memory) -> None:
    pool = memory.pool()
    used = pool.alloc(PAGES * BLOCKS_PER_PAGE - 2)

    def step() -> None:
        assert pool.ensure(4) == 1
        assert pool.alloc(4) is None

    assert not calls(step)
    pool.free(used)


def test_alloc_on_a_full_device_keeps_the_gil(shared) -> None:
    """The engine asks once in a while, not for every request of every step."""
    a, b = shared.pools
    used = a.alloc(DEVICE_PAGES * BLOCKS_PER_PAGE - 1)

    def step() -> None:
        assert b.ensure(4) == 0
        assert b.alloc(4) is None

    def let_go() -> bool | None:
        """Whether it let go of the lock within the time; None: the machine was too busy."""
        with wanting() as had:
            step()  # asks, if it did not just now
            had.clear()
            begin_s = time.perf_counter()
            for _ in range(STEPS):
                step()
            answer = bool(had)
            return answer if time.perf_counter() - begin_s < NOT_YET_AGAIN_S else None

    with b.session():
        while (answer := let_go()) is None:
            pass
    a.free(used)
    assert answer is False
