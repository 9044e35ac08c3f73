"""Bars of memory and sparklines, as styled text of an exact width.

device_bar(device, 40, UNICODE); instance_bar(instance, 12, ASCII); sparkline((1, 5, 3), 8, ASCII)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvelastic.cli.kvtop.scene import Device, Instance
from kvelastic.cli.kvtop.text import Glyphs, Line, Span, Style, short_size
from kvelastic.cli.rendering.columns import shares

if TYPE_CHECKING:
    from kvelastic.shared.tier_status import TierStatus

Uses = Mapping[Style, "int | None"]
"""Bytes by use. A use is also the name of its style and of its glyph."""


def uses_of(held: Device | Instance) -> dict[Style, int | None]:
    """Return the parts of the mapped memory, in the order of bars."""
    return {
        "in_use": held.in_use_bytes,
        "cached": held.cached_bytes,
        "parked": held.parked_bytes,
        "slack": held.slack_bytes,
    }


def device_bar(device: Device, width: int, glyphs: Glyphs) -> Line:
    """Return the parts of the capacity: in use, cached, parked, slack, reserved, others, free."""
    beside: Uses = {
        "reserved": device.reserved_of_capacity_bytes,
        "others": device.others_of_capacity_bytes,
    }
    return _bar({**uses_of(device), **beside}, device.capacity_bytes, width, glyphs)


def instance_bar(instance: Instance, width: int, glyphs: Glyphs) -> Line:
    """Return the parts of the instance's limit: in use, cached, parked, slack."""
    return _bar(uses_of(instance), instance.limit_bytes or 0, width, glyphs)


def tier_bar(tier: TierStatus, width: int, glyphs: Glyphs) -> Line:
    """Return the used part of the tier's limit; empty if the tier has no limit."""
    if tier.limit_bytes is None:
        return []
    return _bar({"cached": tier.used_bytes}, tier.limit_bytes, width, glyphs)


def _bar(uses: Uses, whole: int, width: int, glyphs: Glyphs) -> Line:
    if width <= 0:
        return []
    counts = shares([amount or 0 for amount in uses.values()], whole, width)
    parts: dict[Style, int] = {**dict(zip(uses, counts, strict=True)), "free": width - sum(counts)}
    return [Span(getattr(glyphs, use) * count, use) for use, count in parts.items() if count]


def amounts(uses: Uses, glyphs: Glyphs) -> list[Line]:
    """Return the glyph, the name and the amount of each use."""
    return [
        [
            Span(getattr(glyphs, use), use),
            Span(f" {use.replace('_', ' ')} {short_size(amount_bytes)}"),
        ]
        for use, amount_bytes in uses.items()
    ]


def sparkline(amounts: Sequence[int], width: int, glyphs: Glyphs) -> str:
    """Return the newest `width` amounts, scaled from 0 to the largest, padded with spaces."""
    shown = amounts[-width:] if width > 0 else ()
    highest, top = max(shown, default=0), len(glyphs.levels) - 1
    # Only 0 gets the lowest level, so that every small amount differs from it.
    levels = [
        glyphs.levels[max(1, round(top * amount / highest)) if amount else 0] for amount in shown
    ]
    return " " * (width - len(levels)) + "".join(levels)
