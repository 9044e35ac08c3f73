"""One table of the report, as text for a terminal and as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.harness import number


@dataclass
class Section:
    """A heading, a table, and what a reader has to know beside it."""

    title: str
    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        table = [self.headings, *self.rows]
        widths = [max(len(row[i]) for row in table) for i in range(len(self.headings))]
        lines = [self.title]
        for row in table:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            lines.append(("  " + "  ".join(cells)).rstrip())
        return "\n".join([*lines, *(f"  - {note}" for note in self.notes)])

    def markdown(self) -> str:
        rule = "|".join("---" if i == 0 else "--:" for i in range(len(self.headings)))
        lines = [f"## {self.title}", "", _row(self.headings), f"|{rule}|"]
        lines += [_row(row) for row in self.rows]
        lines += ["", *(f"- {note}" for note in self.notes)]
        return "\n".join(lines).rstrip() + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def p99(samples: Sequence[float]) -> float:
    """The sample with 99% of all at or below it; the largest one of a hundred or fewer."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]


def median_p99(samples: Sequence[float]) -> str:
    return f"{number(statistics.median(samples))} ({number(p99(samples))})"


def median_ratio(upper: Sequence[float], lower: Sequence[float]) -> float:
    """Median of the quotients round by round: what both had in common in a round falls out."""
    return statistics.median(a / b for a, b in zip(upper, lower, strict=True))


__all__ = ["Section", "median_p99", "median_ratio", "number", "p99"]
