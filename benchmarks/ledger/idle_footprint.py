"""What an idle instance still holds after staggered traffic, with compaction and without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.harness import Figure
from benchmarks.ledger.own_device import OwnDevice
from benchmarks.ledger.staggered import PAGE_BYTES, Day, Outcome

CAPACITY_BYTES = 2 << 30
CACHED_TOKENS = 16_000
"""A bound, as kvcached has it by default: the floor is what the cached blocks need."""
AT_ONCE = 128
IDLE_TRIM_S = 0.25
THEIRS = 1.4
"""kvcached's after its fixes, from the reference document; not run here."""
SHAPES = {
    64: "64 blocks a page, as kvcached's and on an A100",
    32: "32 blocks a page, as on an H100",
    8: "8 blocks a page, our least",
}


@dataclass(frozen=True)
class Size:
    """Requests of a day, and how many days with other requests."""

    requests: int
    days: int


FULL = Size(requests=2500, days=5)
QUICK = Size(requests=600, days=2)


def outcome(day: Day) -> Outcome:
    """The day in a process of its own, on a device of its own."""
    device = OwnDevice(CAPACITY_BYTES, "idle")
    command = [sys.executable, "-m", "benchmarks.ledger.staggered", json.dumps(asdict(day))]
    with device:
        done = subprocess.run(
            command,
            check=True,
            cwd=Path(__file__).parents[2],
            env=os.environ | device.settings,
            stdout=subprocess.PIPE,
            text=True,
        )
    return Outcome(**json.loads(done.stdout))


def of_packed(outcomes: list[Outcome]) -> list[float]:
    """Bytes held after idle, of the fewest that hold the same blocks."""
    return [one.idle_bytes / one.packed_bytes for one in outcomes]


def lost_percent(one: Outcome) -> float:
    """Of the blocks that were known before."""
    return 100 * (1 - one.known_after / one.known_before)


def figures(size: Size) -> list[Figure]:
    """For pages as kvcached's and for ours."""
    rows = []
    for blocks_per_page, shape in SHAPES.items():
        with_it: list[Outcome] = []
        without: list[Outcome] = []
        for seed in range(size.days):
            for movable, outcomes in ((True, with_it), (False, without)):
                day = Day(
                    movable=movable,
                    blocks_per_page=blocks_per_page,
                    requests=size.requests,
                    at_once=AT_ONCE,
                    cached_tokens=CACHED_TOKENS,
                    idle_trim_s=IDLE_TRIM_S,
                    seed=seed,
                )
                outcomes.append(outcome(day))
        rows += _rows(shape, with_it, without)
    return rows


def _rows(shape: str, with_it: list[Outcome], without: list[Outcome]) -> list[Figure]:
    held = Figure("held idle, of the packed floor", "x", of_packed(with_it), "<= 1.05")
    held.floor_name, held.floor_samples = "without compaction", of_packed(without)
    one, other = with_it[0], without[0]
    held.name = f"{held.name}; {shape}"
    held.note = (
        f"peak {_pages(one.peak_bytes)} pages, then {_pages(other.idle_bytes)} without compaction"
        f" and {_pages(one.idle_bytes)} with it ({one.moved_blocks} blocks moved, settled after"
        f" {one.settle_s:.2f} s), floor {_pages(one.packed_bytes)} for {one.cached_blocks} cached"
        f" blocks; kvcached's figure, from the reference document and not run here: {THEIRS}"
    )
    lost = Figure("  cached blocks lost while idle", "%", [lost_percent(one) for one in with_it])
    lost.bar = "none"
    lost.note = f"{one.known_after:,} of {one.known_before:,} found again, contents and all"
    hits = Figure("  hit rate under traffic", "%", [_hit_percent(one) for one in with_it])
    hits.floor_name, hits.floor_samples = "without", [_hit_percent(one) for one in without]
    return [held, lost, hits]


def _hit_percent(one: Outcome) -> float:
    return 100 * one.hits / one.prompt_blocks


def _pages(bytes_: int) -> int:
    return bytes_ // PAGE_BYTES
