"""The help page: the keys, and the meaning of bars and columns."""

from __future__ import annotations

from kvelastic.cli.kvtop.text import Glyphs, Line, Span, Style


def help_lines(glyphs: Glyphs) -> list[Line]:
    """Return all lines of the help page. The view shows as many as fit."""
    parts: list[tuple[str, Style, str]] = [
        (glyphs.in_use, "in_use", "in use: blocks that requests refer to"),
        (glyphs.cached, "cached", "cached: blocks kept for prefix caching, evicted when needed"),
        (glyphs.parked, "parked", "parked: free pages kept mapped for the next use"),
        (glyphs.slack, "slack", "slack: the rest of pages in use, free blocks and padding"),
        (glyphs.reserved, "reserved", "reserved: weights, activations of instances that are awake"),
        (glyphs.others, "others", "others: memory of the device that other processes use"),
        (glyphs.free, "free", "free: on a device, could be granted; of a limit, not mapped"),
    ]
    return [
        [Span("Keys", "heading")],
        *(_key(key, what) for key, what in _KEYS),
        [],
        [Span("Bars", "heading")],
        *([Span("  "), Span(glyph * 3, style), Span(f"  {what}")] for glyph, style, what in parts),
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
_COLUMNS = (
    ("MAPPED", "what the instance holds; the bar shows its parts, of the limit"),
    ("IN/S OUT/S", "pages mapped and unmapped a second; EVICT/S cached blocks"),
    ("TREND TIERS", "mapped at the latest looks; what its tiers hold, as below"),
)


def _key(key: str, what: str) -> Line:
    return [Span("  "), Span(key.ljust(12), "strong"), Span(what)]
