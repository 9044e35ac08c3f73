"""What `kvctl tiers` prints: a table of tiers and sentences below it, or objects for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from kvelastic.cli.columns import aligned
from kvelastic.instance.row import tier_rows
from kvelastic.sizes import format_size

if TYPE_CHECKING:
    from kvelastic.tier_board_format import BoardFigures, TierFigures

NOTHING = "No instance has tiers. KVELASTIC_TIERS gives an engine some when it starts."

_HEADINGS = (
    "NAME",
    "TIER",
    "STATE",
    "USED",
    "LIMIT",
    "RECORDS",
    "HITS",
    "MISSES",
    "PUTS",
    "REFUSED",
    "EVICTED",
    "ERRORS",
    "WRITTEN",
    "READ",
    "LOAD",
    "WRITE_LEFT",
    "TO_WRITE",
)
_LEFT = {0, 1, 2}


def table(boards: Mapping[str, BoardFigures]) -> str:
    """One line a tier, nearest first, and what became of each instance's blocks."""
    from kvelastic.instance.row import printable

    if not boards:
        return NOTHING
    lines: list[tuple[str, ...]] = [_HEADINGS]
    for name, board in boards.items():
        lines += [(printable(name), *_cells(tier)) for tier in board.tiers]
    text = [*aligned(lines, _LEFT), ""]
    text += (_sentence(printable(name), board) for name, board in boards.items())
    return "\n".join(text)


def _cells(tier: TierFigures) -> tuple[str, ...]:
    return (
        tier.tier,
        tier.state,
        format_size(tier.used_bytes),
        _size(tier.limit_bytes),
        str(tier.records),
        str(tier.hits),
        str(tier.misses),
        str(tier.puts),
        str(tier.refused),
        str(tier.evicted),
        str(tier.errors),
        format_size(tier.bytes_written),
        format_size(tier.bytes_read),
        "-" if tier.load_us is None else f"{tier.load_us / 1000:.2f} ms",
        _size(tier.write_left_bytes),
        format_size(tier.waiting_bytes),
    )


def _sentence(name: str, board: BoardFigures) -> str:
    blocks = board.blocks
    asked = blocks.matched + blocks.unmatched
    return (
        f"{name} ({board.policy}): {blocks.demoted} blocks demoted, {blocks.dropped} dropped;"
        f" {blocks.matched} of {asked} found, {blocks.loaded} loaded,"
        f" {blocks.missed} not after all;"
        f" {blocks.served} cleaned while shrinking waited, {blocks.ahead} ahead, {blocks.refused}"
        f" refused by every tier, {blocks.late} too late, {blocks.lost} changed meanwhile."
    )


def as_object(name: str, board: BoardFigures) -> dict[str, Any]:
    """For --json: the figures as they are, the time as text."""
    seconds = board.published_realtime_ns / 1e9
    try:
        published = datetime.fromtimestamp(seconds, tz=timezone.utc).isoformat()
    except (OverflowError, ValueError, OSError):
        published = None
    return {
        "name": name,
        "published": published,
        "policy": board.policy,
        "answered_revision": board.answered_revision,
        **asdict(board.blocks),
        "tiers": tier_rows(board),
    }


def _size(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else format_size(size_bytes)
