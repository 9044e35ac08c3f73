"""Pages side by side: what a cache with one address takes of a pool."""

from __future__ import annotations

import threading

import pytest
from device_ledgers import Machine
from hypothesis import given, settings
from hypothesis import strategies as st
from native_pools import HUGE, LAYOUTS, Memory

from kvelastic import errors
from kvelastic.pool.layout import PageLayout

WHOLE = PageLayout(HUGE, 1, 1, HUGE)
PAGES = 9


@pytest.fixture
def memory():
    return Memory(WHOLE, PAGES)


def test_run_is_contiguous_without_the_null_block(memory):
    pool = memory.pool()
    assert pool.alloc_run(3) == [1, 2, 3]
    assert pool.alloc_run(5) == [4, 5, 6, 7, 8]
    assert pool.alloc_run(1) is None
    pool.check_integrity()
    assert memory.held_at_the_os() == PAGES * HUGE


def test_run_contains_all_blocks_of_its_pages():
    memory = Memory(LAYOUTS["paged"], 4)
    pool = memory.pool()
    ids = pool.alloc_run(2)
    assert {memory.page_of(block) for block in ids} == {1, 2}
    assert len(ids) == 16
    pool.check_integrity()


def test_hole_too_short_for_a_run_is_skipped(memory):
    pool = memory.pool()
    first, second = pool.alloc_run(2), pool.alloc_run(2)
    pool.free(first)
    assert pool.alloc_run(3) == [5, 6, 7]
    assert pool.alloc_run(2) == first
    pool.free(second)
    pool.check_integrity()


def test_run_from_parked_pages_needs_no_driver_call(memory):
    pool = memory.pool()
    pool.free(pool.alloc_run(4))
    calls = memory.driver.calls
    assert pool.alloc_run(4) == [1, 2, 3, 4]
    assert memory.driver.calls == calls


def test_parked_pages_are_replaced_at_the_limit(memory):
    pool = memory.pool(limit_bytes=5 * HUGE)
    kept = pool.alloc_run(1)
    pool.free(pool.alloc_run(3))
    pool.free(kept)
    middle = pool.alloc_run(1)
    assert middle == [1]
    assert pool.alloc_run(4) is None
    assert pool.alloc_run(3) == [2, 3, 4]
    pool.check_integrity()
    assert pool.mapped_bytes == 5 * HUGE


def test_parked_pages_between_runs_yield_their_addresses(memory):
    pool = memory.pool()
    runs = [pool.alloc_run(2) for _ in range(4)]
    for at in (0, 1, 3):
        pool.free(runs[at])
    pool.trim()
    pool.free(runs[2])  # pages 5 and 6 are parked, all others unmapped
    assert pool.alloc_run(8) == list(range(1, 9))
    pool.check_integrity()


def test_unsatisfiable_run_changes_nothing(memory):
    pool = memory.pool()
    assert pool.alloc_run(PAGES) is None
    assert pool.alloc_run(1 << 40) is None
    assert pool.alloc_run(0) is None
    assert pool.mapped_bytes == 0
    held = pool.alloc_run(4)
    memory.driver.arm(1)
    assert pool.alloc_run(4) is None
    assert pool.stats()["blocks_used"] == 4
    pool.check_integrity()
    assert pool.alloc_run(4) == [5, 6, 7, 8]
    pool.free(held)


def test_closed_pool_refuses_a_run(memory):
    pool = memory.pool()
    pool.close()
    with pytest.raises(errors.PoolFailedError):
        pool.alloc_run(1)


@pytest.mark.slow
@settings(max_examples=60)
@given(st.lists(st.integers(0, 29), max_size=40))
def test_random_runs_match_a_model(steps):
    """Below 20: a run of that many pages modulo five; from 20 on: the oldest, limits, trims."""
    memory = Memory(WHOLE, PAGES)
    pool = memory.pool()
    held: list[list[int]] = []
    limit = PAGES
    for step in steps:
        if step < 20:
            length = step % 5 + 1
            used = sum(map(len, held))
            run = pool.alloc_run(length)
            if run is None:
                taken = {page for one in held for page in one}
                free = "".join("x" if p in taken else "." for p in range(1, PAGES))
                assert used + length > limit - 1 or "." * length not in free
            else:
                assert run == list(range(run[0], run[0] + length))
                assert run[0] > 0
                assert not {page for one in held for page in one} & set(run)
                assert used + length <= limit - 1
                held.append(run)
        elif step < 26 and held:
            pool.free(held.pop(step % len(held)))
        elif step < 28:
            limit = PAGES - 4 * (step - 26)
            pool.set_limit(limit * HUGE)
        else:
            pool.trim()
        pool.check_integrity()
        assert memory.held_at_the_os() == pool.mapped_bytes


def test_threads_never_share_a_page_of_runs(memory):
    pool = memory.pool()
    wrong: list[object] = []
    owner: dict[int, int] = {}
    lock = threading.Lock()

    def work(me: int) -> None:
        for turn in range(150):
            run = pool.alloc_run(turn % 4 + 1)
            if run is None:
                continue
            with lock:
                wrong.extend(page for page in run if page in owner)
                owner.update(dict.fromkeys(run, me))
            with lock:
                for page in run:
                    del owner[page]
            pool.free(run)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    pool.check_integrity()


def test_partly_granted_run_returns_its_grant():
    """All of a run or nothing: what was granted of it goes back."""
    machine = Machine({"a": 6})
    memory = Memory(WHOLE, PAGES)
    mine, other = machine.join("a"), machine.join("a")
    pool = memory.pool(device_set=mine.device_set, capacity_bytes=6 * HUGE, reclaim_wait_s=0.01)
    assert other.device_set.grant(2) == 2
    assert pool.alloc_run(4) is None
    assert mine.device_set.granted_bytes == pool.mapped_bytes == HUGE  # the null block's page
    assert pool.alloc_run(3) == [1, 2, 3]
    machine.check()
    other.device_set.give_back(2)
    assert pool.alloc_run(2) == [4, 5]
    pool.check_integrity()
    pool.close(discard=True)
    machine.close()
