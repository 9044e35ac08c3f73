"""Tables with all columns in a pipe, and on a terminal as many columns as fit.

columns = [Column("Name", ["a", "b"], 0, is_left=True), Column("Held", ["1", "2"], 1)]
show(lambda: plain(columns), lambda width: rich_table(columns, width))
"""

from __future__ import annotations

import io
import sys
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from kvelastic.cli.rendering.columns import aligned
from kvelastic.cli.rendering.printing import print_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

_SIZE_CELLS = len("1023.99 MiB")
_EDGE_CELLS, _GAP_CELLS = 2, 3


class Column(NamedTuple):
    """One column, for both kinds of table."""

    title: str
    cells: Sequence[str | Text]
    rank: int
    """Priority on a narrow terminal, lowest first; 0 is always shown. Columns of one rank are shown
    or hidden together."""
    is_left: bool = False
    most_cells: int = _SIZE_CELLS
    """Maximum width on a terminal; longer text is folded."""
    is_fixed: bool = False
    """Always of that width, so that a watched table does not jump; longer text is truncated."""
    styles: Sequence[str] = ()
    """Style of each cell on a terminal; empty: bold in the first column, else plain."""
    least_cells: int = 0
    """Minimum width on a terminal."""


def show(text: Callable[[], str], drawn: Callable[[int], RenderableType]) -> None:
    """Print the result of `drawn` for a terminal's width, or the lines of `text` in a pipe."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A name may have characters outside the terminal's encoding; print question marks.
        sys.stdout.reconfigure(errors="replace")
    if not sys.stdout.isatty():
        print_lines(*text().split("\n"))
        return
    from rich.console import Console

    console = Console(highlight=False)
    console.print(drawn(console.width))


def plain(columns: Sequence[Column]) -> str:
    """Return columns of text under one-word headings; empty without lines."""
    if not columns[0].cells:
        return ""
    cells = (
        [column.title.upper().replace(" ", "_"), *map(str, column.cells)] for column in columns
    )
    left = {index for index, column in enumerate(columns) if column.is_left}
    return "\n".join(aligned(zip(*cells, strict=True), left))


def rich_table(columns: Sequence[Column], width: int) -> Table:
    """Return a table for a terminal of `width` columns, with fewer columns if it is narrow."""
    from rich import box
    from rich.table import Table

    # rich selects another box if the terminal cannot show this one.
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown = _that_fit(columns, width)
    for column in shown:
        table.add_column(
            column.title,
            justify="left" if column.is_left else "right",
            overflow="ellipsis" if column.is_fixed else "fold",
            no_wrap=column.is_fixed,
            width=column.most_cells if column.is_fixed else None,
            min_width=column.least_cells,
            max_width=column.most_cells,
        )
    for at in range(len(shown[0].cells)):
        table.add_row(*(_cell(column, at, is_first=column is shown[0]) for column in shown))
    return table


def _cell(column: Column, at: int, *, is_first: bool) -> Text:
    from rich.text import Text

    cell = column.cells[at]
    if isinstance(cell, Text):
        return cell
    # Text, not markup: a name may contain brackets.
    return Text(cell, style=column.styles[at] if column.styles else "bold" if is_first else "")


def _that_fit(columns: Sequence[Column], width: int) -> list[Column]:
    """Return the columns that fit, chosen by rank, in the order in which they are drawn."""
    left = width - _EDGE_CELLS + _GAP_CELLS
    chosen: list[Column] = []
    for _, of_rank in groupby(sorted(columns, key=lambda each: each.rank), lambda each: each.rank):
        more = list(of_rank)
        left -= sum(_cells_of(column) + _GAP_CELLS for column in more)
        if left < 0 and len(chosen) > 1:  # always show two, folded if needed
            break
        chosen += more
    return [column for column in columns if column in chosen]


def _cells_of(column: Column) -> int:
    from rich.cells import cell_len

    widest = max(map(cell_len, (column.title, *map(str, column.cells))))
    return column.most_cells if column.is_fixed else min(widest, column.most_cells)
