"""One page of 2 MiB mapped and unmapped in every rank, beside the driver's calls alone.

Alone: every worker process makes the calls of host_driver.cpp for one page when a bare futex wakes
it, and takes the time before and after; what counts is from the first one's begin to the last
one's end. So the wake-ups of all but the first rank are in it, and whatever the ranks wait for one
another in the kernel. What the ring takes beyond it: the pool, the first wake-up, the bookkeeping
of pages in the workers, the last answer. With bare futexes around the same calls it is seen what of
that any channel would take.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.harness import Figure
from benchmarks.ring.group import Group

BAR = "8 ranks: 50 us"


@dataclass(frozen=True)
class Size:
    """How long it takes."""

    turns: int
    rounds: int


FULL = Size(turns=50, rounds=20)
QUICK = Size(turns=4, rounds=5)


@dataclass
class Both:
    """Of one call, mapped or unmapped: through the ring, and by the drivers alone."""

    ring_us: list[float] = field(default_factory=list)
    own_us: list[float] = field(default_factory=list)
    bare_us: list[float] = field(default_factory=list)

    def add_own(self, taken: tuple[float, float]) -> None:
        self.own_us.append(taken[0])
        self.bare_us.append(taken[1])

    def rows(self, name: str, bar: str) -> list[Figure]:
        beyond, least = (
            [each - own for each, own in zip(whole, self.own_us, strict=True)]
            for whole in (self.ring_us, self.bare_us)
        )
        return [
            Figure(name, "us", self.ring_us, "", "drivers alone", self.own_us),
            Figure("  beyond the drivers", "us", beyond, bar, "bare futexes beyond them", least),
        ]


def figures(groups: Sequence[Group], size: Size) -> list[Figure]:
    """Map and unmap, each number of ranks."""
    taken = {group.ranks: (Both(), Both()) for group in groups}
    clock = time.perf_counter_ns
    for _ in range(size.turns):
        for group in groups:
            maps, unmaps = taken[group.ranks]
            pool = group.pool
            for _ in range(size.rounds):
                maps.add_own(group.own_page_us())
                unmaps.add_own(group.own_page_us())
                begin = clock()
                ids = pool.alloc(1)
                maps.ring_us.append((clock() - begin) / 1000)
                assert ids is not None
                pool.free(ids)
                begin = clock()
                given = pool.trim()
                unmaps.ring_us.append((clock() - begin) / 1000)
                assert given > 0
    rows = []
    for ranks, (maps, unmaps) in taken.items():
        bar = BAR if ranks == 8 else ""
        rows += maps.rows(f"map, {ranks} rank{'s' if ranks > 1 else ''}", bar)
        rows += unmaps.rows(f"unmap, {ranks} rank{'s' if ranks > 1 else ''}", bar)
    return rows
