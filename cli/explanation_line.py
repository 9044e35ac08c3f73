"""One thing that an explanation says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """What is so, and what to do about it."""

    about: str
    """What it is about, in a word or two: holds, limit, asked, ..."""
    what: str
    """A sentence."""
    do: str = ""
    """What to do about it; empty where nothing has to be done."""
    is_blocked: bool = False
    """Whether it says what something waits for."""
