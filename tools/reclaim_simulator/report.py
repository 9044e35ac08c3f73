"""The report of the reclaim simulator: who got what, shared beside fixed equal parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvelastic.units import format_size
from tools.reclaim_simulator.result import ModelResult, SimulationResult
from tools.reclaim_simulator.trace import NS_PER_MS

if TYPE_CHECKING:
    from rich.table import Table

_SHARED, _SPLIT = "shared", "split"


def report_table(shared: SimulationResult, split: SimulationResult) -> Table:
    """Two rows a model: with reclaim, and with an equal fixed part of the device."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.ASCII2, pad_edge=False)
    for heading in ("Model", "Memory"):
        table.add_column(heading, no_wrap=True)
    for heading in (
        "Requests",
        "Served",
        "Late",
        "Refused",
        "Preempted",
        "Wait p50",
        "Wait p99",
        "Peak",
        "Cache lost",
        "Cache evicted",
        "Wakes",
    ):
        table.add_column(heading, justify="right")
    table.add_column("Got from")
    for with_reclaim, alone in zip(shared.models, split.models, strict=True):
        table.add_row(Text(with_reclaim.name), _SHARED, *_cells(with_reclaim))
        table.add_row("", _SPLIT, *_cells(alone), end_section=True)
    return table


def summary(shared: SimulationResult, split: SimulationResult) -> str:
    """Two lines: what moved, and how long it took."""
    moves = f"{len(shared.moves)} moves" if len(shared.moves) != 1 else "1 move"
    return (
        f"Given back because others asked: {format_size(shared.moved_bytes)} in {moves}.\n"
        f"Last request done with after {_milliseconds(shared.end_ns)} {_SHARED},"
        f" {_milliseconds(split.end_ns)} {_SPLIT}."
    )


def _cells(model: ModelResult) -> tuple[str, ...]:
    got = (f"{name} {format_size(size)}" for name, size in sorted(model.got_bytes_from.items()))
    return (
        str(model.requests),
        str(model.served),
        str(model.late),
        str(model.refused),
        str(model.preempted),
        _milliseconds(model.wait_ns(50)),
        _milliseconds(model.wait_ns(99)),
        format_size(model.peak_granted_bytes),
        format_size(model.cached_lost_bytes),
        format_size(model.cached_evicted_bytes),
        _wakes(model),
        ", ".join(got) or "-",
    )


def _wakes(model: ModelResult) -> str:
    """How many, how long the longest took, and how many were refused."""
    if not model.wakes_ns and not model.wakes_refused:
        return "-"
    parts = [str(len(model.wakes_ns))]
    if model.wakes_ns:
        parts[0] += f" in {_milliseconds(max(model.wakes_ns))}"
    if model.wakes_refused:
        parts.append(f"{model.wakes_refused} refused")
    return ", ".join(parts)


def _milliseconds(time_ns: int | None) -> str:
    return "-" if time_ns is None else f"{time_ns / NS_PER_MS:,.0f} ms"
