"""Tables of segments: plain columns for pipes, and coloured ones with bars for terminals."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from kvelastic.cli.rendering.columns import aligned, shares
from kvelastic.instance.row import Row, TierRow, printable, shown_state
from kvelastic.units import format_size, whole_pages

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

NOTHING = "No active kvelastic segments found."

_BAR_CELLS = 24
_SIZE_CELLS = len("1023.99 MiB")
_EDGE_CELLS, _GAP_CELLS = 2, 3
_STATE_STYLES = {
    "applied": "green",
    "shrinking": "yellow",
    "pending": "yellow",
    "asleep": "blue",
    "stuck": "red",
    "refused": "red",
    "failed": "red",
    "unreadable": "red",
    "dead": "red",
}
_BAR_STYLES = ("green", "cyan", "blue", "dim")
_BAR_GLYPHS = "█▓▒·"
_BAR_GLYPHS_ASCII = "#=-."


class _Column(NamedTuple):
    title: str
    width: int
    """Width on a terminal. It is fixed, so that a watched table does not jump. 0: only in pipes."""
    rank: int
    """Priority on a narrow terminal, lowest first. Equal ranks are shown or hidden together."""
    text: Callable[[Row], str]
    is_left: bool = False
    style: Callable[[Row], str] = lambda _: ""


def _bytes(title: str, rank: int) -> _Column:
    key = f"{title.lower().replace(' ', '_')}_bytes"
    return _Column(title, _SIZE_CELLS, rank, lambda row: _size(_figure(row, key)))


def _figure(row: Row, key: str) -> int | None:
    value: int | None = dict(row)[key]  # type: ignore[assignment]
    return value


def plain_table(rows: list[Row]) -> str:
    """Return plain columns: a heading and one line per segment, without colour or truncation."""
    if not rows:
        return NOTHING
    columns = [column for column in _columns_of(rows) if column.title != "Bar"]
    lines = [("NAME", *(column.title.upper().replace(" ", "_") for column in columns))]
    lines += [(printable(row["name"]), *(column.text(row) for column in columns)) for row in rows]
    left = {0, *(at for at, column in enumerate(columns, 1) if column.is_left)}
    return "\n".join(aligned(lines, left))


def rich_table(rows: list[Row], width: int, *, ascii_only: bool = False) -> Table | Text:
    """Return a table for a terminal of `width` columns, with fewer columns if it is narrow."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return Text(NOTHING)
    table = Table(box=box.ASCII if ascii_only else box.SIMPLE_HEAD, pad_edge=False)
    shown = _that_fit(rows, width)
    table.add_column("Name", overflow="fold", min_width=8)
    for column in shown:
        table.add_column(
            _heading(ascii_only) if column.title == "Bar" else column.title,
            justify="left" if column.is_left else "right",
            no_wrap=True,
            overflow="ellipsis",
            width=column.width,
        )
    for row in rows:
        # Text, not markup: a name may contain brackets.
        cells = [
            _bar(row, ascii_only)
            if column.title == "Bar"
            else Text(column.text(row), style=column.style(row))
            for column in shown
        ]
        table.add_row(Text(printable(row["name"]), style="bold"), *cells)
    return table


def _that_fit(rows: list[Row], width: int) -> list[_Column]:
    """Return the columns beside Name that fit, in the order in which they are drawn."""
    left = width - _EDGE_CELLS - max(len("Name"), *(len(row["name"]) for row in rows))
    has_tiers = any(row["tiers"] for row in rows)
    columns = [
        one for one in _columns_of(rows) if one.width and (has_tiers or one.title != "Tiers")
    ]
    chosen: set[int] = set()
    for rank in sorted({column.rank for column in columns}):
        left -= sum(one.width + _GAP_CELLS for one in columns if one.rank == rank)
        if left < 0 and chosen:  # always show one; the name is folded then
            break
        chosen.add(rank)
    return [column for column in columns if column.rank in chosen]


def _columns_of(rows: list[Row]) -> tuple[_Column, ...]:
    """Return the columns beside Name. Only rows of a cluster have a node."""
    return (_NODE, *_COLUMNS) if any("node" in row for row in rows) else _COLUMNS


def _heading(ascii_only: bool) -> str:
    glyphs = _BAR_GLYPHS_ASCII if ascii_only else _BAR_GLYPHS
    return f"{glyphs[0]} use {glyphs[1]} cached {glyphs[2]} parked"


def bar_cells(row: Row, cells: int = _BAR_CELLS) -> list[int]:
    """Return the cells of a bar that are in use, cached, parked and free within the limit.

    If more than the limit is mapped, the bar shows all mapped memory.
    """
    kinds = [row["in_use_bytes"] or 0, row["cached_bytes"] or 0, row["parked_bytes"] or 0]
    counts = shares(kinds, _allowed_bytes(row), cells)
    return [*counts, cells - sum(counts)]


def _bar(row: Row, ascii_only: bool) -> Text:
    from rich.text import Text

    glyphs = _BAR_GLYPHS_ASCII if ascii_only else _BAR_GLYPHS
    bar = Text()
    for count, glyph, style in zip(bar_cells(row), glyphs, _BAR_STYLES, strict=True):
        bar.append(glyph * count, style=style)
    return bar


def tiers_text(tiers: list[TierRow]) -> str:
    """Return the contents of each tier as text, nearest first, with the tiers that are stalled."""
    return (
        ", ".join(
            f"{tier['tier']} {_size(tier['used_bytes'])}"
            + ("" if tier["state"] == "ok" else f" {tier['state']}")
            for tier in tiers
        )
        or "-"
    )


def _tiers_style(row: Row) -> str:
    return "" if all(tier["state"] == "ok" for tier in row["tiers"] or []) else "red"


def _limit_text(row: Row) -> str:
    return "none" if row["is_limited"] is False else _size(row["limit_bytes"])


def _percent(row: Row) -> float | None:
    mapped_bytes, allowed_bytes = row["mapped_bytes"], _allowed_bytes(row)
    if mapped_bytes is None or not allowed_bytes or row["is_limited"] is False:
        return None
    return 100 * mapped_bytes / allowed_bytes


def _allowed_bytes(row: Row) -> int:
    """Return the full length of a bar: the limit in whole pages, or the device without a limit."""
    limit_bytes = row["limit_bytes"]
    return 0 if limit_bytes is None else whole_pages(limit_bytes, row["page_bytes"] or 0)


def _percent_text(row: Row) -> str:
    percent = _percent(row)
    return "-" if percent is None else f"{percent:.0f}%"


def _percent_style(row: Row) -> str:
    percent = _percent(row)
    if percent is None:
        return ""
    return "green" if percent < 50 else "yellow" if percent < 80 else "red"


def _size(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else format_size(size_bytes)


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


_NODE: Final = _Column(
    "Node", len("255.255.255.255"), 0, lambda row: printable(str(dict(row).get("node", "-"))), True
)
# In display order, after the name.
_COLUMNS: Final = (
    _Column(
        "State", len("unreadable"), 2, shown_state, True,
        lambda row: _STATE_STYLES.get(shown_state(row), ""),
    ),
    _Column("Limit", _SIZE_CELLS, 0, _limit_text),
    _bytes("Mapped", 1),
    _Column("Of limit", len("Of limit"), 3, _percent_text, False, _percent_style),
    _bytes("In use", 4),
    _bytes("Cached", 7),
    _bytes("Parked", 7),
    _bytes("Min", 8),
    _Column("Prio", len("-1000"), 8, lambda row: _or_dash(row["priority"])),
    _Column("Pid", 0, 0, lambda row: _or_dash(row["pid"])),
    _Column("Bar", _BAR_CELLS, 5, lambda _: "", True),
    _Column("Tiers", len("host 1023.99 MiB, disk 1023.99 GiB"), 6,
            lambda row: tiers_text(row["tiers"] or []), True, _tiers_style),
    _Column("Model", 24, 9, lambda row: printable(row["model"] or "-"), True),
)  # fmt: skip
