"""Tables of segments: plain columns for pipes, and coloured ones with bars for terminals."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvelastic.cli.rendering import fitting_table
from kvelastic.cli.rendering.columns import or_dash, shares, size_or_dash
from kvelastic.cli.rendering.fitting_table import Column, plain
from kvelastic.instance.row import Row, printable, shown_state
from kvelastic.units import whole_pages

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

NOTHING = "No active kvelastic segments found."

_BAR_CELLS = 24
_SIZE_CELLS = len("1023.99 MiB")
_TIERS_CELLS = len("host 1023.99 MiB, disk 1023.99 GiB")
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


def plain_table(rows: list[Row]) -> str:
    """Return plain columns: a heading and one line per segment, without colour or truncation."""
    return plain(_columns(rows)) if rows else NOTHING


def rich_table(rows: list[Row], width: int, *, ascii_only: bool = False) -> Table | Text:
    """Return a table for a terminal of `width` columns, with fewer columns if it is narrow."""
    from rich.text import Text

    if not rows:
        return Text(NOTHING)
    glyphs = _BAR_GLYPHS_ASCII if ascii_only else _BAR_GLYPHS
    title = f"{glyphs[0]} use {glyphs[1]} cached {glyphs[2]} parked"
    bar = Column(title, [_bar(row, glyphs) for row in rows], 5, True, _BAR_CELLS, is_fixed=True)
    *columns, tiers, model = (column for column in _columns(rows) if column.title != "Pid")
    with_tiers = [tiers] if any(row["tiers"] for row in rows) else []
    return fitting_table.rich_table([*columns, bar, *with_tiers, model], width)


def _columns(rows: list[Row]) -> list[Column]:
    """Return all columns but the bar. Only rows of a cluster have a node."""

    def column(
        title: str,
        cells: int,
        rank: int,
        text: Callable[[Row], str],
        *,
        is_left: bool = False,
        style: Callable[[Row], str] = lambda _: "",
    ) -> Column:
        styles = [style(row) for row in rows]
        return Column(title, list(map(text, rows)), rank, is_left, cells, True, styles)

    def size(title: str, rank: int) -> Column:
        key = f"{title.lower().replace(' ', '_')}_bytes"
        return column(title, _SIZE_CELLS, rank, lambda row: size_or_dash(_figure(row, key)))

    names = [printable(row["name"]) for row in rows]
    node = column("Node", len("255.255.255.255"), 0, _node, is_left=True)
    return [
        Column("Name", names, 0, is_left=True, most_cells=sys.maxsize, least_cells=8),
        *([node] if any("node" in row for row in rows) else []),
        column("State", len("unreadable"), 2, shown_state, is_left=True, style=_state_style),
        column("Limit", _SIZE_CELLS, 0, _limit_text),
        size("Mapped", 1),
        column("Of limit", len("Of limit"), 3, _percent_text, style=_percent_style),
        size("In use", 4),
        size("Cached", 7),
        size("Parked", 7),
        size("Min", 8),
        column("Prio", len("-1000"), 8, lambda row: or_dash(row["priority"])),
        column("Pid", _SIZE_CELLS, 1, lambda row: or_dash(row["pid"])),
        column("Tiers", _TIERS_CELLS, 6, _tiers_text, is_left=True, style=_tiers_style),
        column("Model", 24, 9, lambda row: printable(row["model"] or "-"), is_left=True),
    ]


def _figure(row: Row, key: str) -> int | None:
    value: int | None = dict(row)[key]  # type: ignore[assignment]
    return value


def _node(row: Row) -> str:
    return printable(str(dict(row).get("node", "-")))


def _state_style(row: Row) -> str:
    return _STATE_STYLES.get(shown_state(row), "")


def bar_cells(row: Row, cells: int = _BAR_CELLS) -> list[int]:
    """Return the cells of a bar that are in use, cached, parked and free within the limit.

    If more than the limit is mapped, the bar shows all mapped memory.
    """
    kinds = [row["in_use_bytes"] or 0, row["cached_bytes"] or 0, row["parked_bytes"] or 0]
    counts = shares(kinds, _allowed_bytes(row), cells)
    return [*counts, cells - sum(counts)]


def _bar(row: Row, glyphs: str) -> Text:
    from rich.text import Text

    bar = Text()
    for count, glyph, style in zip(bar_cells(row), glyphs, _BAR_STYLES, strict=True):
        bar.append(glyph * count, style=style)
    return bar


def _tiers_text(row: Row) -> str:
    """Return the contents of each tier as text, nearest first, with the tiers that are stalled."""
    shown = [
        f"{tier['tier']} {size_or_dash(tier['used_bytes'])}"
        + ("" if tier["state"] == "ok" else f" {tier['state']}")
        for tier in row["tiers"] or []
    ]
    return ", ".join(shown) or "-"


def _tiers_style(row: Row) -> str:
    return "" if all(tier["state"] == "ok" for tier in row["tiers"] or []) else "red"


def _limit_text(row: Row) -> str:
    return "none" if row["is_limited"] is False else size_or_dash(row["limit_bytes"])


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
