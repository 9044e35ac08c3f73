"""A session counts on what it saw: nobody else's call takes blocks away inside it."""

from __future__ import annotations

import contextlib
import signal
import threading

import pytest
from native_pools import HUGE, LAYOUTS, Memory, evicted

from kvelastic import errors
from kvelastic.pool.scheduling.blocks import SchedulerBlocks

B = 8
PAGES = 5
INTERRUPTS = 50


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


def one_session(pool):
    with pool.session():
        pass


def full(memory, pool):
    ids = pool.alloc(PAGES * B - 1)
    return [[b for b in ids if memory.page_of(b) == page] for page in range(PAGES)]


@pytest.mark.parametrize("how", ["free", "cache"])
def test_reclaim_waits_for_another_threads_session(memory, how):
    """The pool shrinks; a session of one thread is open while another thread gives blocks back."""
    pool = memory.pool()
    pages = full(memory, pool)
    assert pool.set_limit(2 * HUGE)["state"] == "shrinking"  # everything is in use
    with pool.session():
        # Caching is what this thread does itself, so it may evict; what it keeps it counts on.
        elsewhere(lambda: getattr(pool, how)(pages[1] + pages[2] + pages[3]))
        assert not pool.has_evicted, "evicted under another thread's session"
        assert pool.mapped_bytes == PAGES * HUGE
        if how == "cache":
            pool.touch(pages[1])
    pool.free(pages[4])
    assert pool.limit_state()["state"] == "applied"
    assert pool.mapped_bytes == memory.held_at_the_os() == 2 * HUGE
    pool.check_integrity()


def test_cache_bound_waits_for_another_threads_session(memory):
    pool = memory.pool(max_cached_blocks=2)
    ids = pool.alloc(10)
    pool.cache(ids[:2])
    with pool.session():
        elsewhere(lambda: pool.cache(ids[2:6]))
        assert not pool.has_evicted, "evicted under another thread's session"
        pool.touch(ids[:2])
    pool.cache(ids[6:7])
    assert pool.stats()["blocks_cached"] <= 2
    pool.check_integrity()


def test_session_reclaims_in_its_own_calls(memory):
    pool = memory.pool()
    pages = full(memory, pool)
    with pool.session():
        assert pool.set_limit(3 * HUGE)["state"] == "shrinking"
        pool.cache(pages[2])
        assert sorted(evicted(pool)) == sorted(pages[2])
        assert pool.mapped_bytes == 4 * HUGE
        pool.free(pages[3])
        assert pool.limit_state()["state"] == "applied"
    assert memory.held_at_the_os() == 3 * HUGE


@pytest.mark.parametrize(
    "call",
    [
        lambda pool: pool.alloc(2),
        lambda pool: pool.set_limit(HUGE),
        lambda pool: pool.trim(),
        lambda pool: pool.clear(),
        lambda pool: pool.try_to_reserve(1),
        one_session,
    ],
    ids=["alloc", "set_limit", "trim", "clear", "try_to_reserve", "session"],
)
def test_other_threads_wait_for_the_session(memory, call):
    pool = memory.pool()
    pages = full(memory, pool)
    pool.cache(pages[1])
    pool.free(pages[2])
    thread = threading.Thread(target=call, args=(pool,))
    with pool.session():
        with pool.session():
            thread.start()
            before = pool.stats()
            thread.join(0.05)
            assert thread.is_alive()
        thread.join(0.02)
        assert thread.is_alive(), "sessions are counted"
        assert pool.stats() == before
        pool.touch(pages[1])
    thread.join()
    pool.check_integrity()


def test_unmatched_session_exit_raises(memory):
    pool = memory.pool()
    session = pool.session()
    with pytest.raises(errors.InvalidArgumentError):
        session.__exit__(None, None, None)
    with session, pytest.raises(errors.InvalidArgumentError):
        elsewhere(lambda: session.__exit__(None, None, None))
    elsewhere(lambda: one_session(pool))


def test_session_ends_if_its_callback_raises(memory):
    """As a signal handler does that raises while the session begins."""
    pool = memory.pool()

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), pool.session(interrupted):
        pytest.fail("the block ran")
    elsewhere(lambda: one_session(pool))


def test_interrupts_leave_no_session_of_the_scheduler_open(memory):
    """Signals whose handler raises arrive at every point of a session, also at its begin."""
    blocks = SchedulerBlocks(memory.pool())
    handler = signal.signal(signal.SIGVTALRM, signal.default_int_handler)
    try:
        for _ in range(INTERRUPTS):
            with contextlib.suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_VIRTUAL, 1e-6)
                while True:
                    with blocks.session():
                        pass
            assert blocks.pool.session_depth == 0
    finally:
        signal.signal(signal.SIGVTALRM, handler)
