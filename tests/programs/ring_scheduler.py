"""The scheduler's side of a ring: a segment with a ring in it, and a pool over the ring.

with Scheduler(ranks=3) as scheduler, scheduler.all_workers() as workers:
    scheduler.pool.alloc(8); workers[2].mapped()
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from native_pools import LAYOUTS
from ring_worker import Worker

from kvelastic import _vmm, errors
from kvelastic.pool.pool import native_geometry
from kvelastic.shared import segment

PAGES = 8
TIMEOUT_S = 3600.0
"""Longer than a test may run: a call that waits for it hangs."""


def with_a_short_timeout(scenario: Callable[[float], None]) -> None:
    """Call `scenario` with a timeout of its ring, and a longer one if a busy machine exceeds it."""
    for timeout_s in (0.2, 2.0):
        with suppress(errors.ChannelError):
            return scenario(timeout_s)
    return scenario(20.0)


class Scheduler:
    """Made in this process; its workers are others."""

    def __init__(
        self,
        layout: str = "paged",
        pages: int = PAGES,
        timeout_s: float = TIMEOUT_S,
        ranks: int = 1,
        **options: object,
    ) -> None:
        name = f"kvtest_ring_{os.getpid()}_{random.randrange(1 << 40):x}"
        self.layout = LAYOUTS[layout]
        self.layout_name, self.pages, self.ranks = layout, pages, ranks
        self.segment = segment.create(name, engine="test", model="m", device="host")
        try:
            geometry = native_geometry(self.layout, pages)
            self.ring = _vmm.Ring.create(self.segment.control_block, geometry, timeout_s, ranks)
            total = pages * self.layout.page_bytes
            chosen = {
                "max_blocks": pages * self.layout.blocks_per_page,
                "limit_bytes": total,
                "capacity_bytes": total,
                "preallocate": False,
                "movable": True,
            } | options
            self.pool = _vmm.Pool(self.ring, **chosen)  # type: ignore[arg-type]
        except BaseException:
            self.segment.close()
            raise

    def start(self, rank: int = 0) -> Worker:
        """A worker process that is on its way: its `first_words` say what has become of it."""
        return Worker(self.segment.name, self.layout_name, self.pages, rank)

    def worker(self) -> Worker:
        """The one worker of a ring for one."""
        worker = self.start()
        assert worker.first_words == ["ready"]
        self.ring.wait_for_workers(TIMEOUT_S)
        return worker

    @contextmanager
    def all_workers(self) -> Iterator[list[Worker]]:
        """One a rank; they start at once."""
        with ExitStack() as stack:
            workers = [stack.enter_context(self.start(rank)) for rank in range(self.ranks)]
            for worker in workers:
                assert worker.first_words == ["ready"]
            self.ring.wait_for_workers(TIMEOUT_S)
            yield workers

    def ring_bytes(self) -> int:
        """Where the ring lies in the segment's file."""
        return self.segment.control_block.read_header()["ring_offset"]

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *_: object) -> None:
        self.segment.close()
