"""What is kept of a run: JSON with every sample, and the tables as Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import HEADINGS, Figure, file_stem, shortened, taken

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "results"


@dataclass
class Table:
    """What a part has measured."""

    headings: Sequence[str]
    rows: list[tuple[str, ...]]
    notes: list[str]
    samples: dict[str, Any]
    """All of them, for the JSON."""

    @staticmethod
    def of_figures(figures: Sequence[Figure], notes: Sequence[str] = ()) -> Table:
        told = [f"{figure.name}: {figure.note}" for figure in figures if figure.note]
        samples = {"figures": [asdict(figure) | {"median": figure.median} for figure in figures]}
        return Table(HEADINGS, [figure.cells() for figure in figures], [*notes, *told], samples)


@dataclass
class Part:
    """One part of a run, and how busy the machine was when it began."""

    name: str
    title: str
    load_before: float
    total_s: float
    table: Table

    def markdown(self) -> str:
        """As it is printed and kept."""
        rows = [tuple(self.table.headings), *self.table.rows]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        rows.insert(1, tuple("-" * width for width in widths))
        lines = [f"## {self.title}", ""]
        lines += [f"Load before: {self.load_before:.1f}; {self.total_s:.0f} s.", ""]
        for row in rows:
            cells = (cell.strip().ljust(width) for cell, width in zip(row, widths, strict=True))
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join([*lines, "", *(f"- {note}" for note in self.table.notes)])


TITLE = "transformers with and without kvelastic"


def text(
    told: dict[str, Any], parts: Sequence[Part], failed: dict[str, str], title: str = TITLE
) -> str:
    """The page."""
    blocks = [f"# {title}", f"{taken(told)}."]
    blocks += [part.markdown() for part in parts]
    blocks += [f"FAILED: {name}: {why}" for name, why in failed.items()]
    return "\n\n".join(blocks) + "\n"


def write(
    folder: Path,
    told: dict[str, Any],
    parts: Sequence[Part],
    failed: dict[str, str],
    *,
    title: str = TITLE,
) -> Path:
    """Write both files; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / f"{file_stem()}.md"
    page.write_text(text(told, parts, failed, title))
    content = told | {
        "parts": [
            {"name": part.name, "load_before": part.load_before, "total_s": part.total_s}
            | part.table.samples
            for part in parts
        ],
        "failed": failed,
    }
    page.with_suffix(".json").write_text(
        json.dumps(shortened(content), separators=(",", ":")) + "\n"
    )
    return page
