"""Styled text and short numbers in terminal cells: what the view is made of. No terminal is known.

    line = [Span("host ", "strong"), Span("###", "in_use")]
    line_cells(line) == 8; cut(line, 4) == [Span("host", "strong")]
    short_size(96 << 20) == "96.0M"; short_rate(1234.0) == "1.2k"

A cell is one column. Some characters take two, some none; `cells` counts as the C library does,
one character at a time, because that is what curses places them by.
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
    """Of a sparkline, the lowest first."""
    mark: str
    """Where text was cut off."""
    up: str
    down: str


UNICODE: Final = Glyphs("█", "▓", "▒", "░", "▞", "╳", "·", "▁▂▃▄▅▆▇█", "…", "▲", "▼")
ASCII: Final = Glyphs("#", "=", "-", "~", "%", "x", ".", "_.:-=+*#", "~", "^", "v")


def has_blocks(encoding: str) -> bool:
    """Whether an encoding has the glyphs of the bars."""
    try:
        "".join(UNICODE).encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def cells(text: str) -> int:
    """How many cells `text` takes."""
    return len(text) if text.isascii() else sum(map(get_character_cell_size, text))


def line_cells(line: Iterable[Span]) -> int:
    """How many cells a line takes."""
    return sum(cells(span.text) for span in line)


def fit(text: str, width: int, mark: str = "") -> str:
    """`text` in exactly `width` cells: spaces behind it, or cut off with `mark` at the end."""
    missing = width - cells(text)
    if missing >= 0:
        return text + " " * missing
    room = width - cells(mark)
    if room < 0:
        return fit("", width)
    kept = _start(text, room)
    return kept + mark + " " * (room - cells(kept))


def cut(line: Iterable[Span], width: int) -> Line:
    """The first `width` cells of a line; a wide character that lies across the end is left out."""
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
    """Both ends of a line; the right one only where there is room for all of it."""
    gap = width - line_cells(left) - line_cells(right)
    return [*left, Span(" " * gap), *right] if gap >= 1 else cut(left, width)


def to_ascii(line: Line) -> Line:
    """The same line for a terminal that knows ASCII only."""
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
    """`text` on lines of at most `width` cells, broken between words where that is possible.

    What does not fit on `most_lines` is cut off with `mark`.
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
"""A short number has at most so many, so that columns stay in place while values change."""
UNKNOWN: Final = "-"


def short_size(size_bytes: int | None) -> str:
    """Bytes with three digits or so: `0`, `512B`, `4.00G`, `1023M`; powers of 1024."""
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
    """Times a second: `0`, `0.3`, `12`, `1.2k`; powers of 1000."""
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
    """How often something has happened: itself, from 10,000 on `12k`; powers of 1000."""
    return str(total) if total < 10_000 else short_rate(float(total))


def short_count(count: int | None) -> str:
    """A whole number, as a priority: itself where it fits, else its sign and size."""
    if count is None:
        return UNKNOWN
    text = str(count)
    if len(text) <= CELLS:
        return text
    return "-big" if count < 0 else "big"
