"""A pool that sleeps holds nothing at all; its limit is as before when it wakes.

After every step the books are compared with what the operating system says is held.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
from native_pools import HUGE, LAYOUTS, Memory, evicted
from waiting import DEADLINE_S, wait_until

from kvelastic import errors

PAGES = 6
BLOCKS_PER_PAGE = LAYOUTS["paged"].blocks_per_page


class Sleeper:
    """A pool and its memory; after each call all that is counted is compared with what is held."""

    def __init__(self, *, pages: int = PAGES, layout: str = "paged", **options: int | bool) -> None:
        self.memory = Memory(LAYOUTS[layout], pages)
        self.pool = self.memory.pool(**options)
        self.page_bytes = self.memory.layout.page_bytes

    def check(self) -> None:
        self.pool.check_integrity()
        self.memory.range.check_integrity()
        held = self.memory.held_at_the_os()
        assert self.pool.mapped_bytes == self.memory.range.held_bytes == held
        assert self.pool.stats()["pages_mapped"] == held // self.page_bytes

    def alloc(self, count: int) -> list[int] | None:
        ids = self.pool.alloc(count)
        assert 0 not in (ids or []), "the null block was handed out"
        self.check()
        return ids

    def free(self, ids: list[int]) -> None:
        self.pool.free(ids)
        self.check()

    def cache(self, ids: list[int]) -> None:
        self.pool.cache(ids)
        self.check()

    def sleep(self) -> dict[str, Any]:
        state = self.pool.sleep()
        self.check()
        assert self.pool.is_asleep
        assert state == self.pool.limit_state()
        return state

    def wake(self) -> None:
        self.pool.wake()
        self.check()
        assert not self.pool.is_asleep

    @property
    def held_bytes(self) -> int:
        return self.memory.held_at_the_os()


@pytest.fixture
def one() -> Sleeper:
    return Sleeper()


def asleep_and_empty(limit_bytes: int) -> dict[str, Any]:
    return {
        "state": "applied",
        "limit_bytes": limit_bytes,
        "effective_limit_bytes": 0,
        "mapped_bytes": 0,
        "over_bytes": 0,
    }


def test_unused_pool_sleeps_and_wakes(one: Sleeper) -> None:
    assert one.sleep() == asleep_and_empty(PAGES * HUGE)
    one.wake()
    assert one.held_bytes == 0, "memory comes with the next alloc, not with the wake"
    assert one.alloc(1) == [1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sleep_without_used_blocks_unmaps_every_page(layout: str) -> None:
    one = Sleeper(layout=layout)
    ids = one.alloc(one.pool.available_size())
    assert ids
    one.free(ids)
    assert one.held_bytes == PAGES * one.page_bytes
    assert one.sleep() == asleep_and_empty(PAGES * one.page_bytes)
    assert one.held_bytes == 0
    stats = one.pool.stats()
    for figure in ("pages_mapped", "pages_parked", "pages_limit", "blocks_used", "blocks_cached"):
        assert stats[figure] == 0, figure
    assert stats["pages_unmapped_ever"] == stats["pages_mapped_ever"] == PAGES


def test_used_blocks_keep_their_pages_until_freed(one: Sleeper) -> None:
    ids = one.alloc(BLOCKS_PER_PAGE + 3)
    assert ids
    for block in ids:
        one.memory.write(block, block % 250 + 1)
    parked = one.alloc(2 * BLOCKS_PER_PAGE)
    assert parked
    one.free(parked)
    state = one.sleep()
    pages = {one.memory.page_of(block) for block in ids} | {0}
    assert state["state"] == "shrinking"
    assert state["mapped_bytes"] == state["over_bytes"] == one.held_bytes == len(pages) * HUGE
    for block in ids:
        assert one.memory.read(block) == {block % 250 + 1}, "a block in use lost its contents"
    one.free(ids[1:])
    assert one.pool.limit_state()["over_bytes"] == len({0, one.memory.page_of(ids[0])}) * HUGE
    assert one.memory.read(ids[0]) == {ids[0] % 250 + 1}
    one.free(ids[:1])
    assert one.pool.limit_state() == asleep_and_empty(PAGES * HUGE)


def test_null_page_stays_while_its_blocks_are_used(one: Sleeper) -> None:
    ids = one.alloc(3 * BLOCKS_PER_PAGE - 1)
    assert ids
    first = [block for block in ids if one.memory.page_of(block) == 0]
    one.free([block for block in ids if block not in first])
    assert one.sleep()["mapped_bytes"] == HUGE
    one.cache(first)  # what is cached in sleep is evicted at once
    assert sorted(evicted(one.pool)) == sorted(first)
    assert one.pool.limit_state() == asleep_and_empty(PAGES * HUGE)


def test_sleeping_pool_allocates_nothing(one: Sleeper) -> None:
    ids = one.alloc(4)
    assert ids
    one.sleep()
    for _ in range(2):  # while a block is in use, and when nothing is
        assert one.pool.available_size() == one.pool.available_mapped() == 0
        assert one.alloc(1) is None
        assert one.pool.ensure(8) == 0
        assert not one.pool.try_to_reserve(1)
        assert one.alloc(0) == []
        one.check()
        if ids:
            one.free(ids)
            ids = []
    assert one.held_bytes == 0
    assert one.pool.trim() == 0
    with pytest.raises(errors.BlockError):
        one.pool.free([1])


@pytest.mark.parametrize("movable", [False, True])
def test_sleep_evicts_cached_blocks_and_reports_them(movable: bool) -> None:
    one = Sleeper(movable=movable)
    ids = one.alloc(2 * BLOCKS_PER_PAGE)
    assert ids
    used, cached = ids[::3], [block for block in ids if block not in ids[::3]]
    one.cache(cached)
    one.sleep()
    assert one.pool.stats()["blocks_cached"] == 0
    if movable:
        # Moves would be for nothing: all of them are evictions.
        assert sorted(one.pool.take_changes()) == [(block, -1) for block in sorted(cached)]
    else:
        assert sorted(evicted(one.pool)) == sorted(cached)
    assert not one.pool.has_evicted
    with pytest.raises(errors.BlockError):
        one.pool.touch(cached[:1])
    one.free(used)
    assert one.held_bytes == 0


def test_wake_restores_the_limit(one: Sleeper) -> None:
    one.pool.set_limit(3 * HUGE)
    one.free(one.alloc(2 * BLOCKS_PER_PAGE) or [])
    one.sleep()
    one.wake()
    state = one.pool.limit_state()
    assert (state["limit_bytes"], state["effective_limit_bytes"]) == (3 * HUGE, 3 * HUGE)
    available = one.pool.available_size()
    assert available == 3 * BLOCKS_PER_PAGE - 1
    ids = one.alloc(available)
    assert ids is not None
    assert len(set(ids)) == available
    assert one.alloc(1) is None
    assert one.held_bytes == 3 * HUGE
    for block in ids:
        one.memory.write(block, block % 250 + 1)
    for block in ids:
        assert one.memory.read(block) == {block % 250 + 1}, "two blocks share memory"


def test_limit_set_while_asleep_applies_after_wake(one: Sleeper) -> None:
    one.free(one.alloc(9) or [])
    one.sleep()
    for pages in (2, 0, 4):
        state = one.pool.set_limit(pages * HUGE)
        one.check()
        assert state == asleep_and_empty(pages * HUGE)
    one.wake()
    assert one.pool.available_size() == 4 * BLOCKS_PER_PAGE - 1


def test_repeated_sleep_never_hands_out_the_null_block() -> None:
    """Nor any block twice: the first page has one block less each time, not one less a time."""
    one = Sleeper(pages=2)
    for _ in range(20):
        ids = one.alloc(2 * BLOCKS_PER_PAGE - 1)
        assert ids is not None
        assert len(set(ids)) == 2 * BLOCKS_PER_PAGE - 1
        assert one.alloc(1) is None
        one.free(ids)
        one.sleep()
        assert one.held_bytes == 0
        one.wake()


def test_sleep_and_wake_are_idempotent(one: Sleeper) -> None:
    ids = one.alloc(5)
    assert ids
    assert one.sleep() == one.sleep()
    one.free(ids)
    assert one.sleep() == one.sleep() == asleep_and_empty(PAGES * HUGE)
    one.wake()
    one.wake()
    ids = one.alloc(5)
    assert ids
    one.wake()  # and one that is awake loses nothing by it
    assert one.pool.stats()["blocks_used"] == 5
    one.free(ids)


def test_wake_before_free_keeps_the_used_blocks(one: Sleeper) -> None:
    ids = one.alloc(BLOCKS_PER_PAGE + 2)
    assert ids
    for block in ids:
        one.memory.write(block, 7)
    one.sleep()
    one.wake()
    assert one.pool.limit_state()["state"] == "applied"
    more = one.alloc(one.pool.available_size())
    assert more is not None
    assert not set(more) & set(ids)
    assert len(ids) + len(more) == PAGES * BLOCKS_PER_PAGE - 1, "pages stayed closed"
    assert all(one.memory.read(block) == {7} for block in ids)
    one.free(ids + more)


def test_sleep_drops_reservations_and_clear_releases_memory(one: Sleeper) -> None:
    assert one.pool.try_to_reserve(3)
    assert one.sleep()["state"] == "applied"
    assert one.pool.stats()["blocks_reserved"] == one.held_bytes == 0
    assert one.alloc(1) is None
    one.wake()
    one.alloc(9)
    one.sleep()
    one.pool.clear()
    one.check()
    assert one.held_bytes == 0


def test_failed_sleep_is_completed_by_the_next_sleep(
    one: Sleeper,
) -> None:
    """Whichever of the calls behind it fails: the books are right, and nothing is lost for good."""
    calls = 0
    for fail_at in range(1, 20):
        one.free(one.alloc(3 * BLOCKS_PER_PAGE) or [])
        before = one.memory.driver.calls
        one.memory.driver.arm(fail_at)
        try:
            one.pool.sleep()
        except errors.MappingError:
            calls += 1
            one.check()
            assert one.pool.limit_state()["state"] == "shrinking"
            assert one.alloc(1) is None
        else:
            assert one.memory.driver.calls - before < fail_at
            one.memory.driver.arm(0)
        assert one.sleep()["mapped_bytes"] == 0
        one.wake()
    assert calls > 0


def test_sleep_waits_for_a_session(one: Sleeper) -> None:
    """What a scheduler has looked at stays until it has taken it."""
    began, slept = threading.Event(), threading.Event()

    def sleep() -> None:
        began.set()
        one.pool.sleep()
        slept.set()

    thread = threading.Thread(target=sleep)
    with one.pool.session():
        available = one.pool.available_size()
        thread.start()
        assert began.wait(DEADLINE_S)
        ids = one.pool.alloc(available)
        assert ids is not None
        assert len(ids) == available
        assert not slept.is_set()
    thread.join(DEADLINE_S)
    assert slept.is_set()
    assert one.pool.alloc(1) is None
    one.free(ids)
    assert one.held_bytes == 0


@pytest.mark.slow
def test_sleep_and_wake_during_concurrent_allocation() -> None:
    """Four threads alloc, write, read, cache and free; asleep with all freed nothing is held."""
    one = Sleeper(preallocate=True)
    stop = threading.Event()
    wrong: list[object] = []
    turns = [0] * 4

    def work(tag: int) -> None:
        try:
            held: list[list[int]] = []
            while not stop.is_set():
                ids = one.pool.alloc(tag + 1)
                if ids is not None:
                    turns[tag] += 1
                    for block in ids:
                        one.memory.write(block, tag + 1)
                    held.append(ids)
                if held and (ids is None or len(held) > 3):
                    given = held.pop(0)
                    seen = {value for block in given for value in one.memory.read(block)}
                    if 0 in given or seen != {tag + 1}:
                        wrong.append((given, seen))
                    (one.pool.cache if turns[tag] % 3 == 0 else one.pool.free)(given)
                one.pool.take_changes()
            for given in held:
                one.pool.free(given)
        except Exception as error:
            wrong.append(error)
            stop.set()

    threads = [threading.Thread(target=work, args=(tag,)) for tag in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        one.pool.sleep()
        if one.pool.available_size():
            wrong.append("asleep, and something is available")
        one.pool.wake()
        before = list(turns)
        while turns == before and not wrong:  # until somebody has had blocks again
            stop.wait(0.0001)
    wait_until(lambda: min(turns) > 0 or wrong, "a thread never has blocks")
    stop.set()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "an alloc waits for ever"
    assert wrong == []
    one.sleep()
    assert one.held_bytes == 0
    one.wake()
    ids = one.alloc(PAGES * BLOCKS_PER_PAGE - 1)
    assert ids is not None
    assert len(set(ids)) == PAGES * BLOCKS_PER_PAGE - 1
