"""The ring between two real processes: commands, failures, and workers that die or stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvelastic import _vmm, errors, segment

WORKER = Path(__file__).parents[1] / "programs" / "ring_worker.py"
PAGES = 1200  # more than two entries of the ring take in one batch
PAGE_BYTES = 2 << 20


class Worker:
    def __init__(self, name: str, pages: int = PAGES) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), name, str(pages)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def serve(self) -> Worker:
        assert self.line() == "serving"
        return self

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, command: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.line()

    def end(self) -> str:
        self.process.kill()
        return self.process.communicate()[1]


@pytest.fixture
def instance() -> Iterator[segment.Segment]:
    with segment.create(None, engine="ringtest") as made:
        yield made


def geometry(pages: int = PAGES) -> _vmm.Geometry:
    return _vmm.Geometry(
        pages=pages, extent_bytes=PAGE_BYTES, block_bytes=256 << 10, blocks_per_page=8
    )


def make_pool(instance: segment.Segment, timeout_s: float) -> tuple[_vmm.Ring, _vmm.Pool]:
    ring = _vmm.Ring.create(instance.record, geometry(), timeout_s)
    total = PAGES * PAGE_BYTES
    return ring, _vmm.Pool(ring, max_blocks=PAGES * 8, limit_bytes=total, capacity_bytes=total)


def test_pages_are_mapped_in_the_other_process(instance: segment.Segment) -> None:
    ring, pool = make_pool(instance, 30)
    worker = Worker(instance.name)
    try:
        ring.wait_for_worker(30)
        worker.serve()
        ids = pool.alloc(100)
        assert ids is not None
        assert int(worker.ask("held")) == pool.mapped_bytes == 13 * PAGE_BYTES
        pool.free(ids)
        assert pool.trim() == 12 * PAGE_BYTES, "all but the null block's page"
        assert int(worker.ask("held")) == pool.mapped_bytes == PAGE_BYTES
    finally:
        worker.end()


def test_a_batch_of_several_entries_is_all_or_nothing(instance: segment.Segment) -> None:
    ring, pool = make_pool(instance, 60)
    worker = Worker(instance.name)
    try:
        ring.wait_for_worker(30)
        worker.serve()
        there = 8 * 4 - 1
        assert pool.ensure(there) == there
        # 600 pages are two entries of the ring (480 each); a page costs a create and a map.
        worker.ask(f"fail {480 * 2 + 100}")
        assert pool.ensure(there + 8 * 600) == there, "the device is out of memory"
        assert int(worker.ask("held")) == pool.mapped_bytes == 4 * PAGE_BYTES
        pool.check_integrity()
    finally:
        worker.end()


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_killed_worker_is_an_error_soon(instance: segment.Segment, when: str) -> None:
    ring, pool = make_pool(instance, 60)
    worker = Worker(instance.name)
    try:
        ring.wait_for_worker(30)
        worker.serve()
        pool.ensure(1)
        if when == "before":
            worker.end()
        else:
            # Stopped, it cannot answer; killed while the command waits, it never will.
            os.kill(worker.process.pid, signal.SIGSTOP)
            killer = subprocess.Popen(
                ["sh", "-c", f"sleep 0.3; kill -9 {worker.process.pid}"],
            )
        started = time.monotonic()
        with pytest.raises(errors.ChannelClosedError):
            pool.alloc(100)
        assert time.monotonic() - started < 30, "long before the ring's own deadline"
        if when == "during":
            killer.wait()
        with pytest.raises(errors.ChannelClosedError):
            pool.alloc(100)
        pool.check_integrity()
    finally:
        worker.end()


def test_a_stopped_worker_is_a_timeout_and_closes_the_ring(instance: segment.Segment) -> None:
    ring, pool = make_pool(instance, 0.3)
    worker = Worker(instance.name)
    try:
        ring.wait_for_worker(30)
        worker.serve()
        os.kill(worker.process.pid, signal.SIGSTOP)
        with pytest.raises(errors.ChannelTimeoutError, match="KVELASTIC_IPC_TIMEOUT"):
            pool.alloc(100)
        os.kill(worker.process.pid, signal.SIGCONT)
        with pytest.raises(errors.ChannelClosedError):
            pool.alloc(100)
        pool.check_integrity()
    finally:
        worker.end()


def test_another_layout_is_refused(instance: segment.Segment) -> None:
    ring, _ = make_pool(instance, 1)
    worker = Worker(instance.name, pages=PAGES + 1)
    assert "page layout is not the scheduler's" in worker.process.communicate()[1]
    with pytest.raises(errors.ChannelTimeoutError):
        ring.wait_for_worker(0.01)


def test_a_second_worker_is_refused(instance: segment.Segment) -> None:
    ring, _ = make_pool(instance, 1)
    first = Worker(instance.name)
    try:
        ring.wait_for_worker(30)
        second = Worker(instance.name)
        assert "serves this ring already" in second.process.communicate()[1]
    finally:
        first.end()


def test_no_ring_there(instance: segment.Segment) -> None:
    worker = Worker(instance.name)
    assert "no ring of version" in worker.process.communicate()[1]
