"""Part 8: 10 GiB of an idle model's cache go to a busy one, between two processes on one GPU.

The whole way that memory takes between models: the busy one's alloc asks by the ledger, the idle
one's maintenance thread evicts, unmaps and destroys, and the busy one creates and maps what it is
granted. The page is the default one at the driver's prices. No kernel runs, so none is waited for.

On the simulated driver, which waits as long as a GPU was reported to take, calls are counted in one
further round, by its trace.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.ledger.instance import BLOCKS_PER_PAGE, Instance
from benchmarks.ledger.own_device import idle_s
from benchmarks.vmm import driver_kinds, scarce_device
from benchmarks.vmm.models import GIB, MIB
from benchmarks.vmm.prices import PROFILES
from benchmarks.vmm.section import Section, median_p99, number
from kvelastic import _vmm
from kvelastic.device import page_size
from kvelastic.shared import ledger, segment

TITLE = "Handed over between two models"
FULL: dict[str, Any] = {"moved_bytes": 10 * GIB, "rounds": 10}
QUICK: dict[str, Any] = {"moved_bytes": GIB, "rounds": 2}
IDLE_S = _vmm.RECLAIM_IDLE_NS / 1e9 + 0.05
SOON_S = 30.0
WHOLE_MS, FIRST_MS = 30, 1
MOST_OF_FREE = 0.85


def measure(kind: str, *, moved_bytes: int, rounds: int) -> dict[str, Any]:
    """`whole_ms` and `first_ms` of each round; simulated, `calls` by function, of both processes.

    A device with too little free moves less.
    """
    group = f"bench-handover-{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="kvelastic_bench_handover_") as folder:
        # Read by the simulator at this process's first call: it is the device of all three.
        os.environ["KVSIM_MACHINE"] = f"{folder}/machine"
        driver = _vmm.CudaDriver("cuda")
        size_bytes = page_size.for_price(page_size.measured_price_us(driver), driver.total_bytes)
        # Beside the pages each process has a context: half a GiB on a GPU.
        moved_bytes = min(moved_bytes, int(driver.free_bytes * MOST_OF_FREE))
        pages = moved_bytes // size_bytes
        environ = {
            "KVELASTIC_DEVICE": "cuda",
            "KVELASTIC_LEDGER": group,
            "KVELASTIC_PAGE_PREALLOC_ENABLED": "false",
            "KVELASTIC_MAX_CACHED_TOKENS": "-1",
            "KVELASTIC_IDLE_TRIM_SECONDS": "-1",
            "KVELASTIC_RECLAIM_WAIT": str(SOON_S),
        }
        try:
            # The pages that move, and those of the two null blocks.
            shared_bytes = int((pages + 2.5) * size_bytes)
            environ["KVELASTIC_GPU_UTILIZATION"] = scarce_device.utilization(
                driver, shared_bytes, size_bytes // MIB, 2, environ
            )
            timed = _rounds(pages, size_bytes, rounds, environ)
            calls: Counter[str] = Counter()
            if kind == driver_kinds.SIMULATED:
                trace = Path(folder) / "trace"
                traced = environ | {"KVSIM_TRACE": str(trace)}
                calls = _rounds(pages, size_bytes, 1, traced, trace)[0]["calls"]
        finally:
            ledger.reap()
            segment.reap()
    return {
        "page_bytes": size_bytes,
        "pages": pages,
        "whole_ms": [one["done_ms"] for one in timed],
        # All in one batch: then the first page has come with the last.
        "first_ms": [one["first_ms"] or one["done_ms"] for one in timed],
        "calls": calls,
    }


def _rounds(
    pages: int, size_bytes: int, rounds: int, environ: dict[str, str], trace: Path | None = None
) -> list[dict[str, Any]]:
    """The pages go to the busy one and back, so many times; pre: the group is nobody's."""
    blocks = pages * BLOCKS_PER_PAGE
    done = []
    with (
        Instance(pages + 1, size_bytes // MIB, **environ) as idle,
        Instance(pages + 1, size_bytes // MIB, **environ) as busy,
    ):
        for one in (idle, busy):
            one.read()
            assert one.ask("alloc", BLOCKS_PER_PAGE - 1)["result"] is not None
        for _ in range(rounds):
            ids = idle.ask("alloc_until", blocks, SOON_S)["result"]["ids"]
            assert ids is not None, "the idle one does not get its memory back"
            idle.ask("cache", ids)
            while idle_s(environ["KVELASTIC_LEDGER"], idle.pid) < IDLE_S:
                time.sleep(0.02)
            seen = trace.stat().st_size if trace else 0
            got: dict[str, Any] = busy.ask("alloc_until", blocks, SOON_S)["result"]
            assert got["ids"] is not None, "the busy one does not get it"
            if trace:
                with trace.open() as file:
                    file.seek(seen)
                    got["calls"] = Counter(line.split(" ", 1)[0] for line in file)
            busy.ask("free", got.pop("ids"))
            busy.ask("trim")
            idle.ask("take_changes")
            done.append(got)
    return done


def priced_ms(data: dict[str, Any], profile: str) -> tuple[float, float]:
    """All calls one after the other, and those until the first page, at the bare prices."""
    prices, size_bytes = PROFILES[profile], data["page_bytes"]
    page_us = prices.own_us(size_bytes, given_back=True)
    return data["pages"] * page_us / 1000, page_us / 1000


def sections(
    data: dict[str, Any], kind: driver_kinds.DriverKind, profile: str = ""
) -> list[Section]:
    """At the bare prices of `profile` too, where one was simulated."""
    moved = data["pages"] * data["page_bytes"] / GIB
    notes = [
        f"{data['pages']} pages of {data['page_bytes'] // MIB} MiB, the default at these prices."
    ]
    priced = priced_ms(data, profile) if profile else None
    if priced is not None:
        calls = {name: count for name, count in data["calls"].items() if name.startswith("cuMem")}
        notes += [
            f"Calls of both: {json.dumps(calls)}.",
            "At bare prices: every call after the one before, as if one process made them all; two"
            " do, side by side, so a measured figure may be less.",
        ]
    whole, first = ("", "") if priced is None else map(number, priced)
    of = f"<= {WHOLE_MS}{'' if priced is None else ' at bare prices'}"
    rows = [
        ("all", median_p99(data["whole_ms"]), whole, of),
        ("first page", median_p99(data["first_ms"]), first, f"<= {FIRST_MS}"),
    ]
    on = f"simulated {profile}" if profile else kind.label
    title = f"{TITLE}: {moved:.3g} GiB, {on}, ms"
    return [Section(title, ("", "measured", "at bare prices", "bar"), rows, notes)]
