"""Styled text and short numbers in terminal cells, the parts of the view. Needs no terminal.

    line = [Span("host ", "strong"), Span("###", "in_use")]
    line_cells(line) == 8; cut(line, 4) == [Span("host", "strong")]
    short_size(96 << 20) == "96.0M"; short_rate(1234.0) == "1.2k"

A cell is one column. Some characters take two cells, some none. `cells` counts each character like
the C library, because curses positions text by these counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

from rich.cells import get_character_cell_size

Style = Literal[
    "plain", "strong", "dim", "title", "heading", "good", "warn", "bad",
    "in_use", "cached", "parked", "slack", "reserved", "others", "free", "trend",
]  # fmt: skip


class Span(NamedTuple):
    """A piece of text in one style."""

    text: str
    style: Style = "plain"
    is_selected: bool = False


Line = list[Span]


class Glyphs(NamedTuple):
    """The characters of bars and sparklines."""

    in_use: str
    cached: str
    parked: str
    slack: str
    reserved: str
    others: str
    free: str
    levels: str
    """The levels of a sparkline, the lowest first."""
    mark: str
    """Marks truncated text."""
    up: str
    down: str


UNICODE: Final = Glyphs("█", "▓", "▒", "░", "▞", "╳", "·", "▁▂▃▄▅▆▇█", "…", "▲", "▼")
ASCII: Final = Glyphs("#", "=", "-", "~", "%", "x", ".", "_.:-=+*#", "~", "^", "v")


def has_blocks(encoding: str) -> bool:
    """Return True if an encoding has the glyphs of the bars."""
    try:
        "".join(UNICODE).encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def cells(text: str) -> int:
    """Return the number of cells of `text`."""
    return len(text) if text.isascii() else sum(map(get_character_cell_size, text))


def line_cells(line: Iterable[Span]) -> int:
    """Return the number of cells of a line."""
    return sum(cells(span.text) for span in line)


def fit(text: str, width: int, mark: str = "") -> str:
    """Return `text` in exactly `width` cells: padded with spaces, or truncated with `mark`."""
    missing = width - cells(text)
    if missing >= 0:
        return text + " " * missing
    room = width - cells(mark)
    if room < 0:
        return fit("", width)
    kept = _start(text, room)
    return kept + mark + " " * (room - cells(kept))


def cut(line: Iterable[Span], width: int) -> Line:
    """Return the first `width` cells of a line, without a wide character that crosses the end."""
    kept: Line = []
    left = width
    for span in line:
        text = span.text if cells(span.text) <= left else _start(span.text, left)
        if text:
            kept.append(span._replace(text=text))
        left -= cells(text)
        if text != span.text:
            break
    return kept


def spread(left: Line, right: Line, width: int) -> Line:
    """Return a line with `left` and `right` at its ends; `right` only if it fits completely."""
    gap = width - line_cells(left) - line_cells(right)
    return [*left, Span(" " * gap), *right] if gap >= 1 else cut(left, width)


def to_ascii(line: Line) -> Line:
    """Return the line in ASCII."""
    return [span._replace(text=_ascii(span.text)) for span in line]


def _ascii(text: str) -> str:
    if text.isascii():
        return text
    return "".join(c if c.isascii() else "?" * get_character_cell_size(c) for c in text)


def _start(text: str, room: int) -> str:
    taken = 0
    for at, character in enumerate(text):
        taken += get_character_cell_size(character)
        if taken > room:
            return text[:at]
    return text


def wrap(text: str, width: int, most_lines: int, mark: str = "") -> list[str]:
    """Return `text` in lines of at most `width` cells, broken between words if possible.

    Text beyond `most_lines` is truncated with `mark`.
    """
    if width <= 0 or most_lines <= 0:
        return []
    lines = [""]
    for word in text.split():
        rest = word
        if lines[-1]:
            if cells(lines[-1]) + 1 + cells(word) <= width:
                lines[-1] += " " + word
                continue
            lines.append("")
        while cells(rest) > width:
            head = _start(rest, width) or "?"  # a wide character on one column
            lines[-1] = head if cells(head) <= width else ""
            rest = rest[len(head) :]
            lines.append("")
        lines[-1] = rest
    lines = lines if lines[-1] or len(lines) == 1 else lines[:-1]
    if len(lines) > most_lines:
        last = f"{lines[most_lines - 1]} {lines[most_lines]}"
        lines = [*lines[: most_lines - 1], fit(last, width, mark).rstrip()]
    return lines


CELLS: Final = 5
"""Maximum length of a short number, so that columns do not move when values change."""
UNKNOWN: Final = "-"


def short_size(size_bytes: int | None) -> str:
    """Return a size with about three digits: `0`, `512B`, `4.00G`, `1023M`; powers of 1024."""
    if size_bytes is None:
        return UNKNOWN
    if size_bytes < 1000:
        return f"{size_bytes}B" if size_bytes else "0"
    value = float(size_bytes)
    for unit in "KMGTPE":
        value /= 1024
        if value < 9.995:
            return f"{value:.2f}{unit}"
        if value < 99.95:
            return f"{value:.1f}{unit}"
        if value < 1023.5:
            return f"{value:.0f}{unit}"
    return "huge"


def short_rate(per_s: float | None) -> str:
    """Return a rate per second: `0`, `0.3`, `12`, `1.2k`; powers of 1000."""
    if per_s is None:
        return UNKNOWN
    if per_s < 0.05:
        return "0"
    if per_s < 9.95:
        return f"{per_s:.1f}"
    if per_s < 9999.5:
        return f"{per_s:.0f}"
    for unit in "kMGT":
        per_s /= 1000
        if per_s < 999.5:
            return f"{per_s:.0f}{unit}" if per_s >= 9.95 else f"{per_s:.1f}{unit}"
    return "huge"


def short_total(total: int) -> str:
    """Return a total: the number itself, from 10,000 on `12k`; powers of 1000."""
    return str(total) if total < 10_000 else short_rate(float(total))


def short_count(count: int | None) -> str:
    """Return a whole number such as a priority: itself if it fits, else its sign and magnitude."""
    if count is None:
        return UNKNOWN
    text = str(count)
    if len(text) <= CELLS:
        return text
    return "-big" if count < 0 else "big"
