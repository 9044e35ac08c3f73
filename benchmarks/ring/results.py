"""What is kept of a run: JSON with the samples' distribution, and the tables as Markdown."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Figure, file_stem, number, shortened, taken

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "results"
HEADINGS = ("figure, us", "p50", "p90", "p99", "beside it", "p50", "p90", "p99", "bar, p50")
KEPT_PERCENTS = (0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9, 100)


def _percentiles(samples: list[float], percents: tuple[float, ...]) -> list[float]:
    if not samples:
        return []
    ordered = sorted(samples)
    return [ordered[min(len(ordered) - 1, int(len(ordered) * p / 100))] for p in percents]


def cells(figure: Figure) -> tuple[str, ...]:
    """The row of a table."""
    own = [number(value) for value in _percentiles(figure.samples, (50, 90, 99))]
    beside = [number(value) for value in _percentiles(figure.floor_samples, (50, 90, 99))]
    return (figure.name, *own, figure.floor_name, *(beside or ["", "", ""]), figure.bar)


@dataclass
class Part:
    """One part of a run, and how busy the machine was when it began."""

    name: str
    title: str
    load_before: float
    seconds: float
    figures: list[Figure]

    def text(self) -> str:
        """As it is printed."""
        rows = [HEADINGS, *(cells(figure) for figure in self.figures)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
        lines = [f"{self.title} (load before: {self.load_before:.2f}; {self.seconds:.0f} s)"]
        for row in rows:
            padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            lines.append("  " + "  ".join(padded).rstrip())
        return "\n".join([*lines, *(f"  {note}" for note in self._notes())])

    def markdown(self) -> str:
        """As it is kept."""
        rows: list[tuple[str, ...]] = [
            HEADINGS,
            ("---",) + ("--:",) * 3 + ("---",) + ("--:",) * 3 + ("---",),
        ]
        rows += [cells(figure) for figure in self.figures]
        lines = [f"## {self.title}", "", f"Load before: {self.load_before:.2f}.", ""]
        lines += [f"| {' | '.join(cell.strip() for cell in row)} |" for row in rows]
        notes = [f"- {note}" for note in self._notes()]
        return "\n".join([*lines, "", *notes, *([""] if notes else [])])

    def plain(self) -> dict[str, Any]:
        """As JSON: of thousands of samples, where they lie."""
        figures = [
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
            for figure in self.figures
        ]
        return {
            "name": self.name,
            "title": self.title,
            "load_before": self.load_before,
            "seconds": self.seconds,
            "percents": KEPT_PERCENTS,
            "figures": figures,
        }

    def _notes(self) -> list[str]:
        return [f"{figure.name.strip()}: {figure.note}" for figure in self.figures if figure.note]


def write(folder: Path, told: dict[str, Any], parts: list[Part]) -> Path:
    """Writes both files; returns their path without its ending."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_stem()
    content = told | {"parts": [part.plain() for part in parts]}
    path.with_suffix(".json").write_text(
        json.dumps(shortened(content), separators=(",", ":")) + "\n"
    )
    lines = [
        "# Ring benchmark",
        "",
        f"{taken(told)}.",
        "",
        *(part.markdown() for part in parts),
    ]
    path.with_suffix(".md").write_text("\n".join(lines).rstrip() + "\n")
    return path
