"""Random work over three ranks whose drivers fail now and then: they never disagree."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from ring_scheduler import Scheduler
from ring_worker import Worker

from kvelastic import errors

pytestmark = pytest.mark.slow


PAGES = 10
RANKS = 3
STEPS = 200
FAULTS = 0.4
MOST_CALLS = 24
"""One step makes about as many driver calls in a rank."""


class Work:
    """One engine's blocks, and what it has written into them."""

    def __init__(self, scheduler: Scheduler, workers: Sequence[Worker], seed: int) -> None:
        self.pool = scheduler.pool
        self.blocks_per_page = scheduler.layout.blocks_per_page
        self.workers = workers
        self.dice = random.Random(seed)
        self.used: dict[int, int] = {}
        """Tag by block."""
        self.cached: dict[int, int] = {}
        self.refused = 0
        self.next_tag = 0

    def some(self, blocks: dict[int, int]) -> list[int]:
        ids = list(blocks)
        self.dice.shuffle(ids)
        return ids[: self.dice.randint(0, len(ids))]

    def alloc(self) -> None:
        ids = self.pool.alloc(self.dice.randint(1, 3 * self.blocks_per_page))
        self.follow()  # what was evicted for it may be handed out again
        if ids is None:
            self.refused += 1
            return
        for block in ids:
            assert block not in self.used
            assert block not in self.cached
            self.next_tag = self.next_tag % 250 + 1
            self.used[block] = self.next_tag
            # Each rank has something of its own in it.
            for worker in self.workers:
                worker.ask(f"write {block} {self.next_tag ^ worker.rank}")

    def free(self) -> None:
        ids = self.some(self.used)
        self.pool.free(ids)
        for block in ids:
            del self.used[block]

    def cache(self) -> None:
        ids = self.some(self.used)
        self.pool.cache(ids)
        for block in ids:
            self.cached[block] = self.used.pop(block)

    def touch(self) -> None:
        ids = self.some(self.cached)
        self.pool.touch(ids)
        for block in ids:
            self.used[block] = self.cached.pop(block)

    def trim(self) -> None:
        self.pool.trim()

    def compact(self) -> None:
        self.pool.compact()

    def limit(self) -> None:
        page_bytes = self.pool.stats()["page_bytes"]
        self.pool.set_limit(self.dice.randint(1, PAGES) * page_bytes)

    def no_limit(self) -> None:
        self.pool.set_limit(PAGES * self.pool.stats()["page_bytes"])

    def follow(self) -> None:
        for block, to in self.pool.take_changes():
            tag = self.cached.pop(block)
            if to != -1:
                self.cached[to] = tag

    def step(self) -> str:
        """One call, perhaps with a driver that fails once on its way."""
        call = self.dice.choice(
            [self.alloc] * 4
            + [self.free, self.free, self.cache, self.touch]
            + [self.trim, self.trim, self.compact, self.compact, self.limit, self.no_limit]
        )
        failing = self.dice.choice(self.workers) if self.dice.random() < FAULTS else None
        if failing is not None:
            failing.ask(f"arm {self.dice.randint(1, MOST_CALLS)} 1")
        failure = ""
        try:
            call()
        except (errors.MappingError, errors.OutOfMemoryError) as error:
            failure = str(error)
            self.refused += 1
        if failing is not None:
            assert failure == "" or f"{failing.pid} (rank {failing.rank}): " in failure
            failing.ask("arm 0 0")
        else:
            assert failure == ""
        self.follow()
        return call.__name__

    def check(self) -> None:
        self.pool.check_integrity()
        pages = " ".join(map(str, self.pool.occupancy()))
        held = str(self.pool.mapped_bytes)
        for worker in self.workers:
            assert worker.ask("mapped") == pages
            assert worker.ask("held") == held

    def check_contents(self) -> None:
        for block, tag in (self.used | self.cached).items():
            for worker in self.workers:
                assert worker.ask(f"read {block}") == str(tag ^ worker.rank), (block, worker.rank)


@pytest.mark.parametrize("layout", ["paged", "per buffer"])
@pytest.mark.parametrize("seed", range(2))
def test_ranks_always_agree(layout, seed):
    with (
        Scheduler(layout, pages=PAGES, ranks=RANKS) as scheduler,
        scheduler.all_workers() as workers,
    ):
        work = Work(scheduler, workers, seed)
        for number in range(STEPS):
            name = work.step()
            try:
                work.check()
                if number % 10 == 0:
                    work.check_contents()
            except AssertionError as error:
                error.add_note(f"after step {number}, {name}, seed {seed}")
                raise
        work.check_contents()
        assert work.refused > 0, "no failure has reached the pool"
        assert work.pool.stats()["blocks_moved"] > 0
