"""Styled text in terminal cells: what the view is made of. Nothing here knows a terminal.

    line = [Span("host ", "strong"), Span("###", "in_use")]
    line_cells(line) == 8; cut(line, 4) == [Span("host", "strong")]

A cell is one column. Some characters take two, some none; `cells` counts as the C library does,
one character at a time, because that is what curses places them by.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

from rich.cells import get_character_cell_size

Style = Literal[
    "plain", "strong", "dim", "title", "heading", "good", "warn", "bad",
    "in_use", "cached", "parked", "slack", "others", "free", "trend",
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
    others: str
    free: str
    levels: str
    """Of a sparkline, the lowest first."""
    mark: str
    """Where text was cut off."""
    up: str
    down: str


UNICODE: Final = Glyphs("█", "▓", "▒", "░", "╳", "·", "▁▂▃▄▅▆▇█", "…", "▲", "▼")
ASCII: Final = Glyphs("#", "=", "-", "~", "x", ".", "_.:-=+*#", "~", "^", "v")


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
