"""One scheduler, several worker processes: a command is carried out by all of them or by none."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest
from native_pools import HUGE, LAYOUTS, Memory, alloc
from ring_scheduler import PAGES, TIMEOUT_S, Scheduler
from ring_worker import Worker

from kvelastic import _vmm, errors
from kvelastic.shared import ledger, segment

pytestmark = pytest.mark.slow


B = 8
RANKS = 4


def everywhere(workers: Sequence[Worker], question: str) -> str:
    """What all of them answer."""
    answers = [worker.ask(question) for worker in workers]
    assert len(set(answers)) == 1, f"{question}: {answers}"
    return answers[0]


def name_of(worker: Worker) -> str:
    return rf"worker {worker.pid} \(rank {worker.rank}\)"


def tag(workers: Sequence[Worker], block: int, salt: int = 0) -> None:
    """Each rank's block holds something of its own."""
    for worker in workers:
        worker.ask(f"write {block} {(block + 7 * worker.rank + salt) % 251 + 1}")


def assert_tagged(workers: Sequence[Worker], where: dict[int, int], salt: int = 0) -> None:
    """Of each block that was tagged: where it is now."""
    for block, at in where.items():
        for worker in workers:
            told = worker.ask(f"read {at}")
            assert told == str((block + 7 * worker.rank + salt) % 251 + 1), (block, at, worker.rank)


def unmoved(ids: Sequence[int]) -> dict[int, int]:
    return {block: block for block in ids}


def with_holes(scheduler: Scheduler) -> list[int]:
    """Pages 0 to 3 are mapped, 1 and 3 of them parked: two runs. Answers what is in use."""
    pool, layout = scheduler.pool, scheduler.layout
    ids = alloc(pool, 4 * B - 1)
    pool.free([block for block in ids if layout.page_of(block) in (1, 3)])
    return [block for block in ids if layout.page_of(block) not in (1, 3)]


@pytest.fixture
def device() -> Iterator[str]:
    name = f"dev-{os.getpid()}-{random.randrange(1 << 40):x}"
    yield name
    assert not ledger.ledger_path("ring", name).exists()


# ------------------------------------------------------------------------------- when all is well


@pytest.mark.parametrize("layout", ["paged", "per buffer"])
def test_all_ranks_map_and_unmap_the_same_pages(layout):
    with Scheduler(layout, ranks=RANKS) as scheduler, scheduler.all_workers() as workers:
        pool = scheduler.pool
        assert everywhere(workers, "mapped") == ""
        assert pool.ensure(1) == B - 1
        assert everywhere(workers, "mapped") == "0"
        ids = pool.alloc(20)
        assert everywhere(workers, "mapped") == "0 1 2"
        for block in ids:
            tag(workers, block)
        assert_tagged(workers, unmoved(ids))
        assert int(everywhere(workers, "held")) == pool.mapped_bytes
        pool.free(ids)
        pool.trim()
        assert everywhere(workers, "mapped") == "0"
        pool.sleep()
        assert everywhere(workers, "mapped") == ""
        assert everywhere(workers, "held") == "0"
        pool.wake()
        assert len(pool.alloc(B)) == B
        assert everywhere(workers, "mapped") == "0 1"
        pool.check_integrity()


def test_ring_lists_its_workers():
    with Scheduler(ranks=3) as scheduler:
        assert scheduler.ring.workers == [(0, 0)] * 3
        with scheduler.all_workers() as workers:
            told = scheduler.ring.workers
            assert [pid for pid, _ in told] == [worker.pid for worker in workers]
            assert all(ticks > 0 for _, ticks in told)
            for _ in range(100):
                scheduler.ring.ping()


@pytest.mark.parametrize("layout", ["paged", "per buffer"])
def test_blocks_move_in_every_rank(layout):
    with Scheduler(layout, ranks=3) as scheduler, scheduler.all_workers() as workers:
        pool = scheduler.pool
        ids = pool.alloc(pool.available_size())
        kept = list({scheduler.layout.page_of(block): block for block in ids}.values())
        for block in kept:
            tag(workers, block)
        pool.free([block for block in ids if block not in kept])
        pool.cache(kept)
        workers[1].ask("arm 1 1")
        with pytest.raises(errors.MappingError, match=f"{name_of(workers[1])}: copy"):
            pool.compact()
        assert pool.take_changes() == []
        assert_tagged(workers, unmoved(kept))
        pool.check_integrity()
        while pool.compact():
            pass
        pool.trim()
        assert len(everywhere(workers, "mapped").split()) == 2, "eight blocks and the null block"
        where = unmoved(kept)
        origin = unmoved(kept)
        for block, to in pool.take_changes():
            origin[to] = origin.pop(block)
            where[origin[to]] = to
        assert where != unmoved(kept)
        assert_tagged(workers, where)


def test_ring_works_with_64_ranks():
    with Scheduler(ranks=64) as scheduler, ExitStack() as stack:
        opened = stack.enter_context(segment.open_writable(scheduler.segment.name))
        memories = [Memory(LAYOUTS["paged"], PAGES) for _ in range(64)]
        for rank, memory in enumerate(memories):
            worker = _vmm.RingWorker.start(opened.control_block, memory.range, rank)
            stack.callback(worker.stop)
        scheduler.ring.wait_for_workers(TIMEOUT_S)
        pool = scheduler.pool
        assert len(pool.alloc(2 * B - 1)) == 2 * B - 1
        assert {memory.range.mapped_pages for memory in memories} == {2}
        memories[63].driver.arm(5)
        assert pool.alloc(2 * B) is None
        assert {memory.range.mapped_pages for memory in memories} == {2}
        assert {memory.held_at_the_os() for memory in memories} == {2 * HUGE}
        pool.check_integrity()


@pytest.mark.parametrize("ranks", [0, 65])
def test_ring_requires_1_to_64_workers(ranks):
    with pytest.raises(errors.InvalidArgumentError, match=f"1 to 64 workers, not {ranks}"):
        Scheduler(ranks=ranks)


# --------------------------------------------------------------------------- one rank cannot do it


@pytest.mark.parametrize(
    ("layout", "pages", "calls"),
    [("paged", 3, 7), ("per buffer", 1, 9)],
    ids=["paged", "per buffer"],
)
def test_driver_failure_in_any_rank_maps_nothing(layout, pages, calls):
    """The steps of what is mapped at once: each create, each map, then access."""
    with Scheduler(layout, ranks=RANKS) as scheduler, scheduler.all_workers() as workers:
        pool = scheduler.pool
        for worker in workers:
            for step in range(1, calls + 1):
                worker.ask(f"arm {step} 1")
                assert pool.alloc(pages * B - 1) is None
                assert everywhere(workers, "mapped") == ""
                assert int(everywhere(workers, "held")) == pool.mapped_bytes == 0
                pool.check_integrity()
        for worker in workers:
            worker.ask("arm 0 0")
        ids = pool.alloc(pages * B - 1)
        assert int(everywhere(workers, "calls")) == calls, "there is no other step"
        assert everywhere(workers, "mapped") == " ".join(map(str, range(pages)))
        tag(workers, ids[-1])
        assert_tagged(workers, unmoved(ids[-1:]))


def test_simultaneous_rank_failures_are_one_failure():
    with Scheduler(ranks=RANKS) as scheduler, scheduler.all_workers() as workers:
        for failing in (workers, workers[1:], workers[:1] + workers[3:]):
            for step, worker in enumerate(failing):
                worker.ask(f"arm {1 + 2 * step} 1")
            assert scheduler.pool.alloc(3 * B - 1) is None
            assert everywhere(workers, "mapped") == ""
            assert everywhere(workers, "held") == "0"
        assert len(scheduler.pool.alloc(3 * B - 1)) == 3 * B - 1


def test_unmap_failure_in_one_rank_keeps_all_mapped():
    with Scheduler(ranks=RANKS) as scheduler, scheduler.all_workers() as workers:
        pool = scheduler.pool
        used = with_holes(scheduler)
        for block in used:
            tag(workers, block)
        for worker in workers:
            for step in (1, 2):
                worker.ask(f"arm {step} 1")
                with pytest.raises(errors.MappingError, match=f"^{name_of(worker)}: unmap failed"):
                    pool.trim()
                assert everywhere(workers, "mapped") == "0 1 2 3"
                assert int(everywhere(workers, "held")) == pool.mapped_bytes == 4 * HUGE
                assert_tagged(workers, unmoved(used))
                pool.check_integrity()
                # The pages that could not go are as good as before.
                more = pool.alloc(2 * B)
                for block in more:
                    tag(workers, block, salt=step)
                assert_tagged(workers, unmoved(more), salt=step)
                assert_tagged(workers, unmoved(used))
                pool.free(more)
        assert pool.trim() == 2 * HUGE
        assert everywhere(workers, "mapped") == "0 2"
        assert_tagged(workers, unmoved(used))


FIRST_BATCH_PAGES = 4  # what a pool maps first: 8 MiB; the next batch is twice as large
CALLS_OF_THE_FIRST = 2 * FIRST_BATCH_PAGES + 1  # create and map each, one access for the run
CALLS_OF_THE_SECOND = 4 * FIRST_BATCH_PAGES + 1
MANY = 50


def test_failure_in_a_later_batch_undoes_that_batch():
    with (
        Scheduler(pages=MANY, ranks=3, timeout_s=-1) as scheduler,
        scheduler.all_workers() as workers,
    ):
        pool = scheduler.pool
        workers[2].ask(f"arm {CALLS_OF_THE_FIRST + 5} 1")
        # Undone in all ranks, and tried again: no rank has a page twice, or one that others lack.
        assert len(pool.alloc(MANY * B - 1)) == MANY * B - 1
        assert int(workers[2].ask("calls")) > 2 * MANY + 5
        assert everywhere(workers, "mapped") == " ".join(map(str, range(MANY)))
        assert everywhere(workers, "held") == str(MANY * HUGE)
        pool.check_integrity()


# ------------------------------------------------------------------------ what cannot be undone


def assert_closed(scheduler: Scheduler, workers: Sequence[Worker]) -> None:
    """Nothing waits for anybody any more, not even for one that stands still."""
    for worker in workers:
        worker.pause()
    pool = scheduler.pool
    for call in (lambda: pool.alloc(1), lambda: pool.ensure(1), lambda: pool.try_to_reserve(1)):
        with pytest.raises((errors.ChannelClosedError, errors.PoolFailedError)):
            call()
    with pytest.raises(errors.ChannelClosedError):
        scheduler.ring.ping()
    assert pool.available_size() == 0
    pool.check_integrity()


def test_map_that_cannot_be_undone_closes_the_ring():
    with Scheduler(ranks=3) as scheduler, scheduler.all_workers() as workers:
        scheduler.pool.ensure(1)
        workers[2].ask("arm 7 1")  # access, after three creates and three maps
        workers[0].ask("arm 8 1")  # which has done all that, and has to unmap it
        both = f"{name_of(workers[2])}: set_access.*not be undone.*{name_of(workers[0])}: unmap"
        with pytest.raises(errors.ChannelClosedError, match=both):
            scheduler.pool.alloc(3 * B)
        assert_closed(scheduler, workers)


def test_partly_undone_rank_fails_the_pool():
    with Scheduler(ranks=3) as scheduler, scheduler.all_workers() as workers:
        with_holes(scheduler)
        scheduler.pool.trim()
        workers[2].ask("arm 6 1")  # access of the second of two runs
        workers[0].ask("arm 8 2")  # unmaps one run, not the other, and cannot map the one again
        with pytest.raises(errors.PoolFailedError, match=name_of(workers[0])):
            scheduler.pool.alloc(2 * B)
        assert_closed(scheduler, workers)


def test_unmap_that_cannot_be_undone_closes_the_ring():
    """A rank that has unmapped pages needs new memory to have them mapped again."""
    with Scheduler(ranks=3) as scheduler, scheduler.all_workers() as workers:
        scheduler.pool.free(scheduler.pool.alloc(4 * B - 1))
        workers[1].ask("arm 1 1")
        workers[2].ask("arm 5 1")  # create, after an unmap and three destroys
        both = f"{name_of(workers[1])}: unmap.*not be undone.*{name_of(workers[2])}: create"
        with pytest.raises(errors.ChannelClosedError, match=both):
            scheduler.pool.trim()
        assert_closed(scheduler, workers)


def test_batch_that_cannot_be_undone_closes_the_ring():
    with (
        Scheduler(pages=MANY, ranks=2, timeout_s=-1) as scheduler,
        scheduler.all_workers() as workers,
    ):
        workers[0].ask(f"arm {CALLS_OF_THE_FIRST + 1} 1")  # the second batch's first call
        # The other rank has mapped that batch whole, and its first call to undo that fails.
        workers[1].ask(f"arm {CALLS_OF_THE_FIRST + CALLS_OF_THE_SECOND + 1} 1")
        with pytest.raises(errors.ChannelClosedError, match="could not be undone"):
            scheduler.pool.alloc(MANY * B - 1)
        assert_closed(scheduler, workers)


def test_rank_that_cannot_undo_fails_the_pool():
    with Scheduler(ranks=3) as scheduler, scheduler.all_workers() as workers:
        scheduler.pool.ensure(1)
        workers[1].ask("arm 5 1000")  # the second map, and all that would undo the first
        with pytest.raises(errors.PoolFailedError, match=name_of(workers[1])):
            scheduler.pool.alloc(3 * B)
        workers[1].ask("arm 0 0")
        assert everywhere([workers[0], workers[2]], "mapped") == "0"
        with pytest.raises(errors.PoolFailedError):
            scheduler.pool.alloc(1)


def test_permanent_failure_takes_precedence():
    """A pool that hears of the other would hand out blocks that a rank has in pieces."""
    with Scheduler(ranks=3) as scheduler, scheduler.all_workers() as workers:
        with_holes(scheduler)
        workers[0].ask("arm 1 1")  # cannot unmap, and nothing has changed
        workers[1].ask("arm 2 1000")  # unmaps one run, not the other, and cannot map the one again
        with pytest.raises(errors.PoolFailedError, match=name_of(workers[1])):
            scheduler.pool.trim()
        with pytest.raises(errors.PoolFailedError):
            scheduler.pool.alloc(B)


# ------------------------------------------------------------------------- a page in every rank


def test_page_counts_once_per_rank(device):
    """In what the pool says, in its limit and in what the ledger grants."""
    cost = 3 * HUGE
    with (
        ledger.join(
            device, group="ring", capacity_bytes=5 * cost + 2 * HUGE, name="mine", uuid=bytes(16)
        ) as joined,
        Scheduler(
            ranks=3,
            device_set=_vmm.DeviceSet([(joined.member, range(3))], HUGE),
            limit_bytes=PAGES * cost,
            capacity_bytes=PAGES * cost,
        ) as scheduler,
        scheduler.all_workers() as workers,
    ):
        pool, member = scheduler.pool, joined.member

        def assert_holds(pages: int) -> None:
            assert pool.mapped_bytes == member.granted_bytes == pages * cost
            assert sum(int(worker.ask("held")) for worker in workers) == pages * cost
            pool.check_integrity()

        assert_holds(0)
        pool.ensure(1)
        assert_holds(1)
        assert pool.stats()["page_bytes"] == cost
        maintenance = _vmm.MaintenanceThread.start(
            pool, scheduler.segment.control_block, idle_trim_s=-1
        )
        usage = scheduler.segment.control_block.read_usage()
        maintenance.stop()
        assert (usage["page_bytes"], usage["mapped_bytes"]) == (cost, cost)
        workers[1].ask("arm 3 1")
        assert pool.alloc(3 * B) is None
        assert_holds(1)
        ids = pool.alloc(5 * B - 1)
        assert_holds(5)
        assert pool.alloc(1) is None, "two copies of a page are no page"
        assert_holds(5)
        pool.free(ids)
        workers[2].ask("arm 1 1")
        with pytest.raises(errors.MappingError):
            pool.trim()
        assert_holds(5)
        told = pool.set_limit(4 * cost - 1)
        assert told["effective_limit_bytes"] == told["mapped_bytes"] == 3 * cost
        assert_holds(3)
        assert pool.trim() == 2 * cost
        assert_holds(1)
        pool.sleep()
        assert_holds(0)


def test_grant_is_kept_if_mappings_are_unknown(device):
    cost = 2 * HUGE
    with (
        ledger.join(
            device, group="ring", capacity_bytes=PAGES * cost, name="mine", uuid=bytes(16)
        ) as joined,
        Scheduler(
            ranks=2,
            device_set=_vmm.DeviceSet([(joined.member, range(2))], HUGE),
            capacity_bytes=PAGES * cost,
        ) as scheduler,
        scheduler.all_workers() as workers,
    ):
        scheduler.pool.ensure(1)
        workers[1].kill()
        with pytest.raises(errors.ChannelClosedError):
            scheduler.pool.alloc(B)
        assert joined.member.granted_bytes == 2 * cost
        scheduler.pool.check_integrity()


def test_device_without_ranks_is_rejected(device):
    with (
        ledger.join(device, group="ring", capacity_bytes=HUGE, name="m", uuid=bytes(16)) as joined,
        pytest.raises(errors.InvalidArgumentError, match="no rank has its pages on"),
    ):
        _vmm.DeviceSet([(joined.member, [])], HUGE)
