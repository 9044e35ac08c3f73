"""Tables of segments: plain columns for pipes, a coloured one with bars for terminals."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from kvelastic.cli.columns import aligned
from kvelastic.instance.row import Row, TierRow, printable, shown_state
from kvelastic.sizes import format_size, whole_pages

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

NOTHING = "No active kvelastic segments found."

_BAR_CELLS = 24
_SIZE_CELLS = len("1023.99 MiB")
# Every column but Name has a fixed width, so that a watched table does not jump.
_WIDTHS = {
    "State": len("unreadable"),
    "Limit": _SIZE_CELLS,
    "Mapped": _SIZE_CELLS,
    "Of limit": len("Of limit"),
    "In use": _SIZE_CELLS,
    "Cached": _SIZE_CELLS,
    "Parked": _SIZE_CELLS,
    "Min": _SIZE_CELLS,
    "Prio": len("-1000"),
    "Bar": _BAR_CELLS,
    "Tiers": len("host 1023.99 MiB, disk 1023.99 GiB"),
    "Model": 24,
}
# What a terminal too narrow for all shows first; what is in one row here comes and goes together.
_BY_IMPORTANCE = (
    ("Limit",),
    ("Mapped",),
    ("State",),
    ("Of limit",),
    ("In use",),
    ("Bar",),
    ("Tiers",),
    ("Cached", "Parked"),
    ("Min", "Prio"),
    ("Model",),
)
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


def plain_table(rows: list[Row]) -> str:
    """Columns of text: no colour, nothing cut off, one line a segment under one of headings."""
    if not rows:
        return NOTHING
    lines = [
        (
            "NAME",
            "STATE",
            "LIMIT",
            "MAPPED",
            "OF_LIMIT",
            "IN_USE",
            "CACHED",
            "PARKED",
            "MIN",
            "PRIO",
            "PID",
            "TIERS",
            "MODEL",
        )
    ]
    lines += [
        (
            printable(row["name"]),
            shown_state(row),
            _size(row["limit_bytes"]),
            _size(row["mapped_bytes"]),
            _percent_text(row),
            _size(row["in_use_bytes"]),
            _size(row["cached_bytes"]),
            _size(row["parked_bytes"]),
            _size(row["min_bytes"]),
            _or_dash(row["priority"]),
            _or_dash(row["pid"]),
            tiers_text(row["tiers"] or []),
            printable(row["model"] or "-"),
        )
        for row in rows
    ]
    last = len(lines[0]) - 1
    return "\n".join(aligned(lines, left={0, 1, last - 1, last}))


def rich_table(rows: list[Row], width: int, *, ascii_only: bool = False) -> Table | Text:
    """The same for a terminal of `width` columns: the narrower it is, the fewer are shown."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return Text(NOTHING)
    table = Table(box=box.ASCII if ascii_only else box.SIMPLE_HEAD, pad_edge=False)
    shown = _columns(rows, width)
    table.add_column("Name", overflow="fold", min_width=8)
    for name in shown:
        table.add_column(
            _heading(ascii_only) if name == "Bar" else name,
            justify="left" if name in {"State", "Bar", "Tiers", "Model"} else "right",
            no_wrap=True,
            overflow="ellipsis",
            width=_WIDTHS[name],
        )
    for row in rows:
        cells = {
            # Text, not markup: a name may hold brackets.
            "Name": Text(printable(row["name"]), style="bold"),
            "State": Text(shown_state(row), style=_STATE_STYLES.get(shown_state(row), "")),
            "Limit": Text(_size(row["limit_bytes"])),
            "Mapped": Text(_size(row["mapped_bytes"])),
            "Of limit": Text(_percent_text(row), style=_percent_style(row)),
            "In use": Text(_size(row["in_use_bytes"])),
            "Cached": Text(_size(row["cached_bytes"])),
            "Parked": Text(_size(row["parked_bytes"])),
            "Min": Text(_size(row["min_bytes"])),
            "Prio": Text(_or_dash(row["priority"])),
            "Bar": _bar(row, ascii_only),
            "Tiers": _tiers(row),
            "Model": Text(printable(row["model"] or "-")),
        }
        table.add_row(*(cells[name] for name in ("Name", *shown)))
    return table


def _columns(rows: list[Row], width: int) -> list[str]:
    """The columns beside Name that fit, in the order in which they are drawn."""
    left = width - _EDGE_CELLS - max(len("Name"), *(len(row["name"]) for row in rows))
    chosen: set[str] = set()
    for group in _BY_IMPORTANCE:
        if group == ("Tiers",) and not any(row["tiers"] for row in rows):
            continue
        left -= sum(_WIDTHS[name] + _GAP_CELLS for name in group)
        if left < 0 and chosen:  # one is shown in any case; the name is folded then
            break
        chosen.update(group)
    return [name for name in _WIDTHS if name in chosen]


def _heading(ascii_only: bool) -> str:
    glyphs = _BAR_GLYPHS_ASCII if ascii_only else _BAR_GLYPHS
    return f"{glyphs[0]} use {glyphs[1]} cached {glyphs[2]} parked"


def bar_cells(row: Row, cells: int = _BAR_CELLS) -> list[int]:
    """How many cells of the bar are in use, cached, parked and free, of the limit or more."""
    kinds = [row["in_use_bytes"] or 0, row["cached_bytes"] or 0, row["parked_bytes"] or 0]
    whole = max(_allowed_bytes(row), sum(kinds))
    ends, total = [0], 0
    for part in kinds:
        total += part
        # Rounded at each end, so that the parts add up; the least bit of use shows.
        end = round(cells * total / whole) if whole else 0
        ends.append(min(cells, max(end, ends[-1] + (1 if part else 0))))
    counts = [after - before for before, after in pairwise(ends)]
    return [*counts, cells - ends[-1]]


def _bar(row: Row, ascii_only: bool) -> Text:
    from rich.text import Text

    glyphs = _BAR_GLYPHS_ASCII if ascii_only else _BAR_GLYPHS
    bar = Text()
    for count, glyph, style in zip(bar_cells(row), glyphs, _BAR_STYLES, strict=True):
        bar.append(glyph * count, style=style)
    return bar


def tiers_text(tiers: list[TierRow]) -> str:
    """What each tier holds, nearest first, and which of them does not answer."""
    return (
        ", ".join(
            f"{tier['tier']} {_size(tier['used_bytes'])}"
            + ("" if tier["state"] == "ok" else f" {tier['state']}")
            for tier in tiers
        )
        or "-"
    )


def _tiers(row: Row) -> Text:
    from rich.text import Text

    tiers = row["tiers"] or []
    is_well = all(tier["state"] == "ok" for tier in tiers)
    return Text(tiers_text(tiers), style="" if is_well else "red")


def _percent(row: Row) -> float | None:
    mapped_bytes, allowed_bytes = row["mapped_bytes"], _allowed_bytes(row)
    if mapped_bytes is None or not allowed_bytes:
        return None
    return 100 * mapped_bytes / allowed_bytes


def _allowed_bytes(row: Row) -> int:
    """What its limit allows, in whole pages: so much is the whole of a bar."""
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
