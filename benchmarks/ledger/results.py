"""What is kept of a run: JSON with every sample, and the tables as Markdown."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import HEADINGS, Figure, file_stem, shortened, taken

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "results"


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
        rows = [HEADINGS, *(figure.cells() for figure in self.figures)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
        lines = [f"{self.title} (load before: {self.load_before:.2f}; {self.seconds:.0f} s)"]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            lines.append("  " + "  ".join(cells).rstrip())
        return "\n".join([*lines, *(f"  {note}" for note in self._notes())])

    def markdown(self) -> str:
        """As it is kept."""
        rows = [HEADINGS, ("---",) * len(HEADINGS)]
        rows += [figure.cells() for figure in self.figures]
        lines = [f"## {self.title}", "", f"Load before: {self.load_before:.2f}.", ""]
        lines += [f"| {' | '.join(cell.strip() for cell in row)} |" for row in rows]
        notes = [f"- {note}" for note in self._notes()]
        return "\n".join([*lines, "", *notes, *([""] if notes else [])])

    def _notes(self) -> list[str]:
        return [f"{f.name.strip()}: {f.note}" for f in self.figures if f.note]


def write(folder: Path, told: dict[str, Any], parts: list[Part], failed: dict[str, str]) -> Path:
    """Writes both files; returns their path without its ending."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_stem()
    content = told | {"parts": [_plain(part) for part in parts], "failed": failed}
    path.with_suffix(".json").write_text(
        json.dumps(shortened(content), separators=(",", ":")) + "\n"
    )
    path.with_suffix(".md").write_text(_markdown(told, parts, failed))
    return path


def _plain(part: Part) -> dict[str, Any]:
    figures = [asdict(figure) | {"median": figure.median} for figure in part.figures]
    return asdict(part) | {"figures": figures}


def _markdown(told: dict[str, Any], parts: list[Part], failed: dict[str, str]) -> str:
    lines = [
        "# Ledger benchmark",
        "",
        f"{taken(told)}.",
        "",
        *(part.markdown() for part in parts),
    ]
    lines += [f"FAILED: {name}: {why}" for name, why in failed.items()]
    return "\n".join(lines).rstrip() + "\n"
