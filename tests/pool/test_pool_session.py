"""A session counts on what it saw: nobody else's call takes blocks away inside it."""

from __future__ import annotations

import threading

import pytest
from native_pools import HUGE, LAYOUTS, Memory, evicted

from kvelastic import errors

B = 8
PAGES = 5


@pytest.fixture
def memory():
    return Memory(LAYOUTS["paged"], PAGES)


def elsewhere(work):
    """Run `work` in another thread and wait for it; raises what it raised."""
    failed = []

    def run():
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def full(memory, pool):
    ids = pool.alloc(PAGES * B - 1)
    return [[b for b in ids if memory.page_of(b) == page] for page in range(PAGES)]


@pytest.mark.parametrize("how", ["free", "cache"])
def test_reclaim_waits_for_another_threads_session(memory, how):
    """The pool shrinks; a session of one thread is open while another thread gives blocks back."""
    pool = memory.pool()
    pages = full(memory, pool)
    assert pool.set_limit(2 * HUGE)["state"] == "shrinking"  # everything is in use
    pool.enter()
    try:
        # Caching is what this thread does itself, so it may evict; what it keeps it counts on.
        elsewhere(lambda: getattr(pool, how)(pages[1] + pages[2] + pages[3]))
        assert not pool.has_evicted, "evicted under another thread's session"
        assert pool.mapped_bytes == PAGES * HUGE
        if how == "cache":
            pool.touch(pages[1])
    finally:
        pool.exit()
    pool.free(pages[4])
    assert pool.limit_state()["state"] == "applied"
    assert pool.mapped_bytes == memory.held_at_the_os() == 2 * HUGE
    pool.check_integrity()


def test_cache_bound_waits_for_another_threads_session(memory):
    pool = memory.pool(max_cached_blocks=2)
    ids = pool.alloc(10)
    pool.cache(ids[:2])
    pool.enter()
    try:
        elsewhere(lambda: pool.cache(ids[2:6]))
        assert not pool.has_evicted, "evicted under another thread's session"
        pool.touch(ids[:2])
    finally:
        pool.exit()
    pool.cache(ids[6:7])
    assert pool.stats()["blocks_cached"] <= 2
    pool.check_integrity()


def test_session_reclaims_in_its_own_calls(memory):
    pool = memory.pool()
    pages = full(memory, pool)
    pool.enter()
    try:
        assert pool.set_limit(3 * HUGE)["state"] == "shrinking"
        pool.cache(pages[2])
        assert sorted(evicted(pool)) == sorted(pages[2])
        assert pool.mapped_bytes == 4 * HUGE
        pool.free(pages[3])
        assert pool.limit_state()["state"] == "applied"
    finally:
        pool.exit()
    assert memory.held_at_the_os() == 3 * HUGE


@pytest.mark.parametrize(
    "call",
    [
        lambda pool: pool.alloc(2),
        lambda pool: pool.set_limit(HUGE),
        lambda pool: pool.trim(),
        lambda pool: pool.clear(),
        lambda pool: pool.try_to_reserve(1),
        lambda pool: pool.enter() or pool.exit(),
    ],
    ids=["alloc", "set_limit", "trim", "clear", "try_to_reserve", "enter"],
)
def test_other_threads_wait_for_the_session(memory, call):
    pool = memory.pool()
    pages = full(memory, pool)
    pool.cache(pages[1])
    pool.free(pages[2])
    pool.enter()
    pool.enter()
    thread = threading.Thread(target=call, args=(pool,))
    thread.start()
    try:
        before = pool.stats()
        thread.join(0.05)
        assert thread.is_alive()
        pool.exit()
        thread.join(0.02)
        assert thread.is_alive(), "sessions are counted"
        assert pool.stats() == before
        pool.touch(pages[1])
    finally:
        pool.exit()
    thread.join()
    pool.check_integrity()


def test_unmatched_session_exit_raises(memory):
    pool = memory.pool()
    with pytest.raises(errors.InvalidArgumentError):
        pool.exit()
    pool.enter()
    with pytest.raises(errors.InvalidArgumentError):
        elsewhere(pool.exit)
    pool.exit()
    elsewhere(lambda: pool.enter() or pool.exit())
