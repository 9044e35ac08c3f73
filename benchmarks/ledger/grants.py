"""A page granted and returned by one process, with nobody beside it."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.harness import Figure
from benchmarks.ledger.baseline import Baseline
from benchmarks.ledger.own_device import OwnDevice

PAGE_BYTES = 2 << 20
CAPACITY_PAGES = 1024
MEMBERS = (1, 8, 64)
"""A grant adds up all slots, so it is asked beside members that do nothing too."""


@dataclass(frozen=True)
class Size:
    """How long it takes."""

    rounds: int
    calls: int


FULL = Size(rounds=25, calls=100_000)
QUICK = Size(rounds=7, calls=20_000)


def figures(size: Size) -> list[Figure]:
    """Of a pair (grant and return), timed natively."""
    rows = []
    with Baseline.make() as baseline, OwnDevice(CAPACITY_PAGES * PAGE_BYTES) as device:
        member = device.join("taker").member
        joined = 1
        for members in MEMBERS:
            for number in range(joined, members):
                device.join(f"bystander-{number}")
            joined = members
            name = f"grant and return, {members} member{'s' if members > 1 else ''}"
            pair = Figure(name, "ns", [], "<= 1,000 ns", "two atomic adds")
            beside = Figure("  the same", "ns", pair.samples, "", "sum under a mutex")
            for _ in range(size.rounds):
                pair.floor_samples.append(baseline.two_adds_ns(size.calls))
                pair.samples.append(member.measure_grant_ns(PAGE_BYTES, size.calls))
                beside.floor_samples.append(baseline.mutex_ns(CAPACITY_PAGES, size.calls))
            rows += [pair, beside]
    rows[-2].note = "of 128 slots; every member that has joined is one more cache line to read"
    return rows
