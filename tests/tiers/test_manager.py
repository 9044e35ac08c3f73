"""Tiers over a stand-in of a pool: what is matched, loaded, forgotten, and when a tier is asked."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from fake_tiers import FakePool, FakeStaging, FakeStore, key_of, keys_of, record_of
from waiting import DEADLINE_S, wait_until

from kvelastic.errors import BlockError, InvalidArgumentError
from kvelastic.tiers.base import Selection
from kvelastic.tiers.demoter import Demoter
from kvelastic.tiers.lookup import Lookup
from kvelastic.tiers.manager import Tiers
from kvelastic.tiers.namespace import Namespace
from kvelastic.tiers.policy import Copies, Rules, WritePolicy


class World:
    def __init__(
        self, rules: Rules | None = None, slots: int = 16, *, has_third: bool = False
    ) -> None:
        staging: Any = FakeStaging(slots)
        pool: Any = FakePool()
        self.staging = staging
        self.pool = pool
        self.near = FakeStore("host", self.staging)
        self.far = FakeStore("disk", self.staging)
        self.third = FakeStore("folder", self.staging)
        self.now_s = 0.0
        self.namespace = Namespace("m")
        self.tiers = Tiers(
            self.pool,
            self.staging,
            self.namespace,
            [self.near, self.far, *([self.third] if has_third else [])],
            rules or Rules(idle_after_s=1e9, watermark=0.0, tick_s=0.01),
            clock=lambda: self.now_s,
        )

    @property
    def pending_objects(self) -> list[int]:
        waiting = map(self.tiers.waiting_bytes, range(len(self.tiers.stores)))
        return [size_bytes // self.staging.record_bytes for size_bytes in waiting]

    def fill(self, near: Sequence[int], far: Sequence[int]) -> None:
        for store, numbers in ((self.near, near), (self.far, far)):
            store.records.update({key_of(n): record_of(n) for n in numbers})


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    assert made.tiers.close(DEADLINE_S) == []
    assert made.near.is_closed
    assert not made.near.held_keys
    assert not made.far.held_keys


def test_leading_keys_are_matched_and_held(world) -> None:
    world.fill(near=[0, 1, 4, 6], far=[1, 2, 3, 5, 7])
    match = world.tiers.match(keys_of(range(9)))
    assert match.count == 8
    assert match.keys == keys_of(range(8))
    assert sorted(world.near.held_keys) == [key_of(n) for n in (0, 1, 4, 6)]
    assert sorted(world.far.held_keys) == [key_of(n) for n in (2, 3, 5, 7)]
    match.release()
    match.release()
    assert match._is_released
    counts = world.tiers.block_counts()
    assert (counts.matched, counts.unmatched) == (8, 1)


def test_store_that_only_reads_gets_no_blocks() -> None:
    pool: Any = FakePool()
    staging: Any = FakeStaging(16)
    peer = FakeStore("peer", staging)
    peer.takes_records = False
    peer.records.update({key_of(n): record_of(n) for n in range(3)})
    tiers = Tiers(pool, staging, Namespace("m"), [peer])
    pool.put_dirty([7, 8])
    assert tiers.clean_all(DEADLINE_S) == 0, "a sleep waits for no copy"
    assert not pool.is_attended, "no thread demotes"
    load = tiers.load(tiers.match(keys_of(range(3))), [50, 51, 52])
    assert load.wait(DEADLINE_S)
    assert load.leading == 3
    assert tiers.close(DEADLINE_S) == []


def test_load_keeps_its_holds_until_done(world) -> None:
    world.fill(near=[0, 1], far=range(2, 9))
    world.far.hang = release = threading.Event()
    with world.tiers.match(keys_of(range(9))) as match:
        load = world.tiers.load(match, list(range(50, 59)))
    assert world.far.hanging.wait(DEADLINE_S)
    assert not match._is_released
    assert len(world.far.held_keys) == 7
    assert not load.done
    release.set()
    assert load.wait(DEADLINE_S)
    assert load.failed == []
    assert load.leading == 9
    assert [world.pool.blocks[50 + n] for n in range(9)] == [record_of(n) for n in range(9)]
    assert world.tiers.drain(DEADLINE_S)
    assert match._is_released
    assert world.pool.clean_ids == set(range(50, 59))
    assert set(world.near.records) == {key_of(n) for n in range(9)}, "promoted"
    assert world.near.parents[key_of(5)] == key_of(4)
    world.tiers.check_integrity()


def test_part_of_a_match_may_be_loaded_once(world) -> None:
    world.fill(near=[0, 1, 2], far=[3, 4])
    with world.tiers.match(keys_of(range(5))) as match:
        load = world.tiers.load(match, [50, 51])
        assert load.wait(DEADLINE_S)
        assert sorted(world.pool.blocks) == [50, 51]
        with pytest.raises(InvalidArgumentError, match="no more"):
            world.tiers.load(match, list(range(6)))
        with pytest.raises(InvalidArgumentError, match="started or released before"):
            world.tiers.load(match, [52])
    with world.tiers.match(keys_of(range(5))) as match, pytest.raises(BlockError):
        world.tiers.load(match, [-1])
    assert match._is_released
    with pytest.raises(InvalidArgumentError, match="whole keys"):
        world.tiers.match(b"abc")


def test_failed_read_is_a_miss(world) -> None:
    world.fill(near=[0, 1], far=[2, 3])
    world.far.fail_at = 0
    with world.tiers.match(keys_of(range(4))) as match:
        load = world.tiers.load(match, [50, 51, 52, 53])
    assert load.wait(DEADLINE_S)
    assert load.failed == [2, 3]
    assert load.leading == 2
    assert world.tiers.drain(DEADLINE_S)
    assert world.pool.clean_ids == {50, 51}
    counts = world.tiers.block_counts()
    assert (counts.loaded, counts.missed) == (2, 2)


def test_cancelled_load_writes_no_block(world) -> None:
    world.fill(near=[], far=range(8))
    world.far.hang = release = threading.Event()
    with world.tiers.match(keys_of(range(8))) as match:
        load = world.tiers.load(match, list(range(50, 58)))
    assert world.far.hanging.wait(DEADLINE_S)
    load.cancel()
    assert load.wait(DEADLINE_S)
    assert load.failed == list(range(8))
    assert match._is_released
    release.set()
    assert world.tiers.drain(DEADLINE_S)
    assert not world.pool.blocks


@pytest.mark.parametrize(("count", "batches"), [(8, 1), (20, 3), (32, 4), (400, 4)])
def test_load_of_small_blocks_is_batched(count: int, batches: int) -> None:
    """Each read has a price of its own, and with four of them reads and copies overlap."""
    world = World(slots=512)
    world.fill(near=range(count), far=[])
    with world.tiers.match(keys_of(range(count))) as match:
        load = world.tiers.load(match, list(range(1000, 1000 + count)))
    assert load.wait(DEADLINE_S)
    assert load.leading == count
    assert not load.failed
    assert (world.near.calls, world.pool.calls) == (batches, batches)
    assert world.tiers.close(DEADLINE_S) == []


@pytest.mark.parametrize("reason", ["reclaim", "limit", "sleep"])
def test_shrinking_pool_gets_its_blocks_cleaned(world, reason) -> None:
    world.pool.put_dirty(range(40))
    assert world.pool.shrink(reason)
    assert world.tiers.drain(DEADLINE_S)
    for store in (world.near, world.far):
        assert store.records == {key_of(n): record_of(n) for n in range(40)}
    assert world.tiers.block_counts().served == 40


def test_block_used_during_writeback_is_not_stored(world) -> None:
    def take() -> None:
        world.pool.before_copy = None
        world.pool.taken.add(1)
        world.pool.blocks[1] = b"\xaa" * 64  # torn

    world.pool.before_copy = take
    world.pool.put_dirty(range(3))
    world.pool.shrink("limit")
    assert world.tiers.drain(DEADLINE_S)
    for store in (world.near, world.far):
        assert set(store.records) == {key_of(0), key_of(2)}
        assert store.records[key_of(2)] == record_of(2)


def test_full_tiers_end_the_writeback_wait(world) -> None:
    world.near.room = world.far.room = 2
    world.pool.put_dirty(range(20))
    assert not world.pool.shrink("sleep")
    # Two lie near; what lay there before it was copied far as well, or what came after it.
    assert {0, 1} <= world.pool.clean_ids <= {0, 1, 2, 3}
    assert world.tiers.block_counts().refused > 0


def test_blocks_are_cleaned_in_prompt_order(world) -> None:
    world.tiers.match(keys_of([7, 3, 5])).release()
    world.tiers.match(keys_of([7, 3, 9])).release()
    world.pool.put_dirty([5, 9, 3, 7, 1])
    assert world.pool.shrink("limit")
    parents = world.near.parents
    assert [parents[key_of(n)] for n in (7, 3, 5, 9, 1)] == [
        bytes(16),
        key_of(7),
        key_of(3),
        key_of(3),
        bytes(16),
    ]


def test_write_through_cleans_without_a_reclaim_request() -> None:
    world = World(Rules(policy=WritePolicy.WRITE_THROUGH, copies=Copies.FIRST, tick_s=0.001))
    cleaned = threading.Event()
    end_writeback = world.pool.end_writeback

    def seen(ticket: int, copied: Sequence[bool]) -> int:
        count = end_writeback(ticket, copied)
        if len(world.pool.clean_ids) == 30:
            cleaned.set()
        return count

    world.pool.end_writeback = seen
    world.pool.put_dirty(range(30))
    assert cleaned.wait(DEADLINE_S)
    assert world.tiers.close(DEADLINE_S) == []
    assert len(world.near.records) == 30
    assert not world.far.records
    assert world.tiers.block_counts().ahead == 30


def test_forget_ends_the_generation_permanently(world) -> None:
    world.fill(near=[0], far=[0])
    world.pool.put_dirty([5])
    world.pool.clean_ids.add(0)
    new = world.tiers.forget()
    assert new == world.tiers.namespace
    assert new.generation != 0
    assert new.generation != world.tiers.forget().generation
    assert world.near.namespace == world.far.namespace == world.tiers.namespace
    assert not world.near.records, "the process's own memory is given back"
    assert world.far.records, "what others may share is theirs"
    assert not world.pool.clean_ids
    assert world.tiers.erase(Selection()) == {0: 0, 1: 1}


def test_load_started_before_erase_leaves_nothing_clean(world) -> None:
    world.fill(near=[], far=range(4))
    world.far.hang = release = threading.Event()
    with world.tiers.match(keys_of(range(4))) as match:
        load = world.tiers.load(match, [50, 51, 52, 53])
    assert world.far.hanging.wait(DEADLINE_S)
    world.tiers.erase()
    release.set()
    assert load.wait(DEADLINE_S)
    assert world.tiers.drain(DEADLINE_S)
    assert not world.pool.clean_ids
    assert not world.near.records, "nothing was promoted after the erasure"


@pytest.mark.parametrize("how", ["erase", "forget"])
def test_match_from_before_an_erase_loads_nothing(world, how) -> None:
    world.fill(near=[], far=range(4))
    with world.tiers.match(keys_of(range(4))) as match:
        assert match.count == 4
        # A store keeps what is held until then, so it can still be read.
        world.far.erase_matching = lambda selection: 0
        getattr(world.tiers, how)()
        load = world.tiers.load(match, [50, 51, 52, 53])
    assert load.wait(DEADLINE_S)
    assert load.failed == [0, 1, 2, 3]
    assert world.tiers.drain(DEADLINE_S)
    assert not world.near.records, "what was erased is not put anywhere again"
    assert not world.pool.clean_ids


def test_load_during_an_erasure_promotes_nothing(world: World) -> None:
    world.fill(near=[], far=range(4))
    erase_near, erase_far = world.near.erase_matching, world.far.erase_matching
    is_near_erased = threading.Event()

    def note(selection: Selection) -> int:
        count = erase_near(selection)
        is_near_erased.set()
        return count

    def load_first(selection: Selection) -> int:
        assert is_near_erased.wait(DEADLINE_S)
        with world.tiers.match(keys_of(range(4))) as match:
            load = world.tiers.load(match, [50, 51, 52, 53])
        assert load.wait(DEADLINE_S)
        assert load.failed == []
        assert world.tiers._executor.drain(DEADLINE_S)
        return erase_far(selection)

    world.near.erase_matching = note  # type: ignore[method-assign]
    world.far.erase_matching = load_first  # type: ignore[method-assign]
    assert world.tiers.erase() == {0: 0, 1: 4}
    assert not world.near.records


def test_erase_during_load_start_is_detected(world) -> None:
    world.fill(near=[], far=range(4))
    world.far.erase_matching = lambda selection: 0
    name_blocks = world.pool.name_blocks

    def erase_first(ids: Sequence[int], keys: bytes) -> None:
        world.tiers.erase()
        name_blocks(ids, keys)

    world.pool.name_blocks = erase_first
    world.far.hang = release = threading.Event()
    with world.tiers.match(keys_of(range(4))) as match:
        load = world.tiers.load(match, [50, 51, 52, 53])
    release.set()
    assert load.wait(DEADLINE_S)
    assert load.failed == [0, 1, 2, 3]
    assert world.tiers.drain(DEADLINE_S)
    assert not world.near.records


def test_closed_tiers_end_the_writeback_wait() -> None:
    """Also where the thread was cleaning ahead and looks for a want once more."""
    world = World(Rules(policy=WritePolicy.WRITE_THROUGH, tick_s=0.001))
    stopped = threading.Event()
    end_writeback, stop = world.pool.end_writeback, world.pool.stop_demotions

    def close_meanwhile(ticket: int, copied: Sequence[bool]) -> int:
        closing.start()
        assert stopped.wait(DEADLINE_S)
        return end_writeback(ticket, copied)

    def stopping() -> None:
        stop()
        stopped.set()

    world.pool.end_writeback = close_meanwhile
    world.pool.stop_demotions = stopping
    closing = threading.Thread(target=world.tiers.close)
    world.pool.put_dirty(range(4))
    assert stopped.wait(DEADLINE_S)
    closing.join()
    assert not world.pool.is_attended


def test_tier_slower_than_computing_is_not_used(world) -> None:
    world.fill(near=[0], far=range(8))
    world.tiers.computed(1000, 1e-6)
    for _ in range(2):
        with world.tiers.match(keys_of(range(8))) as match:
            count = match.count
            world.tiers.load(match, list(range(50, 50 + count))).wait(DEADLINE_S)
    assert count == 0
    world.now_s += 3600
    with world.tiers.match(key_of(0)) as match:
        assert match.count == 1, "tried again after a while"


def test_late_lookup_is_a_miss() -> None:
    world = World()
    answer = threading.Event()
    has = world.far.has

    def slow(keys: bytes) -> list[bool]:
        assert answer.wait(DEADLINE_S)
        return has(keys)

    world.far.has = slow  # type: ignore[method-assign]
    world.far.asks_medium = True
    tiers = Tiers(world.pool, world.staging, world.namespace, [world.near, world.far])
    world.fill(near=[0], far=range(4))
    assert tiers.match(keys_of(range(4))).count == 1
    answer.set()
    assert tiers.close(DEADLINE_S) == []
    assert world.tiers.close(DEADLINE_S) == []


def refuse_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_failed_thread_start_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    staging = FakeStaging(4)
    store = FakeStore("folder", staging)
    store.asks_medium = True
    store.records[key_of(1)] = record_of(1)
    looking = Lookup([store], DEADLINE_S)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse_thread)
        assert looking.has(0, keys_of([1])) == [False]
    assert looking.has(0, keys_of([1])) == [True], "it is asked again"
    looking.close(DEADLINE_S)


def test_close_does_not_wait_for_a_hung_store() -> None:
    world = World()
    world.pool.put_dirty(range(4))
    world.far.hang = release = threading.Event()
    assert world.pool.shrink("reclaim"), "the near tier was enough"
    assert world.far.hanging.wait(DEADLINE_S)
    # On a slow machine the others may need longer than that, but they end.
    assert "disk" in world.tiers.close(0.2)
    wait_until(lambda: world.near.is_closed)
    assert not world.far.is_closed
    assert not world.pool.is_attended
    assert world.tiers.close() == []
    release.set()


def test_object_size_mismatch_is_rejected() -> None:
    staging = FakeStaging(4)
    with pytest.raises(InvalidArgumentError, match="records of 64"):
        Tiers(
            FakePool(),  # type: ignore[arg-type]
            FakeStaging(4, record_bytes=128),  # type: ignore[arg-type]
            Namespace("m"),
            [FakeStore("host", staging)],
        )


@pytest.mark.parametrize("reason", ["sleep", "limit", "reclaim"])
def test_demoted_blocks_are_copied_to_farther_tiers(world, reason) -> None:
    """Staging has room for a part of it only; a restart would find the far tier alone."""
    world.pool.put_dirty(range(100))
    assert world.pool.shrink(reason)
    assert world.tiers.drain(DEADLINE_S)
    assert len(world.far.records) == len(world.near.records) == 100
    assert all(world.far.records[key_of(n)] == record_of(n) for n in range(100))


def test_sleep_does_not_wait_for_a_farther_tier(world) -> None:
    world.far.hang = release = threading.Event()
    world.pool.put_dirty(range(100))
    assert world.pool.shrink("sleep", seconds=5)
    assert len(world.near.records) == 100
    assert world.far.hanging.wait(DEADLINE_S)
    assert world.pending_objects == [0, 100]
    release.set()
    assert world.tiers.drain(DEADLINE_S)
    assert len(world.far.records) == 100
    assert world.pending_objects == [0, 0]


def test_recovered_farther_tier_receives_pending_copies(world) -> None:
    world.far.hang = release = threading.Event()
    world.pool.put_dirty(range(100))
    assert world.pool.shrink("sleep")
    assert world.far.hanging.wait(DEADLINE_S)
    world.now_s += 1000  # it counts as stalled
    assert not world.tiers.drain(0)
    release.set()
    assert world.tiers.drain(DEADLINE_S)
    assert len(world.far.records) == 100


def test_tier_recovered_before_a_look_receives_its_copies(world) -> None:
    """The copies of a transfer were given up, and when its end is seen the tier works again."""
    world.far.hang = release = threading.Event()
    world.pool.put_dirty(range(100))
    assert world.pool.shrink("sleep")
    assert world.far.hanging.wait(DEADLINE_S)
    behind, executor = world.tiers._behind, world.tiers._executor
    tiers_that_take = behind._tiers

    def recover_first() -> Sequence[int]:
        if executor.stuck_tiers:
            release.set()
            wait_until(lambda: not executor.stuck_tiers)
        tiers: Sequence[int] = tiers_that_take()
        return tiers

    behind._tiers = recover_first
    world.now_s += 1000
    assert world.tiers.drain(DEADLINE_S)
    assert len(world.far.records) == 100


@pytest.fixture
def three() -> Iterator[World]:
    made = World(has_third=True)
    yield made
    assert made.tiers.close(DEADLINE_S) == []


def stall_third(world: World) -> threading.Event:
    """Demote 100 blocks, and let the third tier stall in its first copy."""
    world.third.hang = release = threading.Event()
    world.pool.put_dirty(range(100))
    assert world.pool.shrink("sleep")
    assert world.third.hanging.wait(DEADLINE_S)
    workers, first = world.tiers._executor._workers, world.tiers._behind._open
    # A call of another tier would count as stalled, too.
    wait_until(
        lambda: (
            len(world.far.records) == len(first) and [w.tier for w in workers if w.running] == [2]
        )
    )
    world.now_s += 1000
    return release


def test_stalled_tier_does_not_delay_another(three: World) -> None:
    release = stall_third(three)
    three.pool.put_dirty(range(100, 200))
    assert three.pool.shrink("sleep")
    wait_until(lambda: three.pending_objects == [0, 0, 100])
    assert len(three.far.records) == 200
    release.set()
    assert three.tiers.drain(DEADLINE_S)
    assert list(three.third.records) == [key_of(n) for n in range(100)]


def test_stalled_tier_does_not_stop_cleaning_ahead(three: World) -> None:
    behind = three.tiers._behind
    release = stall_third(three)
    three.near.displaces_beyond = 200
    wait_until(lambda: three.pending_objects == [0, 0, 100])
    assert not behind.is_full, "it would be for as long as the tier stalls"
    release.set()


def test_farther_copies_resume_after_failed_thread_start(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.near.displaces_beyond = 8
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse_thread)
        world.pool.put_dirty(range(4))
        assert world.pool.shrink("sleep")
        assert world.pending_objects == [0, 4]
        assert not world.tiers._behind.is_full, "no thread makes room"
    world.pool.put_dirty(range(4, 8))
    assert world.pool.shrink("sleep")
    assert world.tiers.drain(DEADLINE_S)
    assert len(world.far.records) == 8


def test_close_without_a_thread_for_farther_copies(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading.Thread, "start", refuse_thread)
    world.pool.put_dirty(range(4))
    assert world.pool.shrink("sleep")
    assert world.tiers.close(DEADLINE_S) == []


def test_close_ends_all_parts_if_one_raises() -> None:
    world = World()

    def fail() -> None:
        raise ValueError("a part that fails")

    world.tiers.attach(fail)
    with pytest.raises(ValueError, match="a part that fails"):
        world.tiers.close(DEADLINE_S)
    assert world.near.is_closed
    assert world.far.is_closed
    assert not world.pool.is_attended


def test_sleep_waits_for_farther_tiers_before_displacing_copies() -> None:
    world = World()
    world.near.displaces_beyond = 100
    world.pool.put_dirty(range(2000))
    assert world.pool.shrink("sleep")
    assert len(world.near.records) <= 100
    assert world.tiers.drain(DEADLINE_S)
    assert len(world.far.records) == 2000
    assert world.tiers.close(DEADLINE_S) == []


def test_pool_waits_for_a_demoter_that_starts_late(monkeypatch: pytest.MonkeyPatch) -> None:
    may_start = threading.Event()
    work = Demoter._work

    def work_late(self: Demoter) -> None:
        assert may_start.wait(DEADLINE_S)
        work(self)

    monkeypatch.setattr(Demoter, "_work", work_late)
    world = World()
    assert world.pool.is_attended
    may_start.set()
    assert world.tiers.close(DEADLINE_S) == []


def test_lowered_limit_of_nearest_tier_counts_at_once(world) -> None:
    """Not only when the thread begins its next transfer."""
    world.far.hang = release = threading.Event()
    world.pool.put_dirty(range(100))
    assert world.pool.shrink("sleep")
    assert world.far.hanging.wait(DEADLINE_S)
    assert not world.tiers._behind.is_full
    world.near.displaces_beyond = 100
    assert world.tiers._behind.is_full
    release.set()


def test_erased_blocks_are_not_copied_to_farther_tiers(world) -> None:
    """Also what has been read from the near tier, and not been put into the far one yet."""
    world.far.hang = release = threading.Event()
    world.pool.put_dirty(range(100))
    assert world.pool.shrink("sleep")
    assert world.far.hanging.wait(DEADLINE_S)
    erased = threading.Thread(target=world.tiers.erase)
    erased.start()
    release.set()
    erased.join(DEADLINE_S)
    assert not erased.is_alive()
    assert world.tiers.drain(DEADLINE_S)
    assert not world.near.records
    assert not world.far.records


def test_exit_cleans_and_warns_about_missing_farther_copies(world, caplog) -> None:
    world.far.hang = release = threading.Event()
    world.pool.put_dirty(range(4))
    assert world.tiers.clean_all(DEADLINE_S) == 0
    assert world.tiers.clean_before_exit(0.1) == 0
    assert "not yet copied to the farther tiers are lost" in caplog.text
    release.set()
    caplog.clear()
    world.pool.put_dirty(range(4, 8))
    assert world.tiers.clean_before_exit(DEADLINE_S) == 0
    assert len(world.far.records) == 8
    assert caplog.text == ""


def test_close_cancels_pending_farther_copies(world) -> None:
    world.far.hang = release = threading.Event()
    world.pool.put_dirty(range(100))
    assert world.pool.shrink("sleep")
    assert world.far.hanging.wait(DEADLINE_S)
    threading.Timer(0, release.set).start()
    assert world.tiers.close(DEADLINE_S) == []
    assert len(world.far.records) < 100


def test_erase_does_not_wait_for_a_slow_tier(world) -> None:
    world.far.hang = release = threading.Event()
    world.pool.put_dirty(range(4))
    assert world.pool.shrink("sleep")
    assert world.far.hanging.wait(DEADLINE_S)
    done = threading.Event()

    def erase() -> None:
        world.now_s += 1000  # the far tier counts as hanging
        world.tiers.erase()
        done.set()

    thread = threading.Thread(target=erase)
    thread.start()
    assert done.wait(DEADLINE_S)
    thread.join()
    assert not world.near.records
    release.set()
