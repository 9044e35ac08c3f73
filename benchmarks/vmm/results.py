"""The page of a run; the plot lies beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import harness, pages
from benchmarks.harness import file_stem, taken
from benchmarks.vmm.driver_kinds import CUDA, SIMULATED, DriverKind
from benchmarks.vmm.section import Section


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
    kind: DriverKind,
    told: dict[str, Any],
    parts: dict[str, Any],
    sections: list[Section],
    skipped: dict[str, str],
    *,
    is_whole: bool,
    folder: Path | None,
) -> Path:
    """Write the page and the samples (`pages.keep`); returns the path for the plot."""
    name = stem(kind)
    page = _markdown(kind, told, sections, skipped, name)
    samples = told | {"parts": parts, "skipped": skipped}
    kept = pages.keep("vmm", page, samples, is_whole=is_whole, stem=name, folder=folder)
    return kept.with_suffix(".png")


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
