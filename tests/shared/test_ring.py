"""The ring between two real processes: a scheduler (this one) and a worker."""

from __future__ import annotations

import os
import random
import resource
import signal
import threading
import time

import pytest
from native_pools import HUGE, LAYOUTS, Memory, alloc
from processes import PROGRAMS, LineProgram
from ring_scheduler import PAGES, TIMEOUT_S, Scheduler, with_a_short_timeout
from ring_worker import Worker
from waiting import wait_until

from kvelastic import _vmm, errors
from kvelastic.shared import segment

B = 8


@pytest.fixture
def scheduler():
    with Scheduler() as made:
        yield made


@pytest.mark.parametrize("layout", ["paged", "per buffer"])
def test_worker_maps_and_unmaps_pages(layout):
    with Scheduler(layout) as scheduler, scheduler.worker() as worker:
        pool = scheduler.pool
        assert worker.mapped() == []
        assert pool.ensure(1) == B - 1
        assert worker.mapped() == [0]
        ids = pool.alloc(20)
        assert worker.mapped() == [0, 1, 2]
        for tag, block in enumerate(ids):
            worker.ask(f"write {block} {tag + 1}")
        pool.free(ids[1:])
        pool.trim()
        assert worker.mapped() == sorted({0, scheduler.layout.page_of(ids[0])})
        assert worker.ask(f"read {ids[0]}") == "1"
        assert int(worker.ask("held")) == pool.mapped_bytes
        pool.check_integrity()


@pytest.mark.parametrize("layout", ["paged", "per buffer"])
def test_worker_moves_blocks(layout):
    with Scheduler(layout) as scheduler, scheduler.worker() as worker:
        pool = scheduler.pool
        ids = pool.alloc(pool.available_size())
        by_page = {scheduler.layout.page_of(block): block for block in ids}
        for page, block in by_page.items():
            worker.ask(f"write {block} {page + 1}")
        pool.free([block for block in ids if block not in by_page.values()])
        pool.cache(list(by_page.values()))
        while pool.compact():
            pass
        pool.trim()
        assert len(worker.mapped()) == 2, "eight blocks and the null block"
        where = {block: page for page, block in by_page.items()}
        for block, to in pool.take_changes():
            where[to] = where.pop(block)
        for block, page in where.items():
            assert worker.ask(f"read {block}") == str(page + 1)


def test_worker_dead_before_a_command_closes_the_channel(scheduler):
    with scheduler.worker() as worker:
        scheduler.pool.ensure(1)
        worker.kill()
        with pytest.raises(errors.ChannelClosedError, match=str(worker.pid)):
            scheduler.pool.alloc(2 * B)
        with pytest.raises(errors.ChannelClosedError):
            scheduler.pool.alloc(2 * B)
        scheduler.pool.check_integrity()


@pytest.mark.parametrize("reaped", [True, False], ids=["reaped", "zombie"])
def test_worker_killed_during_a_command_closes_the_channel(scheduler, reaped):
    with scheduler.worker() as worker:
        scheduler.pool.ensure(1)
        worker.pause()  # so that the command is under way when it dies
        outcome: list[object] = []

        def ask():
            try:
                outcome.append(scheduler.pool.alloc(2 * B))
            except errors.ChannelError as error:
                outcome.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        asking.join(0.1)
        assert asking.is_alive()
        worker.kill(wait=reaped)
        asking.join()
        assert isinstance(outcome[0], errors.ChannelClosedError)
        scheduler.pool.check_integrity()


@pytest.mark.slow
def test_pages_of_a_late_unmap_are_never_reused():
    with_a_short_timeout(late_unmap)


def late_unmap(timeout_s: float) -> None:
    with Scheduler(timeout_s=timeout_s) as scheduler, scheduler.worker() as worker:
        pool = scheduler.pool
        ids = alloc(pool, 3 * B - 1)
        pool.free(ids[B - 1 :])
        worker.pause()
        since = time.monotonic()
        named = rf"{timeout_s * 1000:.0f} ms \(KVELASTIC_IPC_TIMEOUT"
        with pytest.raises(errors.ChannelTimeoutError, match=named):
            pool.trim()
        assert time.monotonic() - since >= timeout_s
        worker.go_on()
        wait_until(lambda: worker.mapped() == [0], "it does not unmap the pages after all")
        assert pool.available_size() == 0
        for call in (pool.alloc, pool.ensure):
            with pytest.raises(errors.ChannelError):
                call(B)
        pool.free(ids[: B - 1])
        pool.check_integrity()


@pytest.mark.slow
def test_late_map_times_out():
    with_a_short_timeout(late_map)


def late_map(timeout_s: float) -> None:
    with Scheduler(timeout_s=timeout_s) as scheduler, scheduler.worker() as worker:
        scheduler.pool.ensure(1)
        worker.pause()
        with pytest.raises(errors.ChannelTimeoutError):
            scheduler.pool.alloc(B)
        worker.go_on()
        with pytest.raises(errors.ChannelClosedError):
            scheduler.pool.alloc(1)
        scheduler.pool.check_integrity()


_STOPS_WITH_A_COMMAND_IN_FLIGHT = """
import os, signal, sys, threading
sys.path.insert(0, sys.argv[1])
from native_pools import HUGE
from ring_scheduler import Scheduler
from waiting import wait_until
from kvelastic import errors

def grow():
    try:
        print(len(scheduler.pool.alloc(8)), flush=True)
    except errors.ChannelError as error:
        print(error.code, flush=True)

with Scheduler(timeout_s=float(sys.argv[2])) as scheduler, scheduler.worker() as worker:
    try:
        scheduler.pool.ensure(1)
    except errors.ChannelError as error:
        print(error.code, flush=True)
        sys.exit()
    worker.pause()
    print(worker.pid, flush=True)
    growing = threading.Thread(target=grow)
    growing.start()
    wait_until(lambda: scheduler.pool.mapped_bytes == 2 * HUGE, "no map command is in flight")
    os.kill(os.getpid(), signal.SIGSTOP)
    growing.join()
"""


@pytest.mark.slow
def test_stopped_time_does_not_count_for_the_timeout():
    with_a_short_timeout(stopped_together)


def stopped_together(timeout_s: float) -> None:
    """Stop scheduler and worker for longer than the timeout, as Ctrl-Z in their shell does."""
    with LineProgram("-c", _STOPS_WITH_A_COMMAND_IN_FLIGHT, PROGRAMS, str(timeout_s)) as scheduler:
        begun = scheduler.read()
        if not begun.isdecimal():
            raise errors.ChannelTimeoutError(begun)
        worker_pid = int(begun)
        os.waitid(os.P_PID, scheduler.pid, os.WSTOPPED)
        time.sleep(2 * timeout_s)
        scheduler.go_on()
        os.kill(worker_pid, signal.SIGCONT)
        outcome = scheduler.read()
        assert scheduler.finish() == 0
        if outcome != "8":
            raise errors.ChannelTimeoutError(outcome)


@pytest.mark.slow
def test_descriptor_shortage_does_not_mean_the_worker_died():
    with_a_short_timeout(late_without_descriptors)


def late_without_descriptors(timeout_s: float) -> None:
    """A process out of descriptors cannot look at /proc, which says nothing about the worker."""
    with Scheduler(timeout_s=timeout_s) as scheduler, scheduler.worker() as worker:
        scheduler.pool.ensure(1)
        worker.pause()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        outcome: list[object] = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            scheduler.pool.alloc(B)
        except errors.ChannelError as error:
            outcome.append(type(error))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        worker.go_on()
        assert outcome == [errors.ChannelTimeoutError]


def test_stopped_worker_closes_the_channel(scheduler):
    with scheduler.worker() as worker:
        scheduler.pool.ensure(1)
        assert worker.ask("stop") == "done"
        with pytest.raises(errors.ChannelClosedError):
            scheduler.pool.alloc(B)


def test_driver_failure_in_the_worker_maps_nothing(scheduler):
    with scheduler.worker() as worker:
        pool = scheduler.pool
        pool.ensure(1)
        ids = pool.alloc(B - 1)
        for fail_at in range(1, 8):  # 3 creates, 3 maps, 1 access
            worker.ask(f"arm {fail_at} 1")
            assert pool.alloc(3 * B) is None
            assert worker.mapped() == [0]
            assert int(worker.ask("held")) == pool.mapped_bytes == HUGE
            pool.check_integrity()
        worker.ask("arm 0 0")
        more = pool.alloc(3 * B)
        assert len(more) == 3 * B
        pool.free(ids + more)
        worker.ask("arm 1 1")
        with pytest.raises(errors.MappingError, match="a test asked for it"):
            pool.trim()
        assert worker.mapped() == [0, 1, 2, 3]
        pool.trim()
        assert worker.mapped() == [0]
        pool.check_integrity()


def test_worker_that_cannot_undo_fails_the_pool(scheduler):
    with scheduler.worker() as worker:
        scheduler.pool.ensure(1)
        worker.ask("arm 5 1000")  # the second map, and all that would undo the first
        with pytest.raises(errors.PoolFailedError):
            scheduler.pool.alloc(3 * B)
        worker.ask("arm 0 0")
        with pytest.raises(errors.DriverError):
            scheduler.pool.alloc(1)


MANY = 500
FIRST_ENTRY = 480


@pytest.mark.slow
def test_batch_larger_than_a_ring_entry_is_split():
    with Scheduler(pages=MANY) as scheduler, scheduler.worker() as worker:
        pool = scheduler.pool
        ids = pool.alloc(MANY * B - 1)
        assert len(set(ids)) == MANY * B - 1
        assert worker.mapped() == list(range(MANY))
        pool.free(ids)
        worker.ask("arm 482 1")  # the first entry: one unmap and 480 destroys; this is the second
        with pytest.raises(errors.DriverError):
            pool.trim()
        assert worker.mapped() == list(range(MANY)), "the first part was undone"
        pool.check_integrity()
        assert pool.trim() == (MANY - 1) * HUGE
        assert worker.mapped() == [0]
        # Growth comes in batches: one that fails is undone and tried again, those before it stay.
        some_batches = 2 * FIRST_ENTRY + 20  # in the middle of one
        worker.ask(f"arm {some_batches} 1")
        again = pool.alloc((MANY - 1) * B)
        assert again is not None
        assert worker.mapped() == list(range(MANY))
        assert int(worker.ask("held")) == pool.mapped_bytes == MANY * HUGE
        pool.free(again)
        pool.trim()
        # Now undoing a batch fails as well: what is mapped is not known any more.
        worker.ask(f"arm {some_batches} 1000000")
        with pytest.raises((errors.ChannelClosedError, errors.PoolFailedError)):
            pool.alloc((MANY - 1) * B)
        with pytest.raises(errors.KvelasticError):
            pool.alloc(1)
        assert pool.available_size() == 0


# --------------------------------------------------------------------------------- attaching


def test_other_layout_is_rejected(scheduler):
    for layout, pages in (("per buffer", PAGES), ("paged", PAGES + 1)):
        with Worker(scheduler.segment.name, layout, pages) as worker:
            assert worker.first_words == ["refused", "INVALID_ARGUMENT"]
    with pytest.raises(errors.ChannelTimeoutError):
        scheduler.ring.wait_for_workers(0.01)


@pytest.mark.parametrize("word", [0, 1], ids=["magic", "version"])
def test_other_magic_or_version_is_rejected(scheduler, word):
    with scheduler.segment.path.open("r+b") as file:
        file.seek(scheduler.ring_bytes() + 4 * word)
        old = int.from_bytes(file.read(4), "little")
        file.seek(scheduler.ring_bytes() + 4 * word)
        file.write((old + 1).to_bytes(4, "little"))
    with Worker(scheduler.segment.name, "paged", PAGES) as worker:
        assert worker.first_words == ["refused", "SEGMENT_FORMAT"]


def test_segment_without_a_ring_is_rejected():
    with segment.create(f"kvtest_noring_{os.getpid()}", engine="test") as bare:
        with Worker(bare.name, "paged", PAGES) as worker:
            assert worker.first_words == ["refused", "SEGMENT_FORMAT"]
        with segment.open_readonly(bare.name) as readonly:
            memory = Memory(LAYOUTS["paged"], PAGES)
            with pytest.raises(errors.SegmentError):
                _vmm.RingWorker.start(readonly.control_block, memory.range)
            with pytest.raises(errors.SegmentError):
                _vmm.Ring.create(readonly.control_block, memory.range.geometry, 1.0)


def test_second_worker_is_rejected_while_the_first_lives(scheduler):
    with scheduler.worker() as first:
        with Worker(scheduler.segment.name, "paged", PAGES) as second:
            assert second.first_words == ["refused", "CHANNEL_CLOSED"]
        scheduler.pool.ensure(1)
        assert first.mapped() == [0]


def test_wait_for_workers_ends_when_a_worker_starts(scheduler):
    arrived: list[object] = []

    def wait():
        scheduler.ring.wait_for_workers(TIMEOUT_S)
        arrived.append(True)

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(0.05)
    assert not arrived
    with Worker(scheduler.segment.name, "paged", PAGES) as worker:
        assert worker.first_words == ["ready"]
        waiting.join()
        assert arrived


def test_forked_child_of_a_worker_keeps_channel_open(scheduler):
    with scheduler.worker() as worker:
        (block,) = scheduler.pool.alloc(1)
        worker.ask(f"write {block} 9")
        assert worker.ask("fork") == "done 0"
        assert worker.ask(f"read {block}") == "9"
        assert len(scheduler.pool.alloc(2 * B)) == 2 * B
        assert worker.mapped() == [0, 1, 2]


def test_worker_in_the_same_process_works(scheduler):
    memory = Memory(LAYOUTS["paged"], PAGES)
    opened = segment.open_writable(scheduler.segment.name)
    worker = _vmm.RingWorker.start(opened.control_block, memory.range)
    try:
        ids = scheduler.pool.alloc(5 * B)
        for block in ids:
            memory.write(block, 3)
        assert memory.held_at_the_os() == scheduler.pool.mapped_bytes
    finally:
        worker.stop()
        worker.stop()
        opened.close()


@pytest.mark.parametrize("ranks", [1, 3])
def test_threads_share_a_ring(ranks):
    with Scheduler(ranks=ranks) as scheduler, scheduler.all_workers() as workers:
        pool = scheduler.pool
        owners: set[int] = set()
        wrong: list[object] = []

        def work(seed):
            chance = random.Random(seed)
            mine: list[int] = []
            try:
                for _ in range(150):
                    ids = pool.alloc(chance.randint(1, 12)) or []
                    wrong.extend(block for block in ids if block in owners)
                    owners.update(ids)
                    mine += ids
                    chance.shuffle(mine)
                    cut = chance.randint(0, len(mine))
                    back, mine = mine[:cut], mine[cut:]
                    owners.difference_update(back)
                    pool.free(back)
                    if chance.random() < 0.2:
                        pool.trim()
                owners.difference_update(mine)
                pool.free(mine)
            except Exception as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        pool.check_integrity()
        pool.trim()
        assert [worker.mapped() for worker in workers] == ranks * [[0]]
        assert [int(worker.ask("held")) for worker in workers] == ranks * [HUGE]
