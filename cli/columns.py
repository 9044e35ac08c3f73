"""Columns of plain text, as wide as what stands in them; and parts of a bar, in whole cells."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise


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


def shares(amounts: Sequence[int], whole: int, width: int) -> list[int]:
    """How many of `width` cells each amount gets of `whole`, which is at least their sum.

    Rounded at each end, so that the parts add up; the least bit of something gets a cell while
    there is one.
    """
    whole = max(whole, sum(amounts))
    ends, total = [0], 0
    for amount in amounts:
        total += amount
        end = round(width * total / whole) if whole else 0
        ends.append(min(width, max(end, ends[-1] + (1 if amount else 0))))
    return [after - before for before, after in pairwise(ends)]
