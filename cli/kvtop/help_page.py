"""The help page: the keys, and the meaning of bars and columns."""

from __future__ import annotations

from typing import Final

from kvelastic.cli.kvtop.text import Glyphs, Line, Span, Style


def help_lines(glyphs: Glyphs) -> list[Line]:
    """Return all lines of the help page. The view shows as many as fit."""
    return [
        [Span("Keys", "heading")],
        *(_key(key, what) for key, what in _KEYS),
        [],
        [Span("Bars", "heading")],
        *(
            [Span("  "), Span(getattr(glyphs, use) * 3, use), Span(f"  {what}")]
            for use, what in _USES.items()
        ),
        [],
        [Span("Columns", "heading")],
        *(_key(title, what) for title, what in _COLUMNS),
    ]


_KEYS = (
    ("Up Down j k", "select an instance; Page Up, Page Down, g and G go further"),
    ("l", "change its limit: a size (512M, 1.5GiB), or 80% of its device"),
    ("m", "change its guarantee (min): no instance takes memory below it"),
    ("p", "change its priority: higher keeps its memory longer"),
    ("z w", "put it to sleep: it holds nothing until it is woken; wake it"),
    ("s S r", "sort by the next column, by the one before; reverse the order"),
    ("/", "show only what has a text in name, model, engine, state; Esc: all"),
    ("Space q", "look now; end, as Ctrl-C does"),
)
_USES: Final[dict[Style, str]] = {
    "in_use": "in use: blocks that requests refer to",
    "cached": "cached: blocks kept for prefix caching, evicted when needed",
    "parked": "parked: free pages kept mapped for the next use",
    "slack": "slack: the rest of pages in use, free blocks and padding",
    "reserved": "reserved: weights, activations of instances that are awake",
    "others": "others: memory of the device that other processes use",
    "free": "free: on a device, could be granted; of a limit, not mapped",
}
_COLUMNS = (
    ("MAPPED", "what the instance holds; the bar shows its parts, of the limit"),
    ("IN/S OUT/S", "pages mapped and unmapped a second; EVICT/S cached blocks"),
    ("TREND TIERS", "mapped at the latest looks; what its tiers hold, as below"),
)


def _key(key: str, what: str) -> Line:
    return [Span("  "), Span(key.ljust(12), "strong"), Span(what)]
