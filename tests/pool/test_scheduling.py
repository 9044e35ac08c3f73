"""`kvelastic.pool.scheduling`: the pool as a scheduler uses it, alone and under a toy engine."""

from __future__ import annotations

import random
import threading
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest
from native_pools import HUGE, LAYOUTS, Memory
from toy_engine import BLOCK_TOKENS, ToyEngine, answer_of
from two_pools import PAGED, PAGES, TwoPools

from kvelastic.errors import BlockError, IntegrityError
from kvelastic.pool.scheduling import memory_wait
from kvelastic.pool.scheduling.blocks import SchedulerBlocks
from kvelastic.pool.scheduling.memory_wait import Backoff

LAYOUT = LAYOUTS["paged"]
A_PAGE = LAYOUT.blocks_per_page
FOREVER_S = -1.0


class Room:
    """Blocks over a range of a few pages, and what they were told of."""

    def __init__(self, pages: int = 4, **options: int | bool) -> None:
        self.memory = Memory(LAYOUT, pages)
        self.pool = self.memory.pool(movable=True, **options)
        self.blocks = SchedulerBlocks(self.pool)
        self.changes: list[tuple[int, int]] = []
        self.blocks.on_changes = self.changes.extend

    def take(self, count: int) -> list[int]:
        with self.blocks.session():
            assert self.blocks.prepare(count) == count
            ids = self.blocks.take(count)
        assert ids is not None
        return ids

    def cached(self, count: int) -> list[int]:
        ids = self.take(count)
        self.blocks.give_back([], ids)
        return ids


# --- sessions and what is followed --------------------------------------------------------------


def test_session_sees_earlier_changes_and_delays_new_ones() -> None:
    room = Room()
    ids = room.cached(2 * A_PAGE)
    room.pool.set_limit(HUGE)
    assert not room.changes, "nobody has looked"
    lowered = threading.Thread(target=room.pool.set_limit, args=(0,))
    with room.blocks.session():
        assert {block for block, to in room.changes if to < 0} <= set(ids)
        told = len(room.changes)
        assert told >= A_PAGE
        lowered.start()
        with room.blocks.session():  # nested: another one of the same thread
            assert room.blocks.at_hand
        room.blocks.follow()
        assert len(room.changes) == told, "the limit waits for the session"
    lowered.join()
    room.blocks.follow()
    assert room.pool.stats()["blocks_cached"] <= A_PAGE


def test_failed_follow_leaves_no_open_session() -> None:
    room = Room()
    room.cached(A_PAGE)
    room.pool.sleep()

    def fail(_: object) -> None:
        raise RuntimeError("lost")

    room.blocks.on_changes = fail
    with pytest.raises(RuntimeError), room.blocks.session():
        pass
    woken = threading.Thread(target=room.pool.wake)  # would wait for the session
    woken.start()
    woken.join()
    room.blocks.check_integrity()


def test_eviction_is_reported_before_its_block_is_reused() -> None:
    room = Room(pages=1)
    ids = room.cached(A_PAGE - 1)
    (again,) = room.take(1)
    assert (again, -1) in room.changes
    assert again in ids


def test_moved_block_is_reported_with_its_new_id() -> None:
    room = Room()
    ids = room.take(2 * A_PAGE - 1)
    last_page = room.memory.page_of(max(ids))
    lonely, *others = (block for block in ids if room.memory.page_of(block) == last_page)
    (hole,) = (block for block in ids[:1])
    room.blocks.give_back([*others, hole], [lonely])
    assert room.pool.compact() == 1
    room.blocks.follow()
    assert room.changes == [(lonely, hole)]


# --- how much there is --------------------------------------------------------------------------


def test_prepared_blocks_can_be_taken_without_eviction() -> None:
    room = Room()
    room.cached(3)
    with room.blocks.session():
        assert room.blocks.prepare(A_PAGE) == A_PAGE
        assert not room.changes
        assert room.blocks.at_hand >= A_PAGE
        assert room.blocks.take(A_PAGE) is not None
    assert not room.blocks.fell_short


def test_shortage_is_reset_by_the_next_session() -> None:
    room = Room(pages=2)
    with room.blocks.session():
        assert room.blocks.prepare(5 * A_PAGE) < 2 * A_PAGE
        assert room.blocks.fell_short
        with room.blocks.session():
            assert room.blocks.fell_short, "a nested one is none of its own"
        assert room.blocks.take(5 * A_PAGE) is None
    assert room.blocks.fell_short
    with room.blocks.session():
        assert not room.blocks.fell_short
    room.blocks.check_integrity()


def test_headroom_is_kept_only_while_memory_suffices() -> None:
    room = Room(pages=2)
    room.blocks.headroom = A_PAGE
    with room.blocks.session():
        assert room.blocks.prepare(A_PAGE - 1) == A_PAGE - 1
        assert room.pool.mapped_bytes == 2 * HUGE, "a page for the headroom"
        assert room.blocks.prepare(2 * A_PAGE - 1) == 2 * A_PAGE - 1
        assert not room.blocks.fell_short
        assert room.blocks.prepare(2 * A_PAGE) == 2 * A_PAGE - 1
        assert room.blocks.fell_short


def test_usage_is_relative_to_the_current_limit() -> None:
    room = Room()
    assert room.blocks.usage == 0
    room.take(A_PAGE - 1)
    assert room.blocks.under_limit == 4 * A_PAGE - 1
    assert room.blocks.usage == (A_PAGE - 1) / (4 * A_PAGE - 1)
    room.pool.set_limit(HUGE)
    assert (room.blocks.reachable, room.blocks.usage) == (0, 1)


def test_block_state_changes_are_counted() -> None:
    room = Room()
    blocks, stats = room.blocks, lambda: Counter(room.pool.stats())
    ids = room.take(6)
    blocks.give_back(ids[:1], ids[1:4])
    assert (blocks.used, stats()["blocks_cached"]) == (2, 3)
    blocks.touch(ids[1:2])
    assert (blocks.used, stats()["blocks_cached"]) == (3, 2)
    with pytest.raises(BlockError):
        blocks.touch(ids[:1])
    blocks.drop(ids[2:4])
    blocks.check_integrity()
    assert (blocks.used, stats()["blocks_cached"]) == (3, 0)
    blocks.clear()
    assert (blocks.used, stats()["blocks_used"]) == (0, 0)
    blocks.check_integrity()


def test_block_allocated_without_the_scheduler_is_detected() -> None:
    room = Room()
    room.pool.alloc(1)
    with pytest.raises(IntegrityError, match="0 blocks are in use, in the native pool 1"):
        room.blocks.check_integrity()


# --- steps and pins -----------------------------------------------------------------------------


def test_blocks_freed_during_a_step_keep_their_memory() -> None:
    room = Room()
    ids = room.take(3 * A_PAGE)
    first, second = room.blocks.step_begins(), room.blocks.step_begins()
    room.blocks.give_back(ids[:A_PAGE], ids[A_PAGE:])
    assert room.blocks.used == 0
    assert room.blocks.held_back == set(ids)
    room.pool.set_limit(HUGE)
    room.blocks.step_ends(first)
    for block in ids:
        room.memory.write(block, 3)  # else a fault
    assert room.blocks.waits_for_steps
    room.blocks.step_ends(second)
    assert not room.blocks.waits_for_steps
    assert room.memory.held_at_the_os() <= HUGE
    with room.blocks.step():
        assert room.blocks.is_at_work
    assert not room.blocks.is_at_work
    room.blocks.check_integrity()


def test_block_reused_during_a_step_is_reported() -> None:
    room = Room(pages=1)
    ids = room.take(A_PAGE - 1)
    step = room.blocks.step_begins()
    room.blocks.give_back(ids)
    assert room.blocks.reused_under == 0
    room.take(1)
    assert room.blocks.reused_under == step
    assert not room.blocks.has_ended(step)
    room.blocks.step_ends(step)
    assert room.blocks.reused_under == 0


def test_pinned_blocks_are_held_past_steps_until_unpin() -> None:
    room = Room()
    ids = room.take(2 * A_PAGE)
    now, later = room.blocks.pin(ids[:2]), room.blocks.pin(ids[2:4])
    room.blocks.give_back(ids)
    assert room.blocks.held_back == set(ids[:4])
    room.blocks.unpin(now)
    room.blocks.unpin(now)
    assert room.blocks.held_back == set(ids[2:4])
    room.blocks.unpin_after_next_step(later)
    assert room.blocks.held_back
    with room.blocks.step():
        pass
    assert not room.blocks.held_back


# --- backoff ------------------------------------------------------------------------------------


def test_only_foreign_pages_raise_the_availability_epoch(shared: TwoPools) -> None:
    mine, other = shared.pools
    theirs = other.alloc((PAGES - 1) * PAGED.blocks_per_page - 1)
    blocks = SchedulerBlocks(mine)
    assert blocks.prepare(1) == 1
    seen, given_back = blocks.availability_epoch, blocks.given_back
    ids = blocks.take(1)
    assert ids is not None
    blocks.give_back(ids)
    assert blocks.availability_epoch == seen
    assert blocks.given_back != given_back
    blocks.wait_for_epoch(seen, 0.001)
    other.free(theirs or [])
    other.trim()
    assert blocks.prepare(A_PAGE + 1) == A_PAGE + 1
    blocks.wait_for_epoch(seen, FOREVER_S)
    assert blocks.availability_epoch != seen


@pytest.mark.parametrize("gives_back", [False, True], ids=["nothing fits", "runs in pieces"])
def test_scheduler_backoff_doubles_while_nothing_runs(
    monkeypatch: pytest.MonkeyPatch, gives_back: bool
) -> None:
    """One that gave something back is asked again at once, for another may have that."""
    room = Room(pages=1)
    backoff = Backoff(room.blocks, lambda: 0)
    now_s = 0.0
    monkeypatch.setattr(memory_wait, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(room.blocks, "wait_for_epoch", lambda *_: None)
    room.take(1)
    asked_s = []
    for tick in range(5000):
        now_s = tick * 0.01
        if backoff.memory_wait is not None and backoff.memory_wait.pause():
            continue
        asked_s.append(now_s)
        backoff.look()
        with room.blocks.session():
            room.blocks.prepare(A_PAGE)
            if gives_back:
                room.blocks.give_back(room.blocks.take(1) or [])
        room.blocks.step_ends(room.blocks.step_begins(works=False))
        backoff.has_looked(works=False)
    gaps = [later - sooner for sooner, later in pairwise(asked_s)]
    expected = [0.01, 0.01, 0.02, 0.04] if gives_back else [0.01, 0.02, 0.04, 0.08]
    assert gaps[:4] == pytest.approx(expected, abs=0.011)
    assert max(gaps) == pytest.approx(10.0, abs=0.011)


# --- a toy engine over all of it ----------------------------------------------------------------


def toy(room: Room, steps_on_their_way: int = 1) -> ToyEngine:
    return ToyEngine(
        room.blocks,
        memory=room.memory.range,
        layout=LAYOUT,
        pages=room.memory.pages,
        steps_on_their_way=steps_on_their_way,
    )


@pytest.mark.slow
@pytest.mark.parametrize("steps_on_their_way", [0, 1, 3])
@pytest.mark.parametrize("max_cached_blocks", [-1, 5])
def test_toy_engine_output_is_independent_of_the_limit(
    steps_on_their_way: int, max_cached_blocks: int
) -> None:
    pick = random.Random(f"{steps_on_their_way} {max_cached_blocks}")
    room = Room(pages=5, max_cached_blocks=max_cached_blocks)
    engine = toy(room, steps_on_their_way)
    expected: dict[str, list[int]] = {}
    for number in range(400):
        do = pick.choice(("submit", "turn", "turn", "turn", "limit", "compact", "abort"))
        if do == "submit" and len(engine.requests) < 12:
            # Few different tokens: prompts begin alike.
            prompt = [pick.randrange(2) for _ in range(pick.randrange(1, 9)) for _ in range(3)]
            new_tokens = pick.randrange(1, 40)
            expected[f"r{number}"] = answer_of(prompt, new_tokens)
            engine.submit(f"r{number}", prompt, new_tokens)
        elif do == "limit":
            room.pool.set_limit(pick.choice((1, 2, 3, 5)) * HUGE)
        elif do == "compact":
            room.pool.compact()
        elif do == "abort" and engine.requests and pick.random() < 0.3:
            aborted = pick.choice(sorted(engine.requests))
            engine.abort(aborted)
            del expected[aborted]
        engine.turn()
    room.pool.set_limit(5 * HUGE)
    engine.finish()
    assert engine.answers == expected
    assert min(engine.preemptions, engine.found, engine.evicted) > 0, "nothing was tried"
    engine.forget_all()
    engine.check_integrity()
    room.pool.sleep()
    assert room.memory.held_at_the_os() == 0


def test_toy_engine_finds_a_moved_prefix() -> None:
    room = Room()
    engine = toy(room, steps_on_their_way=0)
    filler = room.take(A_PAGE - 2)
    engine._users.update(dict.fromkeys(filler, 1))  # as if requests had them
    engine.submit("anchor", [9] * BLOCK_TOKENS, 1)
    engine.finish()
    engine.submit("lonely", [2] * BLOCK_TOKENS, 1)
    engine.finish()
    for block in filler:
        del engine._users[block]
    room.blocks.give_back(filler)
    while room.pool.compact():
        pass
    engine.submit("other", [2] * BLOCK_TOKENS, 3)
    engine.finish()
    assert engine.moved == 1
    assert engine.found == 1
    assert engine.answers["other"] == answer_of([2] * BLOCK_TOKENS, 3)


def test_toy_engine_waits_until_neighbour_releases_memory(
    shared: TwoPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_wait, "time", SimpleNamespace(monotonic=lambda: 0.0))
    mine, other = shared.pools
    theirs = other.alloc(PAGES * PAGED.blocks_per_page - 1)
    assert theirs is not None
    engine = ToyEngine(SchedulerBlocks(mine), memory=shared.ranges[0], layout=PAGED, pages=PAGES)
    engine.submit("a", [1, 2, 3], 10)
    assert engine.turn()
    assert not engine.turn()
    assert not engine.turn()
    other.free(theirs)
    other.trim()
    mine.ensure(1)  # as the maintenance thread does when the neighbour rings
    assert engine.turn(), "memory is there, and it pauses"
    engine.finish()
    assert engine.answers["a"] == answer_of([1, 2, 3], 10)
