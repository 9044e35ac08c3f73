"""Parts 2 and 3, counted: the calls that the simulator's trace shows, beside the arithmetic.

The simulator writes a line for each call that reaches it (KVSIM_TRACE). Nothing here is timed, and
no profile is set: it is about how many calls there are, which a GPU's driver would see as well.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.vmm import driver_kinds, kvcached_calls, layout_costs, own_pages, page_cycle
from benchmarks.vmm.bare_cuda import BareCuda
from benchmarks.vmm.layout_costs import LayoutCost
from benchmarks.vmm.models import GIB, LLAMA_3_8B, MIB, QWEN3_4B, Model
from benchmarks.vmm.section import Section

TITLE = "Calls and handles"
FULL: dict[str, Any] = {"kv_bytes": GIB}
QUICK: dict[str, Any] = {"kv_bytes": GIB // 4}


class Trace:
    """Counts the lines that the simulator has written since."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def calls(self, work: Callable[[], object]) -> Counter[str]:
        """How often each function was called in `work`."""
        seen = self._path.stat().st_size if self._path.exists() else 0
        work()
        with self._path.open() as file:
            file.seek(seen)
            return Counter(line.split(" ", 1)[0] for line in file)

    def memory_calls(self, work: Callable[[], object]) -> int:
        """How many of them manage memory; the others push contexts and ask events."""
        calls = self.calls(work)
        return sum(count for name, count in calls.items() if name.startswith("cuMem"))


def measure(kind: str, *, kv_bytes: int) -> dict[str, Any]:
    """`cycles` of one page, and `costs`: each row of the arithmetic with what was counted."""
    assert kind == driver_kinds.SIMULATED, "only the simulator has a trace"
    # The driver reads the variable at its first call in this process, which is still to come.
    with tempfile.NamedTemporaryFile(prefix="kvelastic_bench_trace_") as file:
        os.environ["KVSIM_TRACE"] = file.name
        trace = Trace(Path(file.name))
        cycles = count_cycles(trace)
        costs = [
            row for model in (LLAMA_3_8B, QWEN3_4B) for row in count_costs(trace, model, kv_bytes)
        ]
    return {"cycles": cycles, "costs": costs, "kv_bytes": kv_bytes}


def count_cycles(trace: Trace) -> dict[str, dict[str, int]]:
    """Calls of one page's cycle for a model of 36 layers: those for memory, and all others."""
    ways: dict[str, Callable[[], object]] = dict(page_cycle.cycles_of(driver_kinds.SIMULATED))
    cuda = BareCuda()
    for layout in (kvcached_calls.contiguous(QWEN3_4B), kvcached_calls.per_layer(QWEN3_4B)):
        replay = kvcached_calls.Replay(cuda, layout, page_ids=2)
        ways[layout.name] = partial(_grow_and_shrink, replay, range(1))
    counted = {}
    for name, cycle in ways.items():
        cycle()  # a recycled page has to exist first
        calls = trace.calls(cycle)
        memory = sum(count for call, count in calls.items() if call.startswith("cuMem"))
        counted[name] = {"memory": memory, "other": calls.total() - memory}
    return counted


def count_costs(trace: Trace, model: Model, kv_bytes: int) -> list[dict[str, Any]]:
    """Every layout grown and shrunk for so much KV, and the calls and handles seen."""
    told = []
    cuda = BareCuda()
    for cost in layout_costs.all_costs(model, kv_bytes):
        if cost.layout.startswith("paged"):
            counted = _count_own(trace, model, cost)
        else:
            counted = _count_theirs(trace, cuda, model, cost)
        told.append(cost.as_dict() | {"counted": counted})
    return told


def _count_own(trace: Trace, model: Model, cost: LayoutCost) -> dict[str, int]:
    memory = own_pages.reserve(
        driver_kinds.open_seam(driver_kinds.SIMULATED), model.paged(cost.page_bytes), cost.pages
    )
    pages = range(cost.pages)

    def one_by_one(*, destroy: bool) -> None:
        for page in pages:
            memory.map([page])
        for page in pages:
            memory.unmap([page], destroy=destroy)

    def at_once() -> None:
        memory.map(pages)
        memory.unmap(pages)

    given_back = trace.calls(lambda: one_by_one(destroy=True))
    one_by_one(destroy=False)
    return {
        "handles": given_back["cuMemCreate"],
        "given_back_calls": _memory_of(given_back),
        "recycled_calls": trace.memory_calls(lambda: one_by_one(destroy=False)),
        "batch_calls": trace.memory_calls(at_once),
    }


def _count_theirs(trace: Trace, cuda: BareCuda, model: Model, cost: LayoutCost) -> dict[str, int]:
    layouts = (kvcached_calls.contiguous(model), kvcached_calls.per_layer(model))
    layout = next(layout for layout in layouts if layout.name == cost.layout)
    replay = kvcached_calls.Replay(cuda, layout, cost.pages)
    pages = range(cost.pages)
    calls = trace.calls(partial(_grow_and_shrink, replay, pages))
    replay.close()
    total = _memory_of(calls)
    return {
        "handles": calls["cuMemCreate"],
        "given_back_calls": total,
        "recycled_calls": total,
        "batch_calls": total,
    }


def _grow_and_shrink(replay: kvcached_calls.Replay, pages: range) -> None:
    replay.grow(pages)
    replay.shrink(pages)


def _memory_of(calls: Counter[str]) -> int:
    return sum(count for name, count in calls.items() if name.startswith("cuMem"))


def sections(data: dict[str, Any], kind: driver_kinds.DriverKind) -> list[Section]:
    cycle_rows = [
        (name, str(calls["memory"]), str(calls["other"])) for name, calls in data["cycles"].items()
    ]
    rows = []
    for cost in data["costs"]:
        agree = all(cost[name] == count for name, count in cost["counted"].items())
        rows.append(
            (
                cost["model"],
                cost["layout"],
                f"{cost['page_bytes'] // MIB} MiB",
                str(cost["handles"]),
                str(cost["recycled_calls"]),
                str(cost["given_back_calls"]),
                str(cost["batch_calls"]),
                "yes" if agree else f"NO: {cost['counted']}",
            )
        )
    size = f"{data['kv_bytes'] / GIB:g} GiB"
    return [
        Section(
            "Calls of one page's cycle, 36 layers, counted in the simulator's trace",
            ("way", "memory calls", "other calls"),
            cycle_rows,
            [
                "kvcached's page is 144 MiB, ours 18 MiB: the next table is for equal bytes.",
                "Other calls: a context pushed and popped around each call, and one event recorded"
                " and asked before an unmap (unmap after use). ctypes callers have one context all"
                " the time, and kvcached's local path would wait for the whole device instead.",
            ],
        ),
        Section(
            f"Handles and memory calls to grow and shrink {size} of KV",
            ("model", "layout", "page", "handles", "calls, recycled", "given back", "one batch",
             "trace agrees"),
            rows,
            ["kvcached keeps no memory and batches nothing: its three figures are one.",
             "paged = all layers in one page, sorted by layer; contiguous = all layers of a block"
             " side by side; per layer = 2 MiB x layers x 2."],
        ),
    ]  # fmt: skip
