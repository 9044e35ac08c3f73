"""What is kept of a run: JSON with every sample, the tables as Markdown, the plot beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import file_stem, shortened, taken
from benchmarks.vmm.driver_kinds import CUDA, SIMULATED, DriverKind
from benchmarks.vmm.section import Section

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "results"


def facts(kind: DriverKind) -> dict[str, Any]:
    """Machine, kernel, driver and date: what a figure is worth nothing without."""
    told = harness.facts()
    return {
        "driver": kind.name,
        "driver_is": kind.what,
        "simulated": kind.name == SIMULATED,
        **told,
        "load_before": f"{told['load_before']:.2f}",
    }


def stem(kind: DriverKind) -> str:
    """`<date>-<machine>-<driver>`; a GPU's name is in it, and so is that something is simulated."""
    driver = kind.name if kind.name != CUDA else f"cuda {kind.what.partition(',')[0]}"
    return file_stem(driver)


def write(
    folder: Path,
    kind: DriverKind,
    told: dict[str, Any],
    parts: dict[str, Any],
    sections: list[Section],
    skipped: dict[str, str],
) -> Path:
    """Writes the JSON and the Markdown file; returns the path that the plot goes to."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / stem(kind)
    content = told | {"parts": parts, "skipped": skipped}
    path.with_suffix(".json").write_text(
        json.dumps(shortened(content), separators=(",", ":")) + "\n"
    )
    path.with_suffix(".md").write_text(_markdown(kind, told, sections, skipped, path.name))
    return path.with_suffix(".png")


def _markdown(
    kind: DriverKind,
    told: dict[str, Any],
    sections: list[Section],
    skipped: dict[str, str],
    name: str,
) -> str:
    lines = [
        f"# Driver benchmark: {kind.label}",
        "",
        f"{taken(told)}; load before: {told['load_before']}.",
        f"Driver: {kind.what}.",
        "",
    ]
    if told["simulated"]:
        lines += ["**Simulated: no figure on this page was measured on a GPU.**", ""]
    lines += [f"![the figures]({name}.png)", ""]
    lines += [section.markdown() for section in sections]
    if skipped:
        lines += ["## Skipped", "", *(f"- {part}: {why}" for part, why in skipped.items()), ""]
    return "\n".join(lines)
