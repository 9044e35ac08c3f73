"""Bars of memory and sparklines, as styled text of an exact width.

device_bar(device, 40, UNICODE); instance_bar(instance, 12, ASCII); sparkline((1, 5, 3), 8, ASCII)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvelastic.cli.kvtop.scene import Device, Instance
from kvelastic.cli.kvtop.text import Glyphs, Line, Span, Style
from kvelastic.cli.rendering.columns import shares

if TYPE_CHECKING:
    from kvelastic.shared.tier_status import TierStatus


def device_bar(device: Device, width: int, glyphs: Glyphs) -> Line:
    """Return the parts of the capacity: in use, cached, parked, slack, reserved, others, free."""
    return _bar(
        [
            (device.in_use_bytes, glyphs.in_use, "in_use"),
            (device.cached_bytes, glyphs.cached, "cached"),
            (device.parked_bytes, glyphs.parked, "parked"),
            (device.slack_bytes, glyphs.slack, "slack"),
            (device.reserved_of_capacity_bytes, glyphs.reserved, "reserved"),
            (device.others_of_capacity_bytes, glyphs.others, "others"),
        ],
        device.capacity_bytes,
        width,
        glyphs.free,
    )


def instance_bar(instance: Instance, width: int, glyphs: Glyphs) -> Line:
    """Return the parts of the instance's limit: in use, cached, parked, slack."""
    return _bar(
        [
            (instance.in_use_bytes or 0, glyphs.in_use, "in_use"),
            (instance.cached_bytes or 0, glyphs.cached, "cached"),
            (instance.parked_bytes or 0, glyphs.parked, "parked"),
            (instance.slack_bytes, glyphs.slack, "slack"),
        ],
        instance.limit_bytes or 0,
        width,
        glyphs.free,
    )


def tier_bar(tier: TierStatus, width: int, glyphs: Glyphs) -> Line:
    """Return the used part of the tier's limit; empty if the tier has no limit of its own."""
    if tier.limit_bytes is None:
        return []
    return _bar([(tier.used_bytes, glyphs.cached, "cached")], tier.limit_bytes, width, glyphs.free)


def _bar(parts: list[tuple[int, str, Style]], whole: int, width: int, free: str) -> Line:
    if width <= 0:
        return []
    counts = shares([amount for amount, _, _ in parts], whole, width)
    bar = [
        Span(glyph * count, style)
        for count, (_, glyph, style) in zip(counts, parts, strict=True)
        if count
    ]
    left = width - sum(counts)
    return [*bar, Span(free * left, "free")] if left else bar


def sparkline(amounts: Sequence[int], width: int, glyphs: Glyphs) -> str:
    """Return the newest `width` amounts, scaled from 0 to the largest, padded with spaces."""
    shown = amounts[-width:] if width > 0 else ()
    highest, top = max(shown, default=0), len(glyphs.levels) - 1
    # Only 0 gets the lowest level, so that every small amount differs from it.
    levels = [
        glyphs.levels[max(1, round(top * amount / highest)) if amount else 0] for amount in shown
    ]
    return " " * (width - len(levels)) + "".join(levels)
