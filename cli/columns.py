"""Columns of plain text, as wide as what stands in them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


def aligned(lines: Iterable[Sequence[str]], left: Collection[int]) -> list[str]:
    """Each line with its cells side by side; those of the columns in `left` begin at the left.

    All lines have the same number of cells. Nothing is cut off.
    """
    drawn = list(lines)
    widths = [max(map(len, column)) for column in zip(*drawn, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in drawn
    ]
