"""Draws kvtop on a terminal of 110 columns as SVG."""

from __future__ import annotations

import io
import time
from pathlib import Path

from on_terminal import OnTerminal
from pyte.screens import Char
from rich.console import Console
from rich.style import Style
from rich.text import Text

COLUMNS, LINES = 110, 16
_COLOURS = {"brown": "yellow", "default": None}
"""pyte's colour names, with rich's names for them."""


def style_of(cell: Char) -> Style:
    """Return a terminal cell's style for rich."""
    foreground, background = (_COLOURS.get(name, name) for name in (cell.fg, cell.bg))
    return Style(color=foreground, bgcolor=background, bold=cell.bold, reverse=cell.reverse)


def draw(path: Path, seconds: float) -> None:
    """Run kvtop for `seconds`, then write a picture of its screen to `path`."""
    end = time.monotonic() + seconds
    with OnTerminal("-n", "0.5", columns=COLUMNS, lines=LINES) as top:
        top.wait_for("code")
        top.wait_for(lambda: time.monotonic() > end)
        console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
        for row in (top.screen.buffer[line] for line in range(LINES)):
            line = Text(no_wrap=True)
            for column in range(COLUMNS):
                line.append(row[column].data, style_of(row[column]))
            console.print(line, highlight=False)
        console.save_svg(str(path), title="kvtop")
