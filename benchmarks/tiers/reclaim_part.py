"""A GiB that a busy instance takes from an idle one's prefix cache: tiers off, clean, dirty.

Blocks are 2 MiB in pages of 16 MiB, the tier is a folder on this machine's disk. Ways take turns.
`off` stands beside `off`, which says how much two rounds of the same differ.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from contextlib import ExitStack

from benchmarks.harness import Figure
from benchmarks.ledger.instance import BLOCKS_PER_PAGE, Instance
from benchmarks.ledger.moved_gib import BLOCKS, IDLE_S, PAGE_MIB, PAGES
from benchmarks.ledger.own_device import OwnDevice

ROUNDS = 12
SOON_S = 60.0
BUSY_S = 3
WAYS = ("off", "off again", "clean", "dirty")


class _Pair:
    """A giver of one way and a taker, on a ledger of their own."""

    def __init__(self, way: str, stack: ExitStack) -> None:
        self.way = way
        # Each instance always holds the page of its null block.
        self.device = stack.enter_context(
            OwnDevice((PAGES + 2) * (PAGE_MIB << 20), f"tiers-{way.replace(' ', '-')}")
        )
        environ = self.device.settings | {
            "KVELASTIC_PAGE_PREALLOC_ENABLED": "false",
            "KVELASTIC_MAX_CACHED_TOKENS": "-1",
            "KVELASTIC_IDLE_TRIM_SECONDS": "-1",
            "KVELASTIC_RECLAIM_WAIT": str(SOON_S),
        }
        tiers = {}
        if not way.startswith("off"):
            folder = tempfile.mkdtemp(prefix="kvelastic-bench-", dir="/var/tmp")
            stack.callback(shutil.rmtree, folder)
            tiers = {
                "KVELASTIC_TIERS": f"disk:{folder}:4G",
                # Only what this part asks for is cleaned.
                "KVELASTIC_TIER_IDLE_SECONDS": "3600",
            }
        self.giver = stack.enter_context(
            Instance(PAGES + 2, PAGE_MIB, module="benchmarks.tiers.giver", **environ, **tiers)
        )
        self.taker = stack.enter_context(Instance(PAGES + 2, PAGE_MIB, **environ))
        self.giver.read()
        self.taker.read()
        for one in (self.giver, self.taker):
            assert one.ask("alloc", BLOCKS_PER_PAGE - 1)["result"] is not None

    def move_ms(self) -> tuple[float, dict[str, int]]:
        """One GiB goes there and back; milliseconds of the way there, and counts of the giver."""
        before = self.giver.ask("stats")["result"]
        self.giver.ask("fill", BLOCKS)
        if self.way == "clean":
            assert self.giver.ask("clean")["result"] == 0
        while self.device.idle_s(self.giver.pid) < IDLE_S:
            time.sleep(0.02)
        got = self.taker.ask("alloc_until", BLOCKS, SOON_S)["result"]
        assert got["ids"] is not None
        self.taker.ask("free", got["ids"])
        self.taker.ask("trim")
        self.giver.ask("take_changes")
        after = self.giver.ask("stats")["result"]
        names = ("blocks_demoted", "blocks_dropped")
        return got["done_ms"], {name: after[name] - before[name] for name in names}


def figures() -> list[Figure]:
    """Milliseconds from ask to mapped, and what a busy giver above its watermark writes."""
    rows = {way: Figure(f"1 GiB reclaimed, {way}", "ms", []) for way in WAYS}
    counts: dict[str, dict[str, int]] = {}
    with ExitStack() as stack:
        pairs = [_Pair(way, stack) for way in WAYS]
        for _ in range(ROUNDS):
            for pair in pairs:
                ms, counts[pair.way] = pair.move_ms()
                rows[pair.way].samples.append(ms)
        dirty = next(pair for pair in pairs if pair.way == "dirty")
        written = _written_while_busy(dirty)
    for way in WAYS[1:]:
        rows[way].floor_name, rows[way].floor_samples = "off", rows["off"].samples
    rows["off again"].name = "control: tiers off beside off"
    rows["clean"].bar = "ratio <= 1.2"
    extra = Figure("dirty beside off: more", "ms", [], "<= 20 ms")
    extra.samples = [
        mine - other for mine, other in zip(rows["dirty"].samples, rows["off"].samples, strict=True)
    ]
    extra.note = (
        f"last round: {counts['dirty']['blocks_demoted']} demoted,"
        f" {counts['dirty']['blocks_dropped']} dropped"
    )
    rows["clean"].note = f"last round: {counts['clean']['blocks_dropped']} dropped"
    return [*rows.values(), extra, written]


def _written_while_busy(pair: _Pair) -> Figure:
    """Bytes that a giver with tiers writes to disk while it serves, free blocks above the mark."""
    figure = Figure("written while busy above the watermark", "bytes", [], "0")
    before = pair.giver.ask("tier")["result"]["written_bytes"]
    end = time.monotonic() + BUSY_S
    while time.monotonic() < end:
        pair.giver.ask("fill", 2)
        pair.giver.ask("take_changes")
        pair.giver.ask("clear")
        assert pair.giver.ask("alloc", 1)["result"] is not None
    figure.samples.append(pair.giver.ask("tier")["result"]["written_bytes"] - before)
    return figure
