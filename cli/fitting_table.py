"""Tables that fit: every column in a pipe, and on a terminal those for which there is room.

columns = [Column("Name", ["a", "b"], 0, is_left=True), Column("Held", ["1", "2"], 1)]
show(lambda: plain(columns), lambda width: rich_table(columns, width))
"""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, NamedTuple

from kvelastic.cli.columns import aligned
from kvelastic.cli.saying import say

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import RenderableType
    from rich.table import Table

_SIZE_CELLS = len("1023.99 MiB")
_EDGE_CELLS, _GAP_CELLS = 2, 3


class Column(NamedTuple):
    """One column, for both kinds of table."""

    title: str
    cells: Sequence[str]
    rank: int
    """What a terminal too narrow for all shows first; 0 always. No two columns have the same."""
    is_left: bool = False
    most_cells: int = _SIZE_CELLS
    """The width on a terminal beyond which a text is folded."""


def show(text: Callable[[], str], drawn: Callable[[int], RenderableType]) -> None:
    """Print what `drawn` makes for the width of a terminal; in a pipe the lines of `text`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A name may hold what the terminal's encoding lacks: a question mark, and not the end.
        sys.stdout.reconfigure(errors="replace")
    if not sys.stdout.isatty():
        say(*text().split("\n"))
        return
    from rich.console import Console

    console = Console(highlight=False)
    console.print(drawn(console.width))


def plain(columns: Sequence[Column]) -> str:
    """Columns of text under headings that are one word each; empty where there is no line."""
    if not columns[0].cells:
        return ""
    cells = ([column.title.upper().replace(" ", "_"), *column.cells] for column in columns)
    left = {index for index, column in enumerate(columns) if column.is_left}
    return "\n".join(aligned(zip(*cells, strict=True), left))


def rich_table(columns: Sequence[Column], width: int) -> Table:
    """The same for a terminal of `width` columns: the narrower it is, the fewer are shown."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    # Where the terminal cannot show its line, rich itself takes another box.
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown = _that_fit(columns, width)
    for column in shown:
        table.add_column(
            column.title,
            justify="left" if column.is_left else "right",
            overflow="fold",
            max_width=column.most_cells,
        )
    for line in zip(*(column.cells for column in shown), strict=True):
        # Text, not markup: a name may hold brackets.
        table.add_row(*(Text(cell, style="" if at else "bold") for at, cell in enumerate(line)))
    return table


def _that_fit(columns: Sequence[Column], width: int) -> list[Column]:
    """Those for which there is room, by rank, in the order in which they are drawn."""
    left = width - _EDGE_CELLS
    chosen: set[int] = set()
    for column in sorted(columns, key=lambda each: each.rank):
        widest = max(map(len, (column.title, *column.cells)))
        left -= min(widest, column.most_cells) + _GAP_CELLS
        if left < 0 and len(chosen) > 1:  # two are shown in any case, folded
            break
        chosen.add(column.rank)
    return [column for column in columns if column.rank in chosen]
