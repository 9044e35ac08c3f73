"""The picture of a run: who holds the memory over time, and the times to the first token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.two_models.bursts import BurstResult
from benchmarks.two_models.memory import Sample
from benchmarks.two_models.servers import HALVES, SHARED
from benchmarks.two_models.workload import MIB, MODELS, Workload

_TITLES = {HALVES: "Half of the budget each", SHARED: "One budget, shared"}
_COLORS = {"a": "tab:blue", "b": "tab:orange"}
_WAY_COLORS = {HALVES: "tab:red", SHARED: "tab:green"}


def draw(
    path: Path,
    title: str,
    workload: Workload,
    results: Sequence[BurstResult],
    samples: Sequence[Sample],
) -> None:
    """Writes a PNG: memory of both models in each way, below it the times to the first token."""
    import matplotlib as mpl

    mpl.use("Agg")  # no display is wanted or needed
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 1, figsize=(12, 11), layout="constrained")
    axes[0].sharex(axes[1])
    for place, way in zip(axes, (HALVES, SHARED), strict=False):
        _memory(place, way, workload, results, samples)
    _first_tokens(axes[2], results)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _memory(
    axes: Any,
    way: str,
    workload: Workload,
    results: Sequence[BurstResult],
    samples: Sequence[Sample],
) -> None:
    """Stacked: what each model holds, the darker part of it in use. Bursts are shaded."""
    below: dict[float, float] = {}
    for model in MODELS:
        mine = [s for s in samples if s.way == way and s.model == model]
        times = [s.at_s for s in mine]
        floor = [below.get(s.at_s, 0.0) for s in mine]
        used = [low + s.in_use_bytes / MIB for low, s in zip(floor, mine, strict=True)]
        held = [low + s.granted_bytes / MIB for low, s in zip(floor, mine, strict=True)]
        color = _COLORS[model]
        axes.fill_between(times, floor, used, color=color, label=f"{model}: in use")
        axes.fill_between(
            times, used, held, color=color, alpha=0.35, label=f"{model}: cached or parked"
        )
        below = dict(zip(times, held, strict=True))
    for result in results:
        if result.way == way:
            end_s = result.begin_s + result.total_s
            axes.axvspan(result.begin_s, end_s, color=_COLORS[result.model], alpha=0.08)
            axes.text(
                result.begin_s, workload.budget_bytes / MIB, f" burst at {result.model}",
                fontsize=8, va="bottom",
            )  # fmt: skip
    axes.axhline(workload.budget_bytes / MIB, color="black", linewidth=1)
    axes.set(
        title=f"{_TITLES[way]}: memory of both models (stacked)", xlabel="s", ylabel="MiB",
        ylim=(0, workload.budget_bytes / MIB * 1.12),
    )  # fmt: skip
    axes.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.14))


def _first_tokens(axes: Any, results: Sequence[BurstResult]) -> None:
    """The part of all requests that had their first token after so long."""
    for way in (HALVES, SHARED):
        times = sorted(s for r in results if r.way == way for s in r.first_token_s)
        parts = [(i + 1) / len(times) for i in range(len(times))]
        axes.step(times, parts, where="post", color=_WAY_COLORS[way], label=_TITLES[way])
    axes.set(
        xscale="log", xlabel="time to the first token, s", ylabel="part of all requests",
        title="Time to the first token", ylim=(0, 1.02),
    )  # fmt: skip
    axes.grid(alpha=0.3, which="both")
    axes.legend(loc="lower right")
