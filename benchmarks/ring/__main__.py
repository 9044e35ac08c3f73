"""`scripts/bench ring`: what a command to several worker processes takes.

    scripts/bench ring               all parts, about two minutes
    scripts/bench ring --quick       some seconds; its figures are no evidence
    scripts/bench ring --part pages

Every figure is printed beside a floor or a baseline of the same run. README.md says what they mean.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from benchmarks.harness import Figure, number, percentile
from benchmarks.pages import Table, arguments, run
from benchmarks.ring import nothing, pages
from benchmarks.ring.channels import Library
from benchmarks.ring.group import Group

RANKS = (1, 2, 4, 8)
HEADINGS = ("figure, us", "p50", "p90", "p99", "beside it", "p50", "p90", "p99", "bar, p50")
KEPT_PERCENTS = (0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9, 100)

Measure = Callable[[Sequence[Group], bool], list[Figure]]
PARTS: dict[str, tuple[str, Measure]] = {
    "back_to_back": (
        "1. A command that does nothing, one right after another",
        lambda groups, quick: nothing.back_to_back(
            groups, nothing.QUICK if quick else nothing.FULL
        ),
    ),
    "apart": (
        "2. The same, a millisecond apart",
        lambda groups, quick: nothing.apart(
            groups, nothing.APART_QUICK if quick else nothing.APART_FULL
        ),
    ),
    "pages": (
        "3. One page of 2 MiB, host driver",
        lambda groups, quick: pages.figures(groups, pages.QUICK if quick else pages.FULL),
    ),
}


def main() -> int:
    """Measure, print and keep; returns the exit status."""
    groups: list[Group] = []  # none for `--help`
    parts = {
        name: (title, partial(_table, measure, groups)) for name, (title, measure) in PARTS.items()
    }
    given = arguments("ring", __doc__, parts)
    with ExitStack() as stack:
        library = stack.enter_context(Library.make())
        groups += [stack.enter_context(Group(library, ranks)) for ranks in RANKS]
        return run("ring", "Ring benchmark", given, parts)


def _table(measure: Measure, groups: Sequence[Group], quick: bool) -> Table:
    """Of thousands of samples, some percentiles are kept."""
    figures = measure(groups, quick)
    kept = [
        {
            "name": figure.name,
            "rounds": len(figure.samples),
            "us": _percentiles(figure.samples, KEPT_PERCENTS),
            "mean_us": statistics.mean(figure.samples),
            "beside": figure.floor_name,
            "beside_us": _percentiles(figure.floor_samples, KEPT_PERCENTS),
            "bar": figure.bar,
            "note": figure.note,
        }
        for figure in figures
    ]
    return Table(
        HEADINGS,
        [_cells(figure) for figure in figures],
        [f"{figure.name.strip()}: {figure.note}" for figure in figures if figure.note],
        {"percents": KEPT_PERCENTS, "figures": kept},
    )


def _cells(figure: Figure) -> tuple[str, ...]:
    own = [number(value) for value in _percentiles(figure.samples, (50, 90, 99))]
    beside = [number(value) for value in _percentiles(figure.floor_samples, (50, 90, 99))]
    return (figure.name, *own, figure.floor_name, *(beside or ["", "", ""]), figure.bar)


def _percentiles(samples: Sequence[float], percents: Sequence[float]) -> list[float]:
    return [percentile(samples, percent) for percent in percents] if samples else []


if __name__ == "__main__":
    sys.exit(main())
