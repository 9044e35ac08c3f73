"""The part of the screen about the selected instance: what the table has no room for."""

from __future__ import annotations

from kvelastic.cli.kvtop.keys import value_text
from kvelastic.cli.kvtop.scene import Instance
from kvelastic.cli.kvtop.short import short_size
from kvelastic.cli.kvtop.text import Glyphs, Line, Span, Style, cut

DETAIL_LINES = 4


def detail_lines(one: Instance, width: int, glyphs: Glyphs) -> list[Line]:
    """`DETAIL_LINES` lines about it."""
    who: Line = [Span(one.label, "strong"), Span(f"  {one.state}")]
    if one.over_bytes:
        over = "to go until it sleeps" if one.asleep else "over its limit"
        who.append(Span(f"  {short_size(one.over_bytes)} {over}", "warn"))
    if one.reason:
        who.append(Span(f"  {one.reason}", "bad"))
    where = _facts(
        ("engine", one.engine),
        ("pid", "" if one.pid is None else str(one.pid)),
        ("device", one.device),
    )
    what = _facts(
        ("limit", value_text("limit", one.limit_bytes)),
        ("min", value_text("min", one.min_bytes)),
        ("priority", value_text("priority", one.priority)),
        ("model", one.model),
    )
    parts: list[tuple[str, Style, str, int | None]] = [
        (glyphs.in_use, "in_use", "in use", one.in_use_bytes),
        (glyphs.cached, "cached", "cached", one.cached_bytes),
        (glyphs.parked, "parked", "parked", one.parked_bytes),
        (glyphs.slack, "slack", "slack", one.slack_bytes),
    ]
    memory: Line = []
    for glyph, style, title, amount_bytes in parts:
        memory += [Span(glyph, style), Span(f" {title} {short_size(amount_bytes)}  ")]
    return [cut(line, width) for line in (who, where, what, memory)]


def _facts(*facts: tuple[str, str]) -> Line:
    line: Line = []
    for title, value in facts:
        if value:
            line += [Span(f"{title} ", "dim"), Span(f"{value}  ")]
    return line
