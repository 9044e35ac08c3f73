"""What a benchmark leaves: a page of tables in the tree, and every sample in build/bench/.

    PARTS = {"grants": ("1. A page granted and returned", measure_grants)}

    given = arguments("ledger", __doc__, PARTS)
    status = run("ledger", "Ledger benchmark", given, PARTS)

A whole run writes its page to benchmarks/<kind>/results/, to be committed. A quick or partial run
writes its page beside the samples, so that it cannot replace the page of a whole run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import (
    HEADINGS,
    Figure,
    end_by_exception,
    facts,
    file_stem,
    shortened,
    taken,
)

ROOT = Path(__file__).parents[1]


@dataclass
class Table:
    """The measurements of one part, as strings for the page and as `samples` for JSON."""

    headings: Sequence[str]
    rows: list[tuple[str, ...]]
    notes: list[str]
    samples: dict[str, Any]

    @staticmethod
    def of_figures(figures: Iterable[Figure], notes: Sequence[str] = ()) -> Table:
        figures = list(figures)
        told = [f"{figure.name.strip()}: {figure.note}" for figure in figures if figure.note]
        samples = {"figures": [asdict(figure) | {"median": figure.median} for figure in figures]}
        return Table(HEADINGS, [figure.cells() for figure in figures], [*notes, *told], samples)

    def markdown(self) -> str:
        """The table and its notes; readable without rendering."""
        rows = [tuple(self.headings), *self.rows]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        rows.insert(1, tuple("-" * width for width in widths))
        lines = [
            f"| {' | '.join(c.strip().ljust(w) for c, w in zip(row, widths, strict=True))} |"
            for row in rows
        ]
        return "\n".join([*lines, *([""] if self.notes else []), *(f"- {n}" for n in self.notes)])


@dataclass
class Part:
    """One part of a run, with the load of the machine when the part began."""

    name: str
    title: str
    load_before: float
    total_s: float
    table: Table

    def markdown(self) -> str:
        """The part's section of the page."""
        began = f"Load before: {self.load_before:.1f}; {self.total_s:.0f} s."
        return f"## {self.title}\n\n{began}\n\n{self.table.markdown()}"


Measure = Callable[[bool], Table]
"""Measures a part. True (`--quick`) asks for few rounds."""


def of_module(name: str) -> Measure:
    """The figures of a module that has no quick form: `figures() -> list[Figure]`."""
    return lambda _: Table.of_figures(importlib.import_module(name).figures())


def arguments(
    kind: str,
    description: str | None,
    parts: Mapping[str, tuple[str, Measure]],
    *,
    has_quick: bool = True,
    add_options: Callable[[argparse.ArgumentParser], None] = lambda _: None,
) -> argparse.Namespace:
    """Parse the options that benchmarks with parts share; exits for `--help` and wrong ones.

    `add_options` adds a benchmark's own ones.
    """
    parser = argparse.ArgumentParser(
        prog=f"scripts/bench {kind}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(quick=False)
    if has_quick:
        parser.add_argument("--quick", action="store_true", help="few rounds; kept in build/bench/")
    parser.add_argument("--part", action="append", choices=parts, help="only this (repeatable)")
    parser.add_argument("--results", type=Path, help="the folder for the page and the samples")
    add_options(parser)
    return parser.parse_args()


def run(
    kind: str, title: str, given: argparse.Namespace, parts: Mapping[str, tuple[str, Measure]]
) -> int:
    """Measure, print and keep the parts; returns the exit status, 1 if a part failed.

    A signal ends the process as `harness.end_by_exception` says.
    """
    end_by_exception()
    told = facts()
    done: list[Part] = []
    failed: dict[str, str] = {}
    for name in given.part or parts:
        heading, measure = parts[name]
        load_before, begin_s = os.getloadavg()[0], time.monotonic()
        print(f"  {heading}", flush=True)
        try:
            table = measure(given.quick)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"[:5000]
            print(f"FAILED: {name}: {failed[name]}\n", file=sys.stderr, flush=True)
            continue
        done.append(Part(name, heading, load_before, time.monotonic() - begin_s, table))
        print(f"\n{done[-1].markdown()}\n", flush=True)
    is_whole = not given.quick and given.part is None
    write(kind, title, told, done, failed, is_whole=is_whole, folder=given.results)
    return 1 if failed else 0


def write(
    kind: str,
    title: str,
    told: dict[str, Any],
    parts: Sequence[Part],
    failed: Mapping[str, str] | None = None,
    *,
    is_whole: bool,
    folder: Path | None = None,
) -> Path:
    """Keep a run of parts and say where; returns the page's path. `told` is `facts()`."""
    failed = failed or {}
    blocks = [f"# {title}", f"{taken(told)}.", *(part.markdown() for part in parts)]
    blocks += [f"FAILED: {name}: {why}" for name, why in failed.items()]
    samples = told | {
        "parts": [
            {"name": part.name, "load_before": part.load_before, "total_s": part.total_s}
            | part.table.samples
            for part in parts
        ],
        "failed": failed,
    }
    return keep(kind, "\n\n".join(blocks), samples, is_whole=is_whole, folder=folder)


def keep(
    kind: str,
    page: str,
    samples: Mapping[str, Any],
    *,
    is_whole: bool,
    stem: str | None = None,
    folder: Path | None = None,
) -> Path:
    """Write a page and the samples as JSON, and print their paths; returns the page's path.

    `folder` takes both; without it the page of a whole run goes to benchmarks/<kind>/results/ and
    everything else to build/bench/<kind>/. `stem` is `file_stem()` unless given.
    """
    stem = stem or file_stem()
    scratch = folder or ROOT / "build" / "bench" / kind
    pages = scratch if folder or not is_whole else ROOT / "benchmarks" / kind / "results"
    for each in (scratch, pages):
        each.mkdir(parents=True, exist_ok=True)
    path, raw = pages / f"{stem}.md", scratch / f"{stem}.json"
    path.write_text(page.rstrip() + "\n")
    raw.write_text(json.dumps(shortened(dict(samples)), separators=(",", ":")) + "\n")
    print(f"page: {path}\nsamples: {raw}")
    return path
