"""Columns of plain text, as wide as their contents; their cells; and parts of a bar."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise

from kvelastic.units import format_size


def aligned(lines: Iterable[Sequence[str]], left: Collection[int]) -> list[str]:
    """Return each line with its cells aligned: left in the columns in `left`, else right.

    All lines have the same number of cells. No cell is truncated.
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


def or_dash(value: object) -> str:
    """Return a value as text; an unknown one (None) is a dash."""
    return "-" if value is None else str(value)


def size_or_dash(size_bytes: int | None) -> str:
    """Return a size as text; an unknown one is a dash."""
    return "-" if size_bytes is None else format_size(size_bytes)


def shares(amounts: Sequence[int], whole: int, width: int) -> list[int]:
    """Return the cells of each amount in a bar of `width` cells.

    The bar stands for `whole`, or for the sum of the amounts if that is larger.

    The ends of the parts are rounded, so that the parts add up. Every amount above 0 gets a cell if
    one is left.
    """
    whole = max(whole, sum(amounts))
    ends, total = [0], 0
    for amount in amounts:
        total += amount
        end = round(width * total / whole) if whole else 0
        ends.append(min(width, max(end, ends[-1] + (1 if amount else 0))))
    return [after - before for before, after in pairwise(ends)]
