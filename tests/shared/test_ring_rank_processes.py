"""Worker processes of one ring that come, die, stand still, stop, or are not the right ones."""

from __future__ import annotations

import re
import threading
import time
from contextlib import ExitStack

import pytest
from ring_scheduler import PAGES, TIMEOUT_S, Scheduler, with_a_short_timeout
from ring_worker import Worker
from waiting import wait_until

from kvelastic import errors

B = 8


def name_of(worker: Worker) -> str:
    return rf"worker {worker.pid} \(rank {worker.rank}\)"


def assert_closed_naming(scheduler: Scheduler, worker: Worker) -> None:
    """The next command says who is gone, and later ones that the ring is closed."""
    with pytest.raises(errors.ChannelClosedError, match=f"^{name_of(worker)} is gone"):
        scheduler.pool.alloc(2 * B)
    with pytest.raises(errors.ChannelClosedError):
        scheduler.pool.alloc(2 * B)
    with pytest.raises(errors.ChannelClosedError):
        scheduler.ring.ping()
    scheduler.pool.check_integrity()


# ------------------------------------------------------------------------------------- gone, late


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_rank_dead_before_a_command_is_named(rank):
    with Scheduler(ranks=4) as scheduler, scheduler.all_workers() as workers:
        ids = scheduler.pool.alloc(B)
        workers[rank].kill()
        assert_closed_naming(scheduler, workers[rank])
        scheduler.pool.free(ids)


@pytest.mark.slow
@pytest.mark.parametrize("reaped", [True, False], ids=["reaped", "zombie"])
@pytest.mark.parametrize("command", ["map", "unmap"])
def test_rank_killed_during_a_command_is_named(reaped, command):
    with Scheduler(ranks=3) as scheduler, scheduler.all_workers() as workers:
        pool = scheduler.pool
        pool.free(pool.alloc(3 * B - 1))
        if command == "map":
            pool.trim()
        workers[1].pause()  # so that the command is under way when it dies
        outcome: list[object] = []

        def ask() -> None:
            try:
                outcome.append(pool.alloc(3 * B - 1) if command == "map" else pool.trim())
            except errors.ChannelError as error:
                outcome.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        asking.join(0.1)
        assert asking.is_alive()
        workers[1].kill(wait=reaped)
        asking.join()
        (error,) = outcome
        assert isinstance(error, errors.ChannelClosedError)
        assert f"worker {workers[1].pid} (rank 1) is gone" in str(error)
        pool.check_integrity()


def test_dead_rank_is_named_not_the_slow_one():
    with Scheduler(ranks=3) as scheduler, scheduler.all_workers() as workers:
        scheduler.pool.ensure(1)
        workers[0].pause()
        workers[2].kill()
        assert_closed_naming(scheduler, workers[2])


@pytest.mark.slow
@pytest.mark.parametrize("late", [[0], [2], [1, 2], [0, 1, 2]], ids=str)
def test_only_late_ranks_are_named(late):
    with_a_short_timeout(lambda timeout_s: late_ranks(late, timeout_s))


def late_ranks(late: list[int], timeout_s: float) -> None:
    with Scheduler(ranks=3, timeout_s=timeout_s) as scheduler, scheduler.all_workers() as workers:
        pool = scheduler.pool
        pool.ensure(1)
        for rank in late:
            workers[rank].pause()
        since = time.monotonic()
        with pytest.raises(errors.ChannelTimeoutError) as caught:
            pool.alloc(2 * B)
        assert time.monotonic() - since >= timeout_s
        named = ", ".join(name_of(workers[rank]) for rank in late)
        why = rf"^{named} did not answer in {timeout_s * 1000:.0f} ms \(KVELASTIC_IPC_TIMEOUT\)"
        if timeout_s < 20 and not re.match(why, str(caught.value)):
            raise caught.value  # another one was late as well
        assert re.match(why, str(caught.value))
        with pytest.raises(errors.ChannelClosedError):
            pool.alloc(1)
        for rank in late:
            workers[rank].go_on()
        # They map the pages after all, and the pool hands out no block of these.
        wait_until(lambda: all(worker.mapped() == [0, 1, 2] for worker in workers))
        assert pool.available_size() == 0
        pool.check_integrity()


def test_stopped_rank_is_named():
    with Scheduler(ranks=3) as scheduler, scheduler.all_workers() as workers:
        scheduler.pool.ensure(1)
        assert workers[1].ask("stop") == "done"
        assert_closed_naming(scheduler, workers[1])


# --------------------------------------------------------------------------------------- coming


def test_missing_ranks_are_named():
    with Scheduler(ranks=4) as scheduler, ExitStack() as stack:
        nobody = "as rank 0, 1, 2, 3;"
        with pytest.raises(errors.ChannelTimeoutError, match=nobody):
            scheduler.ring.wait_for_workers(0)
        first = stack.enter_context(scheduler.start(0))
        third = stack.enter_context(scheduler.start(2))
        assert [first.first_words, third.first_words] == [["ready"]] * 2
        with pytest.raises(errors.ChannelTimeoutError, match="as rank 1, 3;"):
            scheduler.ring.wait_for_workers(0.01)
        first.kill()
        with pytest.raises(errors.ChannelTimeoutError, match="as rank 0, 1, 3;"):
            scheduler.ring.wait_for_workers(0.01)


@pytest.mark.slow
def test_wait_for_workers_ends_with_the_last_rank():
    with Scheduler(ranks=3) as scheduler, ExitStack() as stack:
        arrived = threading.Event()

        def wait() -> None:
            scheduler.ring.wait_for_workers(TIMEOUT_S)
            arrived.set()

        waiting = threading.Thread(target=wait)
        waiting.start()
        for rank in (2, 0):
            assert stack.enter_context(scheduler.start(rank)).first_words == ["ready"]
        assert not arrived.wait(0.05)
        assert stack.enter_context(scheduler.start(1)).first_words == ["ready"]
        waiting.join()
        assert arrived.is_set()


def test_rank_outside_the_ring_is_rejected():
    with Scheduler(ranks=4) as scheduler, scheduler.start(4) as worker:
        assert worker.first_words == ["refused", "INVALID_ARGUMENT"]
        assert "no rank 4: the scheduler counts 4 workers" in worker.refusal


@pytest.mark.slow
def test_occupied_rank_is_rejected():
    with Scheduler(ranks=2) as scheduler, scheduler.all_workers() as workers:
        for taken in workers:
            with scheduler.start(taken.rank) as second:
                assert second.first_words == ["refused", "CHANNEL_CLOSED"]
                assert f"is worker {taken.pid}'s" in second.refusal
                assert f"rank {taken.rank} of this ring" in second.refusal
        assert len(scheduler.pool.alloc(2 * B)) == 2 * B
        assert workers[0].mapped() == workers[1].mapped() == [0, 1, 2]


@pytest.mark.parametrize(
    ("layout", "pages", "number"),
    [
        ("paged", PAGES + 1, f"pages is {PAGES + 1} there and {PAGES} here"),
        ("per buffer", PAGES, "extents_per_page is 3 there and 1 here"),
        ("one block a page", PAGES, "block_bytes is 1048576 there and 65536 here"),
        ("two words of blocks", PAGES, "block_bytes is 14336 there and 65536 here"),
    ],
)
def test_other_layout_is_rejected_with_both_numbers(layout, pages, number):
    with Scheduler(ranks=2) as scheduler:
        with Worker(scheduler.segment.name, layout, pages, rank=1) as worker:
            assert worker.first_words == ["refused", "INVALID_ARGUMENT"]
            assert f"layout of rank 1 is not the scheduler's ({number})" in worker.refusal
        with pytest.raises(errors.ChannelTimeoutError, match="as rank 0, 1;"):
            scheduler.ring.wait_for_workers(0.01)


def test_rank_that_had_pages_cannot_be_replaced():
    """Its range would be empty, and blocks have been handed out that lie on mapped pages."""
    with Scheduler(ranks=2) as scheduler, scheduler.all_workers() as workers:
        scheduler.pool.alloc(B)
        workers[1].kill()
        with scheduler.start(1) as second:
            assert second.first_words == ["refused", "CHANNEL_CLOSED"]


@pytest.mark.slow
def test_only_one_of_several_workers_gets_a_rank():
    for _ in range(3):
        with Scheduler() as scheduler, ExitStack() as stack:
            workers = [stack.enter_context(scheduler.start(0)) for _ in range(6)]
            assert [worker.first_words[0] for worker in workers].count("ready") == 1
