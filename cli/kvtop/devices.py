"""The part of the screen about devices: a bar each, and what the bar's parts amount to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvelastic.cli.kvtop.bars import device_bar
from kvelastic.cli.kvtop.scene import Device
from kvelastic.cli.kvtop.text import (
    Glyphs,
    Line,
    Span,
    Style,
    cells,
    cut,
    fit,
    line_cells,
    short_size,
)

_MOST_NAME_CELLS: Final = 24
_LEAST_BAR_CELLS: Final = 8


def device_lines(
    devices: Sequence[Device], width: int, most_lines: int, glyphs: Glyphs, *, detailed: bool
) -> list[Line]:
    """One line a device, or two with the amounts (`detailed`); at most `most_lines`."""
    names = max((cells(device.name) for device in devices), default=0)
    names = min(names, _MOST_NAME_CELLS, max(4, width // 4))
    lines: list[Line] = []
    for device in devices:
        lines.append(_device_line(device, names, width, glyphs))
        if detailed and not device.problem:
            lines.append(_amounts(device, width, glyphs))
    if len(lines) <= most_lines or most_lines < 2:
        return lines[: max(0, most_lines)]
    unseen = len(lines) - most_lines + 1
    return [*lines[: most_lines - 1], cut([Span(f"and {unseen} more", "dim")], width)]


def _device_line(device: Device, names: int, width: int, glyphs: Glyphs) -> Line:
    name = Span(fit(device.name, names, glyphs.mark), "strong")
    if device.problem:
        return cut([name, Span(" "), Span(device.problem, "warn")], width)
    held = [Span(f" {short_size(device.held_bytes):>5} of {short_size(device.capacity_bytes):<5}")]
    free = [Span(f"  {short_size(device.free_bytes):>5} free")]
    asked: Line = []
    if device.asked_bytes:
        asked = [Span(f"  {short_size(device.asked_bytes)} asked", "bad")]
    # The more there is to say, the more room it takes from the bar; what is left out comes last.
    for texts in ([*held, *free, *asked], [*held, *asked], held):
        room = width - names - 1 - line_cells(texts)
        if room >= _LEAST_BAR_CELLS:
            return [name, Span(" "), *device_bar(device, room, glyphs), *texts]
    return cut([name, *held], width)


def _amounts(device: Device, width: int, glyphs: Glyphs) -> Line:
    parts: list[tuple[str, Style, str, int]] = [
        (glyphs.in_use, "in_use", "in use", device.in_use_bytes),
        (glyphs.cached, "cached", "cached", device.cached_bytes),
        (glyphs.parked, "parked", "parked", device.parked_bytes),
        (glyphs.slack, "slack", "slack", device.slack_bytes),
    ]
    if device.reserved_bytes:
        parts.append((glyphs.reserved, "reserved", "reserved", device.reserved_bytes))
    if device.has_ledger:
        parts.append((glyphs.others, "others", "others", device.others_bytes))
    if device.guaranteed_bytes:
        parts.append(("", "plain", "min", device.guaranteed_bytes))
    line: Line = []
    for glyph, style, title, amount_bytes in parts:
        mark = [Span(glyph, style), Span(" ")] if glyph else []
        amount = [Span("  "), *mark, Span(f"{title} {short_size(amount_bytes)}")]
        if line_cells([*line, *amount]) > width:  # whole ones only
            break
        line += amount
    return line
