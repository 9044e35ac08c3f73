"""The maintenance thread: requests beside a busy Python, shrinking, trimming, decay, its end."""

from __future__ import annotations

import ctypes
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from native_pools import HUGE, LAYOUTS, Memory, alloc
from processes import LineProgram
from waiting import DEADLINE_S, wait_until

from kvelastic import _vmm, errors
from kvelastic.shared import segment

B = 8
PAGES = 12


class Instance:
    """A pool with its maintenance thread, and the segment as an operator sees it."""

    def __init__(self, *, idle_trim_s: float = -1.0, start: bool = True, **options: Any):
        name = f"kvtest_maintenance_{os.getpid()}_{random.randrange(1 << 40):x}"
        self.memory = Memory(LAYOUTS["paged"], PAGES)
        self.segment = segment.create(name, engine="test", model="m", device="host")
        self.pool = self.memory.pool(**options)
        self.idle_trim_s = idle_trim_s
        self.operator = segment.open_writable(name)
        self.maintenance: _vmm.MaintenanceThread | None = None
        if start:
            self.start()

    def start(self) -> None:
        self.maintenance = _vmm.MaintenanceThread.start(
            self.pool, self.segment.control_block, idle_trim_s=self.idle_trim_s, sanity_check=True
        )

    def request(self, limit_bytes: int | None = None, *, trim: bool = False) -> int:
        with self.operator.writing():
            return self.operator.control_block.write_request(limit_bytes, trim=trim)

    def answer(self, revision: int, *, settled: bool = True) -> dict:
        assert self.operator.control_block.wait_ack(revision, DEADLINE_S, settled=settled)
        return self.operator.control_block.read_ack()

    def looked(self) -> None:
        """Return when the maintenance thread has been through its loop since the call."""
        self.answer(self.request(trim=False))

    def __enter__(self) -> Instance:
        return self

    def __exit__(self, *_: object) -> None:
        if self.maintenance is not None:
            self.maintenance.stop()
        self.operator.close()
        self.segment.close()


def test_start_publishes_the_first_acknowledgement():
    with Instance(limit_bytes=3 * HUGE) as one:
        answer = one.operator.control_block.read_ack()
        assert (answer["revision"], answer["state"]) == (0, "applied")
        assert answer["effective_limit_bytes"] == 3 * HUGE
        assert one.operator.control_block.read_usage()["blocks_total"] == PAGES * B


def test_stop_right_after_start_returns() -> None:
    with Instance(start=False) as one:
        for _ in range(2000):
            one.start()
            assert one.maintenance is not None
            one.maintenance.stop()


@pytest.mark.parametrize(
    ("limit", "effective", "reason"),
    [
        (0, HUGE, "one page is always held"),
        (1, HUGE, "one page is always held"),
        (5 * HUGE, 5 * HUGE, ""),
        (5 * HUGE + 1, 5 * HUGE, ""),
        (1 << 50, 8 * HUGE, ""),
        ((1 << 64) - 1, 8 * HUGE, ""),
    ],
)
def test_request_is_acknowledged_while_idle(limit, effective, reason):
    with Instance(capacity_bytes=8 * HUGE) as one:
        answer = one.answer(one.request(limit))
        assert answer["state"] == "applied"
        assert answer["effective_limit_bytes"] == effective
        assert reason in answer["reason"]
        assert one.pool.limit_state()["effective_limit_bytes"] == effective


def test_memory_is_released_before_the_acknowledgement():
    with Instance() as one:
        ids = one.pool.alloc(PAGES * B - 1)
        one.pool.cache(ids[: 6 * B])
        one.pool.free(ids[6 * B :])
        answer = one.answer(one.request(2 * HUGE))
        assert answer["state"] == "applied"
        assert answer["mapped_bytes"] == one.memory.held_at_the_os() == 2 * HUGE
        assert one.operator.control_block.read_usage()["mapped_bytes"] == 2 * HUGE
        assert one.pool.has_evicted


OPERATOR = """
import sys
from kvelastic.shared import segment
with segment.open_writable(sys.argv[1]) as operator:
    print("open", flush=True)
    sys.stdin.readline()
    with operator.writing():
        revision = operator.control_block.write_request(int(sys.argv[2]))
    is_settled = operator.control_block.wait_ack(revision, 60, settled=True)
    print("answered" if is_settled else "not answered")
"""


def test_request_is_acknowledged_while_gil_is_held():
    """The operator is another process; the main thread here keeps the GIL meanwhile."""
    with Instance() as one:
        ids = one.pool.alloc(PAGES * B - 1)
        one.pool.free(ids)
        with LineProgram("-c", OPERATOR, one.segment.name, str(3 * HUGE)) as operator:
            assert operator.read() == "open"
            operator.send("go")
            answer = ctypes.create_string_buffer(100)
            # A function of a PyDLL keeps the GIL.
            ctypes.PyDLL(None).read(operator.process.stdout.fileno(), answer, len(answer))
            assert answer.value.rstrip() == b"answered"  # an unbuffered print writes its end later
        assert one.memory.held_at_the_os() == 3 * HUGE


def test_shrinking_completes_as_blocks_are_freed():
    with Instance() as one:
        ids = one.pool.alloc(PAGES * B - 1)
        pages = {p: [b for b in ids if one.memory.page_of(b) == p] for p in range(PAGES)}
        revision = one.request(4 * HUGE)
        answer = one.answer(revision, settled=False)
        assert (answer["state"], answer["over_bytes"]) == ("shrinking", (PAGES - 4) * HUGE)
        assert one.pool.alloc(1) is None
        for page in range(4, PAGES - 1):
            one.pool.free(pages[page])
            over = (PAGES - 1 - page) * HUGE
            wait_until(
                lambda over=over: one.operator.control_block.read_ack()["over_bytes"] == over,
                "the answer does not follow",
            )
        one.pool.free(pages[PAGES - 1])
        answer = one.answer(revision)
        assert (answer["state"], answer["over_bytes"]) == ("applied", 0)
        assert answer["mapped_bytes"] == one.memory.held_at_the_os() == 4 * HUGE
        one.pool.check_integrity()


def test_raised_limit_ends_shrinking():
    with Instance() as one:
        ids = one.pool.alloc(PAGES * B - 1)
        assert one.answer(one.request(4 * HUGE), settled=False)["state"] == "shrinking"
        answer = one.answer(one.request(PAGES * HUGE))
        assert answer["state"] == "applied"
        one.pool.free(ids)
        assert one.pool.alloc(PAGES * B - 1) is not None


def test_failed_driver_call_while_shrinking_is_retried():
    with Instance() as one:
        ids = one.pool.alloc(PAGES * B - 1)
        one.pool.free(ids)
        one.memory.driver.arm(1, 6)
        revision = one.request(4 * HUGE)
        answer = one.answer(revision)  # nothing else happens in this process meanwhile
        assert answer["state"] == "applied"
        assert one.memory.held_at_the_os() == 4 * HUGE


def test_trim_request_releases_parked_pages():
    with Instance(preallocate=True, min_reserved_pages=2, max_reserved_pages=4) as one:
        ids = one.pool.alloc(6 * B)
        one.pool.free(ids[B:])
        one.looked()
        revision = one.request(trim=True)
        answer = one.answer(revision)
        assert answer["state"] == "applied"
        assert answer["mapped_bytes"] < 4 * HUGE
        one.looked()
        one.looked()
        assert one.pool.stats()["pages_parked"] == 0, "what was trimmed was mapped again"
        assert one.pool.mapped_bytes == answer["mapped_bytes"] == one.memory.held_at_the_os()


def test_trim_does_not_change_the_limit():
    with Instance(limit_bytes=7 * HUGE) as one:
        answer = one.answer(one.request(trim=True))
        assert answer["effective_limit_bytes"] == 7 * HUGE


def test_preallocation_is_bounded_by_reserved_pages():
    with Instance(preallocate=True, min_reserved_pages=2, max_reserved_pages=4) as one:
        ids = one.pool.alloc(3 * B)
        wait_until(lambda: one.pool.stats()["pages_parked"] >= 2, "nothing stands by")
        for _ in range(5):
            one.looked()
        assert one.pool.stats()["pages_parked"] <= 4
        more = one.pool.alloc(B)
        wait_until(lambda: one.pool.stats()["pages_parked"] >= 2, "nothing stands by any more")
        one.pool.free(ids + more)
        one.pool.check_integrity()


def test_preallocated_pages_stay_within_the_limit():
    with Instance(
        preallocate=True, min_reserved_pages=5, max_reserved_pages=9, limit_bytes=3 * HUGE
    ) as one:
        one.pool.alloc(2 * B)
        for _ in range(3):
            one.looked()
        assert one.pool.mapped_bytes == one.memory.held_at_the_os() == 3 * HUGE


def test_without_preallocation_no_page_is_mapped_ahead():
    with Instance(preallocate=False) as one:
        one.looked()
        assert one.memory.held_at_the_os() == 0
        one.pool.alloc(2 * B)
        one.looked()
        assert one.memory.held_at_the_os() == 3 * HUGE


def test_maintenance_thread_survives_failed_allocations():
    with Instance(preallocate=True, min_reserved_pages=2, max_reserved_pages=4) as one:
        one.memory.driver.arm(1, 10**9)
        assert one.pool.alloc(2 * B) is None
        one.looked()
        one.memory.driver.arm(0)
        assert len(one.pool.alloc(2 * B)) == 2 * B


def test_idle_parked_pages_are_released():
    """Half of those that a burst took first, then all."""
    with Instance(idle_trim_s=0.2, start=False) as one:
        ids = one.pool.alloc(PAGES * B - 1)
        one.pool.free(ids[1:])
        one.start()
        held = PAGES * HUGE
        wait_until(lambda: one.pool.mapped_bytes != held, "nothing decays")
        wait_until(lambda: one.pool.mapped_bytes == HUGE, "pages stay parked")
        wait_until(lambda: one.memory.held_at_the_os() == HUGE, "the memory is not given back")
        assert one.operator.control_block.read_usage()["parked_bytes"] == 0


def test_parked_pages_decay_again_after_use():
    with Instance(idle_trim_s=0.05, preallocate=True) as one:
        for _ in range(3):
            ids = one.pool.alloc(6 * B)
            assert one.pool.mapped_bytes > HUGE
            one.pool.free(ids)
            wait_until(lambda: one.pool.mapped_bytes == HUGE, "nothing decays")
        one.looked()
        one.looked()
        assert one.pool.mapped_bytes == HUGE, "an idle pool maps nothing"


def test_decay_can_be_disabled():
    with Instance(idle_trim_s=-1.0) as one:
        one.pool.free(one.pool.alloc(6 * B))
        one.looked()
        assert one.pool.stats()["pages_parked"] == 6


@pytest.mark.parametrize("idle_trim_s", [-1.0, 3600.0], ids=["asleep", "with a timer"])
def test_stop_is_prompt_and_final(idle_trim_s):
    for _ in range(20):
        with Instance(idle_trim_s=idle_trim_s) as one:
            one.pool.free(one.pool.alloc(2 * B))
            one.maintenance.stop()  # which waits for no timer
            one.maintenance.stop()
            revision = one.request(HUGE)
            assert not one.operator.control_block.wait_ack(revision, 0.001)
            assert one.pool.limit_state()["limit_bytes"] == PAGES * HUGE
            one.pool.alloc(1)


def tasks() -> set[Path]:
    """The threads of this process. The kernel may show one for a moment after it was joined."""
    return set(Path("/proc/self/task").iterdir())


def test_dropped_maintenance_object_ends_its_thread():
    with Instance() as one:
        one.maintenance = None
        before = tasks()
        one.start()
        (thread,) = tasks() - before
        one.maintenance = None
        wait_until(lambda: thread not in tasks(), "its thread goes on")


def test_requests_wait_for_the_session():
    with Instance() as one:
        ids = one.pool.alloc(PAGES * B - 1)
        one.pool.cache(ids)
        with one.pool.session():
            available = one.pool.available_mapped()
            revision = one.request(2 * HUGE)
            assert not one.operator.control_block.wait_ack(revision, 0.1)
            assert not one.pool.has_evicted
            assert one.pool.available_mapped() == available
            assert len(one.pool.alloc(available)) == available, "what was seen can be taken"
        assert one.answer(revision, settled=False)["state"] == "shrinking"


def test_work_delayed_by_a_session_runs_after_exit():
    """A thread gives blocks back in another's session: nothing is evicted before that ends."""
    with Instance() as one:
        ids = one.pool.alloc(PAGES * B - 1)
        revision = one.request(2 * HUGE)
        assert one.answer(revision, settled=False)["state"] == "shrinking"
        with one.pool.session():
            giver = threading.Thread(target=one.pool.cache, args=(ids,))
            giver.start()
            giver.join()
            assert not one.pool.has_evicted
            one.pool.touch(ids[:B])
            one.pool.free(ids[:B])  # the session's own call
            assert one.pool.has_evicted
        assert one.answer(revision)["state"] == "applied"
    with Instance() as one:
        ids = one.pool.alloc(PAGES * B - 1)
        revision = one.request(2 * HUGE)
        assert one.answer(revision, settled=False)["state"] == "shrinking"
        with one.pool.session():
            giver = threading.Thread(target=one.pool.free, args=(ids,))
            giver.start()
            giver.join()
        assert one.answer(revision)["state"] == "applied", (
            "the maintenance thread went on after the session"
        )
        assert one.memory.held_at_the_os() == 2 * HUGE


def test_only_the_owner_can_start_maintenance():
    with Instance(start=False) as one, pytest.raises((errors.KvelasticError, ValueError)):
        _vmm.MaintenanceThread.start(one.pool, one.operator.control_block)


def test_requests_during_allocation_keep_the_last_limit():
    """Requests come at random while threads alloc and free; the last one holds at the end."""
    with Instance(idle_trim_s=0.01, preallocate=True) as one:
        wrong: list[object] = []
        stop = threading.Event()

        def work(seed):
            chance = random.Random(seed)
            mine: list[int] = []
            try:
                while not stop.is_set():
                    ids = one.pool.alloc(chance.randint(1, 20))
                    mine += ids or []
                    if ids is None or chance.random() < 0.5:
                        back, mine = mine[:15], mine[15:]
                        (one.pool.cache if chance.random() < 0.3 else one.pool.free)(back)
                one.pool.free(mine)
            except Exception as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        chance = random.Random(5)
        for _ in range(60):
            one.answer(one.request(chance.randint(0, PAGES) * HUGE, trim=True), settled=False)
        stop.set()
        for thread in threads:
            thread.join()
        assert wrong == []
        answer = one.answer(one.request(2 * HUGE))
        assert answer["state"] == "applied"
        assert one.memory.held_at_the_os() <= 2 * HUGE
        one.pool.check_integrity()
        assert one.pool.stats()["blocks_used"] == 0


def test_forked_child_leaves_the_parents_maintenance_running():
    with Instance() as one:
        (block,) = one.pool.alloc(1)
        one.memory.write(block, 4)
        child = os.fork()
        if child == 0:
            try:
                one.maintenance = None
            finally:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert one.answer(one.request(2 * HUGE))["state"] == "applied"
        assert one.memory.read(block) == {4}


def test_failed_pool_reports_failed_to_every_request() -> None:
    with Instance() as instance:
        ids = instance.pool.alloc(2 * B)
        assert ids is not None
        instance.looked()
        before = instance.operator.control_block.read_ack()["revision"]
        # Two creates and a map; then the second map fails, and so does undoing the first.
        instance.memory.driver.arm(4, 1 << 40)
        with pytest.raises(errors.PoolFailedError):
            instance.pool.alloc(2 * B)
        wait_until(
            lambda: instance.operator.control_block.read_ack()["state"] == "failed",
            "nobody said that the pool has failed",
        )
        answer = instance.operator.control_block.read_ack()
        assert answer["revision"] == before
        assert "restart" in answer["reason"]
        assert instance.answer(instance.request(PAGES * HUGE))["state"] == "failed"


def test_idle_cached_blocks_are_evicted_and_pages_released() -> None:
    with Instance(cache_idle_s=0.05, idle_trim_s=0.05) as instance:
        ids = alloc(instance.pool, 2 * B - 1)
        instance.pool.cache(ids[:B])
        wait_until(lambda: instance.pool.stats()["blocks_cached"] == 0, "idle blocks are cached")
        gone = {block for block, to in instance.pool.take_changes() if to == -1}
        assert gone == set(ids[:B])
        assert instance.pool.stats()["blocks_used"] == B - 1, "blocks in use stay"
        instance.pool.free(ids[B:])
        wait_until(lambda: instance.pool.stats()["pages_mapped"] == 1, "the emptied page is mapped")


def test_cached_blocks_stay_if_idle_eviction_is_off() -> None:
    with Instance(idle_trim_s=0.0) as instance:
        instance.pool.cache(alloc(instance.pool, 3))
        for _ in range(3):
            instance.looked()
        assert instance.pool.stats()["blocks_cached"] == 3


def test_idle_eviction_restarts_after_an_empty_cache() -> None:
    with Instance(cache_idle_s=0.05) as instance:
        ids = alloc(instance.pool, 3)
        for _ in range(2):  # with an empty cache the maintenance thread has no timer
            instance.pool.cache(ids)
            wait_until(lambda: instance.pool.stats()["blocks_cached"] == 0, "blocks are cached")
            ids = alloc(instance.pool, 3)


@pytest.mark.parametrize("cache_idle_s", [-1.0, 3600.0])
def test_round_without_idle_blocks_ignores_the_session(cache_idle_s: float) -> None:
    with Instance(cache_idle_s=cache_idle_s) as instance:
        instance.pool.cache(alloc(instance.pool, 3))
        instance.looked()
        with instance.pool.session():
            for _ in range(3):  # each begins when the round before has ended
                instance.looked()
