"""One picture a driver: the calls by page size, a page's cycle, grow and shrink, attention."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.vmm import call_costs, decode_attention, grow_shrink
from benchmarks.vmm.driver_kinds import SIMULATED, DriverKind
from benchmarks.vmm.models import GIB
from benchmarks.vmm.section import number

_COLUMNS = 2


def draw(path: Path, kind: DriverKind, told: dict[str, Any], parts: dict[str, Any]) -> None:
    """Writes a PNG with a panel for each part that has one."""
    import matplotlib as mpl

    mpl.use("Agg")  # no display is wanted or needed
    from matplotlib import pyplot

    panels: list[Callable[[Any], None]] = []
    if "call_costs" in parts:
        panels.append(lambda axes: _call_costs(axes, parts["call_costs"]))
    if "page_cycle" in parts:
        panels.append(lambda axes: _page_cycle(axes, parts["page_cycle"]))
    for name, data in parts.items():
        if name.startswith("grow_shrink"):
            profile = name.partition(" ")[2]
            panels.append(partial(_grow_shrink, data=data, profile=profile))
    if "decode_attention" in parts:
        data = parts["decode_attention"]
        panels += [
            partial(_attention, data=data, what=what) for what in decode_attention.measured(data)
        ]
    if not panels:
        return
    rows = -(-len(panels) // _COLUMNS)
    figure, grid = pyplot.subplots(
        rows, _COLUMNS, figsize=(13, 4.4 * rows + 0.8), squeeze=False, layout="constrained"
    )
    places = list(grid.flat)
    for panel, axes in zip(panels, places, strict=False):
        panel(axes)
    for axes in places[len(panels) :]:
        axes.axis("off")
    on = told["machine"]
    figure.suptitle(
        f"{kind.label}: {on['cpu']}, {on['cores']} cores, Linux {on['kernel']}, {told['date']}"
    )
    if kind.name == SIMULATED:
        # On the picture itself: pictures travel without their captions.
        for axes in places[: len(panels)]:
            axes.text(
                0.5, 0.5, "SIMULATED", transform=axes.transAxes, ha="center", va="center",
                fontsize=34, color="red", alpha=0.2, rotation=20, zorder=10,
            )  # fmt: skip
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _call_costs(axes: Any, data: dict[str, Any]) -> None:
    for call, points in call_costs.curves(data).items():
        sizes_mib, medians_us, p99s_us = zip(*points, strict=True)
        (line,) = axes.plot(sizes_mib, medians_us, marker="o", markersize=3, label=call)
        axes.plot(sizes_mib, p99s_us, linestyle=":", linewidth=0.9, color=line.get_color())
    axes.set(
        xscale="log", yscale="log", xlabel="MiB a page", ylabel="us",
        title="Driver calls: median, p99 dotted",
    )  # fmt: skip
    axes.set_xticks(sizes_mib, [str(size) for size in sizes_mib])
    axes.minorticks_off()
    axes.set_ylim(top=axes.get_ylim()[1] * 4)  # room for the legend
    axes.legend(fontsize=7, ncols=4, loc="upper center")


def _page_cycle(axes: Any, data: dict[str, Any]) -> None:
    ways = list(data["us"])
    medians_us = [statistics.median(data["us"][way]) for way in ways]
    bars = axes.bar(ways, medians_us, color=["tab:gray", "tab:blue", "tab:cyan", "tab:green"])
    axes.bar_label(bars, [f"{us:.3g}" for us in medians_us])
    axes.set(yscale="log", ylabel="us", title=f"A page's cycle, {data['page_bytes'] >> 20} MiB")


def _grow_shrink(axes: Any, data: dict[str, Any], profile: str) -> None:
    names = list(data["contestants"])
    both_ms = [grow_shrink.both_ms(data["contestants"][name]) for name in names]
    colors = ["tab:red" if name.startswith("kvcached") else "tab:blue" for name in names]
    bars = axes.barh(names, both_ms, color=colors)
    axes.bar_label(bars, [f" {number(ms)}" for ms in both_ms], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(1, 8 * max(both_ms))  # one start for all: bars of profiles can be compared
    size = f"{data['kv_bytes'] / GIB:g} GiB of KV"
    profile = profile and f" (simulated {profile})"
    axes.set(xscale="log", xlabel="ms", title=f"Grow and shrink {size}{profile}")


def _attention(axes: Any, data: dict[str, Any], what: str) -> None:
    for layout, points in decode_attention.ratios(data, what).items():
        batches, ratio = zip(*points, strict=True)
        axes.plot(batches, ratio, marker="o", markersize=3, label=layout)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(
        xscale="log", xlabel="requests", ylabel="time by a dense cache's", title=f"Decode: {what}"
    )
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.legend(fontsize=7, ncols=2)
