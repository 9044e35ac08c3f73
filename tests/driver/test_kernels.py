"""Kernels at work with pages that are to be unmapped, on the simulated GPU.

Nothing here measures time: a kernel is held until the test lets it go, so what has returned before
that did not wait for it.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import gpu_cases
import pytest
from native_pools import HUGE
from processes import PROGRAMS, run_python
from ring_scheduler import TIMEOUT_S, Scheduler
from ring_worker import Worker
from waiting import DEADLINE_S, wait_until

from kvelastic import _vmm, errors

SIM_BUILD = Path(__file__).parents[1] / "sim" / "build"
B = 8
STREAM_ENTRIES = 1024


@pytest.fixture(scope="session")
def library() -> str:
    return subprocess.run([SIM_BUILD], check=True, capture_output=True, text=True).stdout.strip()


# ------------------------------------------------------------------------------- over the ring


def strict(library: str) -> dict[str, str]:
    """A simulated GPU as unforgiving as a real one."""
    return {
        "LD_LIBRARY_PATH": library,
        "KVSIM_STRICT_CONTEXT": "1",
        "KVSIM_UNREADABLE": "1",
        "KVSIM_LAG": "3",
    }


class Gpus:
    """A scheduler and its workers, each on a simulated GPU of its own."""

    def __init__(self, scheduler: Scheduler, workers: list[Worker]) -> None:
        self.scheduler, self.workers = scheduler, workers
        self.pool, self.worker = scheduler.pool, workers[0]

    def all(self, line: str) -> list[str]:
        return [worker.ask(line) for worker in self.workers]


@contextmanager
def gpus(
    library: str,
    *,
    ranks: int = 1,
    timeout_s: float = TIMEOUT_S,
    pages: int = 8,
    named: bool = True,
) -> Iterator[Gpus]:
    with ExitStack() as stack:
        scheduler = stack.enter_context(Scheduler(pages=pages, ranks=ranks, timeout_s=timeout_s))
        workers = [
            stack.enter_context(
                Worker(
                    scheduler.segment.name,
                    "paged",
                    pages,
                    rank,
                    program=str(PROGRAMS / "gpu_ring_worker.py"),
                    environment=strict(library),
                )
            )
            for rank in range(ranks)
        ]
        for worker in workers:
            assert worker.first_words == ["ready"]
            assert not named or worker.ask("name") == "done"
        scheduler.ring.wait_for_workers(TIMEOUT_S)
        yield Gpus(scheduler, workers)


class Background:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.outcome: object = None
        self._call = call
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.outcome = self._call()
        except Exception as error:
            self.outcome = error

    @property
    def waits(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> object:
        self._thread.join(DEADLINE_S)
        assert not self.waits
        return self.outcome


def looks(gpus: Gpus) -> list[int]:
    """How often each worker has looked whether its kernels are done."""
    return [int(count) for count in gpus.all("calls cuEventQuery")]


def wait_until_fenced(gpus: Gpus, before: list[int]) -> None:
    """Until each worker has asked its driver for a fence, so that the unmap waits."""
    while any(now <= was for now, was in zip(looks(gpus), before, strict=True)):
        pass


@pytest.mark.parametrize("ranks", [1, 2])
def test_alloc_continues_while_unmap_waits_for_kernel(library: str, ranks: int) -> None:
    with gpus(library, ranks=ranks) as on:
        pool = on.pool
        ids = pool.alloc(4 * B - 1)
        assert ids is not None
        pool.free(ids[B - 1 :])  # pages 1 to 3 are parked
        on.worker.ask("hold")
        for page in (1, 2, 3):
            on.worker.ask(f"read {page}")
        asked = looks(on)
        trim = Background(pool.trim)
        wait_until_fenced(on, asked)
        more = pool.alloc(3 * B)
        assert more is not None, "three pages were mapped while the others wait"
        on.scheduler.ring.ping()
        assert trim.waits
        assert on.worker.mapped() == list(range(7))
        assert pool.mapped_bytes == 7 * HUGE
        on.worker.ask("release")
        assert trim.result() == 3 * HUGE
        assert [worker.mapped() for worker in on.workers] == ranks * [[0, 4, 5, 6]]
        assert on.all("error") == ranks * ["0"]
        pool.check_integrity()


def test_alloc_maps_pages_while_stream_queue_is_full(library: str) -> None:
    """The event that the unmap waits for is recorded when the stream has room for it."""
    with gpus(library) as on:
        pool = on.pool
        ids = pool.alloc(4 * B - 1)
        assert ids is not None
        pool.free(ids[B - 1 :])
        on.worker.ask("hold")
        on.worker.ask(f"fill {STREAM_ENTRIES - 1}")
        asked = on.worker.ask("calls cuEventCreate")
        trim = Background(pool.trim)
        wait_until(lambda: on.worker.ask("calls cuEventCreate") != asked, "no event is made")
        assert len(pool.alloc(3 * B) or []) == 3 * B
        assert trim.waits
        on.worker.ask("release")
        assert trim.result() == 3 * HUGE
        assert on.all("error") == ["0"]
        pool.check_integrity()


def test_alloc_continues_while_lowered_limit_waits_for_kernel(library: str) -> None:
    with gpus(library, pages=12) as on:
        pool = on.pool
        ids = pool.alloc(6 * B - 1)
        assert ids is not None
        pool.free(ids[2 * B - 1 :])
        on.worker.ask("hold")
        asked = looks(on)
        lower = Background(lambda: pool.set_limit(2 * HUGE))
        wait_until_fenced(on, asked)
        state = pool.limit_state()
        assert state["state"] == "shrinking"
        assert state["over_bytes"] == 4 * HUGE
        assert pool.alloc(1) is None, "the limit holds for allocs at once"
        pool.free(ids[:B])
        assert len(pool.alloc(B) or []) == B
        pool.set_limit(12 * HUGE)
        assert len(pool.alloc(5 * B) or []) == 5 * B, "more than is parked: pages were mapped"
        assert lower.waits
        pool.check_integrity()
        on.worker.ask("release")
        result = lower.result()
        assert isinstance(result, dict)
        assert result["state"] == "applied"
        assert pool.mapped_bytes == len(on.worker.mapped()) * HUGE
        pool.check_integrity()


def test_pages_being_unmapped_are_counted_once(library: str) -> None:
    """Two threads reclaim at once: the second does not take as many pages again."""
    with gpus(library) as on:
        pool = on.pool
        ids = pool.alloc(8 * B - 1)
        assert ids is not None
        pool.free(ids[B - 1 :])
        on.worker.ask("hold")
        asked = looks(on)
        first = Background(lambda: pool.set_limit(5 * HUGE))
        wait_until_fenced(on, asked)
        assert pool.set_limit(5 * HUGE)["over_bytes"] == 3 * HUGE
        assert first.waits
        on.worker.ask("release")
        first.result()
        assert pool.mapped_bytes == 5 * HUGE
        assert len(on.worker.mapped()) == 5
        pool.check_integrity()


def test_failed_map_is_undone_while_kernel_runs(library: str) -> None:
    with gpus(library, ranks=2) as on:
        pool = on.pool
        ids = pool.alloc(B - 1)
        assert ids is not None
        on.worker.ask("hold")
        on.workers[1].ask("fail cuMemMap:1:CUDA_ERROR_OUT_OF_MEMORY")
        assert pool.alloc(2 * B) is None
        assert [worker.mapped() for worker in on.workers] == [[0], [0]]
        pool.check_integrity()


@pytest.mark.slow
def test_stopped_worker_times_out_but_not_long_kernel(library: str) -> None:
    timeout_s = 2.5
    with gpus(library, timeout_s=timeout_s) as on:
        pool = on.pool
        ids = pool.alloc(3 * B - 1)
        assert ids is not None
        pool.free(ids[B - 1 :])
        on.worker.ask("hold")
        trim = Background(pool.trim)
        (start,) = looks(on)
        end_s = time.monotonic() + 1.5 * timeout_s
        wait_until(lambda: looks(on)[0] - start >= 600 and time.monotonic() > end_s)
        assert trim.waits
        assert len(pool.alloc(B) or []) == B
        on.worker.pause()
        assert isinstance(trim.result(), errors.ChannelTimeoutError)
        on.worker.go_on()
        with pytest.raises(errors.ChannelClosedError):
            pool.alloc(2 * B)
        pool.check_integrity()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_worker_ending_during_kernel_wait_closes_channel(library: str, how: str) -> None:
    with gpus(library, ranks=2) as on:
        pool = on.pool
        pool.free(pool.alloc(3 * B - 1) or [])
        on.worker.ask("hold")
        asked = looks(on)
        trim = Background(pool.trim)
        wait_until_fenced(on, asked)
        if how == "kill":
            on.worker.kill()
        else:
            assert on.worker.ask("stop") == "done", "the kernel is not waited for"
        outcome = trim.result()
        assert isinstance(outcome, errors.ChannelClosedError)
        assert str(on.worker.pid) in str(outcome)
        pool.check_integrity()


@pytest.mark.slow
@pytest.mark.parametrize("call", ["cuEventCreate", "cuEventRecord", "cuEventQuery"])
def test_failed_kernel_wait_keeps_pages_mapped(library: str, call: str) -> None:
    with gpus(library, ranks=2) as on:
        pool = on.pool
        pool.free(pool.alloc(3 * B - 1) or [])
        on.workers[1].ask(f"fail {call}:1:CUDA_ERROR_UNKNOWN")
        with pytest.raises(errors.MappingError, match=r"rank 1.*CUDA_ERROR_UNKNOWN"):
            pool.trim()
        assert [worker.mapped() for worker in on.workers] == 2 * [[0, 1, 2]]
        pool.check_integrity()
        assert pool.trim() == 2 * HUGE
        assert [worker.mapped() for worker in on.workers] == 2 * [[0]]


def test_free_does_not_wait_for_running_kernels(library: str) -> None:
    """The engine's thread frees blocks over the limit while a kernel runs, and goes on."""
    with gpus(library) as on:
        pool = on.pool
        ids = pool.alloc(4 * B - 1)
        assert ids is not None
        maintenance = _vmm.MaintenanceThread.start(pool, on.scheduler.segment.control_block)
        try:
            pool.set_limit(2 * HUGE)
            on.worker.ask("hold")
            asked = looks(on)
            pool.free(ids[2 * B - 1 :])  # two pages' worth, on pages that are to go
            wait_until_fenced(on, asked)
            assert on.worker.mapped() == [0, 1, 2, 3]
            on.worker.ask("release")
            while len(on.worker.mapped()) > 2:
                pass
        finally:
            maintenance.stop()
        pool.check_integrity()


def test_worker_without_named_streams_refuses_to_unmap(library: str) -> None:
    with gpus(library, named=False) as on:
        pool = on.pool
        pool.free(pool.alloc(2 * B) or [])
        with pytest.raises(errors.StreamsUnknownError, match="use_streams"):
            pool.trim()
        assert on.worker.mapped() == [0, 1, 2]
        assert on.worker.ask("name") == "done"
        assert pool.trim() == 2 * HUGE


def test_unmap_without_a_thread_is_refused(library: str) -> None:
    with gpus(library) as on:
        pool = on.pool
        pool.free(pool.alloc(2 * B) or [])
        assert on.worker.ask("threads no") == "done"
        with pytest.raises(errors.MappingError, match="no thread"):
            pool.trim()
        assert on.worker.mapped() == [0, 1, 2]
        assert on.worker.ask("threads yes") == "done"
        assert pool.trim() == 2 * HUGE
        pool.check_integrity()


def test_graph_capture_tolerates_maps_and_unmaps(library: str) -> None:
    with gpus(library) as on:
        pool = on.pool
        assert on.worker.ask("capture") == "done"
        for _ in range(3):
            pool.free(pool.alloc(3 * B) or [])
            pool.trim()
        on.scheduler.ring.ping()
        assert on.worker.ask("captured") == "0"
        assert on.worker.ask("capture") == "done"
        pool.alloc(3 * B)
        assert on.worker.ask("captured") == "0"


# ----------------------------------------------------------------------------- in one process

CASES = sorted(name[5:] for name in vars(gpu_cases) if name.startswith("case_"))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_gpu_cases_in_one_process(library: str, case: str) -> None:
    environment = strict(library)
    done = run_python(PROGRAMS / "gpu_cases.py", case, environment=environment)
    assert done.stdout == "passed\n"
