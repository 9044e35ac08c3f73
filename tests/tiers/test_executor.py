"""The executor with stores that fail, hang and refuse, at every step in turn."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from fake_tiers import FakeCopies, FakeStaging, FakeStore, key_of, keys_of, record_of
from waiting import DEADLINE_S, wait_until

from kvelastic.errors import InvalidArgumentError
from kvelastic.tiers.base import NO_KEY
from kvelastic.tiers.executor import Executor
from kvelastic.tiers.graph import Graph, Kind, Operation, demote_graph, load_graph
from kvelastic.tiers.lookup import Segment
from kvelastic.tiers.policy import Copies
from kvelastic.tiers.transfer_run import Priority, Run, Transfer

SLOTS = 8


class Clock:
    """Time that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def put_everywhere(graph: Graph, tiers: Sequence[int]) -> Graph:
    """Every tier is offered every block, which nobody waits for: as FlexKV plans a put."""
    operations = list(graph.operations)
    for at, safe in enumerate(graph.operations):
        if safe.kind is Kind.PUT and safe.tier == tiers[-1]:
            operations += (
                Operation(Kind.PUT, safe.items, tier, (at,), safe.batch, is_awaited=False)
                for tier in tiers[1:]
            )
    return Graph(operations, graph.items)


class World:
    """Two stores, blocks, and an executor over them."""

    def __init__(self, slots: int = SLOTS) -> None:
        staging: Any = FakeStaging(slots)
        copies: Any = FakeCopies()
        self.staging = staging
        self.copies = copies
        self.near = FakeStore("near", self.staging)
        self.far = FakeStore("far", self.staging)
        self.clock = Clock()
        self.executor = Executor(self.copies, self.staging, [self.near, self.far], clock=self.clock)

    def demote(
        self,
        numbers: Sequence[int],
        *,
        tiers: Sequence[int] = (0, 1),
        batch: int = 2,
        copies: Copies = Copies.ALL,
        **more: object,
    ) -> Run:
        for number in numbers:
            self.copies.blocks[number] = record_of(number)
        graph = demote_graph(len(numbers), tiers=tiers, batch=batch)
        if copies is Copies.ALL:
            graph = put_everywhere(graph, tiers)
        transfer = Transfer(graph, keys_of(numbers), list(numbers), **more)  # type: ignore[arg-type]
        return self.executor.submit(transfer, Priority.RECLAIM)

    def fill(self, near: Sequence[int], far: Sequence[int]) -> None:
        for store, numbers in ((self.near, near), (self.far, far)):
            store.records.update({key_of(n): record_of(n) for n in numbers})

    def load(self, segments: Sequence[Segment], *, batch: int = 2, **more: object) -> Run:
        """Key n goes into block 100 + n."""
        graph = load_graph(segments, batch=batch, **more)  # type: ignore[arg-type]
        numbers = range(graph.items)
        transfer = Transfer(graph, keys_of(numbers), [100 + n for n in numbers])
        return self.executor.submit(transfer, Priority.LOAD)

    def is_over(self, run: Run) -> bool:
        """Waits for what goes on behind it, too."""
        return self.executor.wait(DEADLINE_S, lambda: run.states.is_over)

    def check(self) -> None:
        """Nothing is left of what has ended, and nothing wrong is anywhere."""
        assert self.executor.drain(DEADLINE_S)
        self.executor.check_integrity()
        assert self.executor.slots.free == self.executor.slots.count
        for store in (self.near, self.far):
            for key, record in store.records.items():
                assert record == record_of(int.from_bytes(key, "big")), store.name

    def check_loaded(self, run: Run) -> None:
        for item, is_loaded in enumerate(run.loaded):
            if is_loaded:
                assert self.copies.blocks[100 + item] == record_of(item)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    for store in (made.near, made.far):
        if store.hang is not None:
            store.hang.set()
    assert made.executor.close(DEADLINE_S) == []
    assert made.near.is_closed
    assert made.far.is_closed


def test_demoted_blocks_can_be_loaded(world) -> None:
    out = world.demote(range(10))
    assert out.wait(DEADLINE_S)
    assert world.is_over(out)
    assert out.stored == [{0, 1}] * 10
    back = world.load([Segment(0, 0, 4), Segment(1, 4, 6)], batch=3)
    assert back.wait(DEADLINE_S)
    assert back.loaded == [True] * 10
    world.check_loaded(back)
    world.check()


def test_first_copy_policy_stores_one_copy(world) -> None:
    world.near.room = 3
    out = world.demote(range(5), copies=Copies.FIRST, batch=1)
    assert world.is_over(out)
    assert out.stored == [{0}, {0}, {0}, {1}, {1}]
    world.check()


def test_promotion_with_first_copy_drops_the_farther_one(world) -> None:
    world.fill([], range(6))
    run = world.load([Segment(1, 0, 6)], promote_to=0, copies=Copies.FIRST)
    assert world.is_over(run)
    assert run.loaded == [True] * 6
    assert len(world.near.records) == 6
    assert not world.far.records
    world.check()


def test_parents_of_chained_keys_reach_the_store(world) -> None:
    parents = [NO_KEY, key_of(0), NO_KEY, key_of(2), key_of(77)]
    run = world.demote(range(5), tiers=[0], batch=5, parents=parents)
    assert world.is_over(run)
    assert [world.near.parents[key_of(n)] for n in range(5)] == parents
    assert world.near.calls == 3
    world.check()


def test_block_moved_during_the_copy_is_not_stored(world) -> None:
    run = world.demote(range(4), confirm=lambda: [True, False, True, False])
    assert world.is_over(run)
    assert run.stored == [{0, 1}, set(), {0, 1}, set()]
    assert set(world.near.records) == {key_of(0), key_of(2)}
    world.check()


@pytest.mark.parametrize("how", ["fail_at", "raise_at"])
@pytest.mark.parametrize("where", ["near", "far"])
@pytest.mark.parametrize("at", range(4))
def test_store_failure_during_demotion_affects_one_batch(world, how, where, at) -> None:
    setattr(getattr(world, where), how, at)
    run = world.demote(range(7))
    assert world.is_over(run)
    # One batch was refused by one tier, and the other one has it.
    assert all(run.stored)
    lacking = [stored for stored in run.stored if len(stored) == 1]
    assert 1 <= len(lacking) <= 2
    for tier, store in enumerate((world.near, world.far)):
        for item, stored in enumerate(run.stored):
            assert (key_of(item) in store.records) == (tier in stored)
    world.check()


@pytest.mark.parametrize("at", range(4))
def test_copy_failure_during_demotion_affects_one_batch(world, at) -> None:
    world.copies.fail_at = at
    run = world.demote(range(7))
    assert world.is_over(run)
    missing = [item for item, stored in enumerate(run.stored) if not stored]
    assert missing == [item for item in range(7) if item // 2 == at]
    world.check()


@pytest.mark.parametrize("how", ["fail_at", "raise_at"])
@pytest.mark.parametrize("where", ["near", "far"])
@pytest.mark.parametrize("at", range(5))
def test_store_failure_during_a_load_is_a_miss(world, how, where, at) -> None:
    world.fill(range(4), range(4, 10))
    setattr(getattr(world, where), how, at)
    run = world.load([Segment(0, 0, 4), Segment(1, 4, 6)], promote_to=0)
    assert world.is_over(run)
    world.check_loaded(run)
    assert run.loaded.count(False) <= 2
    world.check()


@pytest.mark.parametrize("at", range(5))
def test_copy_failure_during_a_load_is_a_miss(world, at) -> None:
    world.fill(range(4), range(4, 10))
    world.copies.fail_at = at
    run = world.load([Segment(0, 0, 4), Segment(1, 4, 6)], promote_to=0)
    assert world.is_over(run)
    assert run.loaded.count(False) == 2
    world.check_loaded(run)
    world.check()


@pytest.mark.parametrize("at", range(1, 12))
@pytest.mark.parametrize("is_load", [False, True])
def test_cancel_at_every_step_leaves_no_work(world, at, is_load) -> None:
    """In the middle of the at-th call, whichever that is."""
    world.fill(range(4), range(4, 10))
    lock, calls, cancelled = threading.Lock(), [0], threading.Event()
    submitted = threading.Event()
    runs: list[Run] = []

    def count() -> None:
        assert submitted.wait(DEADLINE_S)
        with lock:
            calls[0] += 1
            number = calls[0]
        if number == at:
            runs[0].cancel()
            cancelled.set()

    for one in (world.near, world.far):
        one.before_call = count
    world.copies.before_copy = count
    if is_load:
        runs.append(world.load([Segment(0, 0, 4), Segment(1, 4, 6)], promote_to=0))
    else:
        runs.append(world.demote(range(20, 30)))
    submitted.set()
    (run,) = runs
    assert run.wait(DEADLINE_S)
    assert world.is_over(run)
    if cancelled.is_set():
        assert run.is_cancelled
    blocks = dict(world.copies.blocks)
    world.check()
    assert world.copies.blocks == blocks, "a block was written to after the load was over"
    world.check_loaded(run)


def test_hung_store_does_not_block_the_others(world) -> None:
    world.fill(range(4), range(4, 10))
    world.far.hang = release = threading.Event()
    stuck = world.load([Segment(1, 0, 6)])
    assert world.far.hanging.wait(DEADLINE_S)
    # The near one goes on, with the slots that are left.
    others = [world.load([Segment(0, 0, 4)]) for _ in range(20)]
    assert all(run.wait(DEADLINE_S) and all(run.loaded) for run in others)
    assert not stuck.wait(0)
    world.clock.now_s = 1000.0
    assert stuck.wait(DEADLINE_S)
    assert stuck.loaded == [False] * 6
    assert world.executor.stuck_tiers == [1]
    # What comes now is refused at once, and demotion takes the tier that answers.
    again = world.load([Segment(1, 0, 2)])
    assert again.wait(DEADLINE_S)
    assert again.loaded == [False, False]
    out = world.demote(range(20, 24))
    assert world.is_over(out)
    assert out.stored == [{0}] * 4
    world.executor.check_integrity()
    assert world.executor.slots.free == SLOTS - 2, "a hung call writes into its slots"
    release.set()
    world.check()
    assert world.executor.stuck_tiers == []
    back = world.load([Segment(1, 0, 0), Segment(0, 0, 4)])
    assert back.wait(DEADLINE_S)


def test_load_does_not_wait_for_a_demotion(world) -> None:
    """The bus to a GPU carries both directions at once."""
    world.fill(range(4), [])
    arrived, release = threading.Event(), threading.Event()

    def hold() -> None:
        if not arrived.is_set():
            arrived.set()
            assert release.wait(DEADLINE_S)

    world.copies.before_copy = hold
    out = world.demote(range(20, 22))
    assert arrived.wait(DEADLINE_S)
    try:
        run = world.load([Segment(0, 0, 4)])
        assert run.wait(DEADLINE_S)
        assert all(run.loaded)
        assert not out.states.is_over
    finally:
        release.set()
    assert world.is_over(out)
    world.check()


def test_cancelled_load_does_not_wait_for_hung_store(world) -> None:
    world.fill([], range(6))
    world.far.hang = release = threading.Event()
    run = world.load([Segment(1, 0, 6)])
    assert world.far.hanging.wait(DEADLINE_S)
    run.cancel()
    assert run.is_complete
    assert run.loaded == [False] * 6
    assert world.executor.slots.free == SLOTS - 2
    world.executor.check_integrity()
    release.set()
    world.check()
    assert not world.copies.blocks


def test_close_abandons_a_hung_store() -> None:
    world = World()
    world.fill([], range(6))
    world.far.hang = release = threading.Event()
    run = world.load([Segment(1, 0, 6)])
    assert world.far.hanging.wait(DEADLINE_S)
    # The near store's thread ends by itself, in its own time.
    wait_until(lambda: world.executor.close(timeout_s=0.2) == ["far"])
    assert run.is_complete
    assert world.near.is_closed
    assert not world.far.is_closed
    late = world.load([Segment(0, 0, 2)])
    assert late.is_complete
    assert late.loaded == [False, False]
    release.set()
    assert world.executor.close(DEADLINE_S) == []
    assert world.far.is_closed


def test_unawaited_demotion_yields_slots_to_a_load(world) -> None:
    """A slow far tier keeps slots; a load that needs them takes its place."""
    world.fill(range(4), [])
    world.far.hang = release = threading.Event()
    outs = [world.demote(range(20 + 2 * n, 22 + 2 * n)) for n in range(SLOTS // 2)]
    assert all(out.wait(DEADLINE_S) for out in outs)
    assert world.far.hanging.wait(DEADLINE_S)
    run = world.load([Segment(0, 0, 4)])
    assert run.wait(DEADLINE_S)
    assert run.loaded == [True] * 4
    release.set()
    world.check()
    assert all(0 in stored for out in outs for stored in out.stored)
    assert 2 <= sum(1 in stored for out in outs for stored in out.stored) < SLOTS


def test_first_copy_demotion_skips_a_busy_farther_store(world) -> None:
    """The far tier would take what the near one refuses, which is nothing."""
    world.fill([], range(2))
    world.far.hang = release = threading.Event()
    stuck = world.load([Segment(1, 0, 2)])
    assert world.far.hanging.wait(DEADLINE_S)
    out = world.demote(range(20, 24), copies=Copies.FIRST)
    assert out.wait(DEADLINE_S)
    assert out.stored == [{0}] * 4
    assert not stuck.is_complete
    release.set()
    world.check()


def test_callbacks_run_once_and_may_raise(world) -> None:
    world.fill(range(4), [])
    seen: list[Run] = []
    run = world.load([Segment(0, 0, 4)])
    run.on_complete(seen.append)

    def broken(_: Run) -> None:
        raise ValueError("a broken callback")

    run.on_complete(broken)
    assert run.wait(DEADLINE_S)
    world.check()
    run.on_complete(seen.append)
    assert seen == [run, run]


def test_invalid_transfer_is_rejected(world) -> None:
    graph = load_graph([Segment(0, 0, 9)], batch=9)
    for transfer in (
        Transfer(graph, keys_of(range(9)), list(range(9))),
        Transfer(graph, keys_of(range(8)), list(range(9))),
        Transfer(graph, keys_of(range(9)), list(range(8))),
        Transfer(graph, keys_of(range(9)), list(range(9)), parents=[NO_KEY]),
        Transfer(load_graph([Segment(5, 0, 1)], batch=1), key_of(0), [0]),
    ):
        with pytest.raises(InvalidArgumentError):
            world.executor.submit(transfer, Priority.LOAD)
    world.check()


def test_empty_transfer_is_complete_at_once(world) -> None:
    run = world.executor.submit(Transfer(load_graph([], batch=1), b"", []), Priority.LOAD)
    assert run.is_complete
    assert run.states.is_over


def test_threads_load_and_demote_concurrently(world) -> None:
    world.fill(range(40), range(40))
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for step in range(30):
                if (step + seed) % 3:
                    first = (seed * 7 + step) % 30
                    graph = load_graph([Segment(seed % 2, 0, 5)], batch=2)
                    numbers = range(first, first + 5)
                    ids = [1000 * seed + n for n in range(5)]
                    run = world.executor.submit(
                        Transfer(graph, keys_of(numbers), ids), Priority.LOAD
                    )
                    assert run.wait(DEADLINE_S)
                    assert run.loaded == [True] * 5
                    found = [world.copies.blocks[block] for block in ids]
                    assert found == [record_of(n) for n in numbers]
                else:
                    run = world.demote([10_000 * (seed + 1) + step])
                    if step % 2:
                        run.cancel()
                    assert run.wait(DEADLINE_S)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    world.check()


def _hang_in_get(world: World) -> Run:
    world.far.hang = threading.Event()
    return world.load([Segment(1, 0, 2)])


def _hang_in_put(world: World) -> Run:
    world.far.hang = threading.Event()
    return world.demote(range(20, 22), tiers=[1])


def _hang_in_drop(world: World) -> Run:
    """A promotion takes the record from the far tier, which hangs in erasing it."""
    reads = iter([True])

    def hang_after_the_read() -> None:
        if next(reads, False):
            return
        world.far.hang = world.far.hang or threading.Event()

    world.far.before_call = hang_after_the_read
    return world.load([Segment(1, 0, 2)], promote_to=0, copies=Copies.FIRST)


@pytest.mark.parametrize("hang", [_hang_in_get, _hang_in_put, _hang_in_drop])
@pytest.mark.parametrize(
    "look",
    [
        lambda world, run: world.executor.look(),
        lambda world, run: run.is_complete,
        lambda world, run: run.wait(0),
        lambda world, run: world.executor.drain(0),
        lambda world, run: world.executor.settle_unawaited(DEADLINE_S),
        lambda world, run: world.load([Segment(0, 0, 2)]),
    ],
    ids=["look", "is_complete", "wait", "drain", "settle_unawaited", "submit"],
)
def test_hung_cancelled_call_is_abandoned(world, hang, look) -> None:
    """Operations that wait for the same store are refused, whichever call finds that it hangs."""
    world.fill(range(4), range(10))
    cancelled = hang(world)
    assert world.far.hanging.wait(DEADLINE_S)
    waiting = [world.load([Segment(1, 0, 2)]), world.demote(range(30, 32), tiers=[1])]
    cancelled.cancel()
    assert cancelled.states.is_over
    world.clock.now_s = 1000.0
    look(world, waiting[0])
    assert world.executor.stuck_tiers == [1]
    assert all(run.wait(DEADLINE_S) for run in waiting)
    assert waiting[0].loaded == [False, False]
    assert waiting[1].stored == [set(), set()]
    world.executor.check_integrity()
    world.far.hang.set()
    world.check()
    assert world.executor.stuck_tiers == []
    world.fill([], range(2))
    again = world.load([Segment(1, 0, 2)])
    assert again.wait(DEADLINE_S)
    assert again.loaded == [True, True]
    world.check()
