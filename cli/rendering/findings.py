"""How findings (`kvelastic.doctor`) are printed: wrapped lines, colours, JSON."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, Any, Final

from kvelastic.instance.row import printable

if TYPE_CHECKING:
    from kvelastic.doctor.finding import Finding

_LEAST_COLUMNS: Final = 12
"""Minimum width of an explanation's sentence, on any terminal."""


def json_of(finding: Finding, *keys: str) -> dict[str, Any]:
    """Return the named attributes of a finding."""
    return {key: getattr(finding, key) for key in keys}


def wrap(
    text: str, first: str, columns: int | None, *, more: str | None = None, fewest: int = 0
) -> list[str]:
    """Return the lines of a text: the first begins with `first`, the others with an equal indent.

    Returns one line without `columns`, or if fewer than `fewest` columns are left for the text.
    """
    # Text of other users (a segment's name) must not control the terminal.
    text, more = printable(text), " " * len(first) if more is None else more
    if columns is None or columns - len(more) < fewest:
        return [first + text]
    # Do not break long names or commands: users may copy them.
    return textwrap.wrap(
        text,
        max(columns, len(more) + _LEAST_COLUMNS),
        initial_indent=first,
        subsequent_indent=more,
        break_long_words=False,
        break_on_hyphens=False,
    )


def columns_of_terminal() -> int | None:
    """Return the terminal's width; None in a pipe, where lines are not wrapped."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def is_in_colour() -> bool:
    """Return whether stdout is a terminal whose user wants colours."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
