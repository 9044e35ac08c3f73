"""The output of `kvctl tiers`: a table of tiers and one of blocks, or JSON objects."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvelastic.cli.rendering.columns import size_or_dash
from kvelastic.cli.rendering.fitting_table import Column, plain, rich_table
from kvelastic.instance.row import tier_rows
from kvelastic.units import format_size

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvelastic.shared.tier_status import TiersStatus

NOTHING = "No instance has tiers. KVELASTIC_TIERS gives an engine some when it starts."
BLOCK_WORDS: Final = {
    "matched": "found",
    "unmatched": "not found",
    "loaded": "loaded",
    "missed": "not loaded",
    "demoted": "demoted",
    "dropped": "dropped",
    "served": "copied on demand",
    "ahead": "copied ahead",
    "refused": "refused",
    "late": "timed out",
    "lost": "changed",
}
"""Labels of the counts of `BlockCounts` in tables, the most important first."""

_NAME_CELLS: Final = 32
_POLICY_CELLS: Final = len("write_through")
_WORD_CELLS: Final = max(map(len, BLOCK_WORDS.values()))


def plain_tables(all_shown: Mapping[str, TiersStatus]) -> str:
    """Return plain columns: one line per tier, nearest first, then one per instance for blocks."""
    return "\n\n".join(map(plain, _tables(all_shown))) if all_shown else NOTHING


def rich_tables(all_shown: Mapping[str, TiersStatus], width: int) -> RenderableType:
    """Return the tables for a terminal of `width` columns, with fewer columns if it is narrow."""
    from rich.console import Group

    return (
        Group(*(rich_table(each, width) for each in _tables(all_shown))) if all_shown else NOTHING
    )


def _tables(all_shown: Mapping[str, TiersStatus]) -> tuple[list[Column], list[Column]]:
    from kvelastic.instance.row import printable

    names = [printable(name) for name, shown in all_shown.items() for _ in shown.tiers]
    tiers = [tier for shown in all_shown.values() for tier in shown.tiers]
    loads = ["-" if tier.load_us is None else f"{tier.load_us / 1000:.2f} ms" for tier in tiers]
    held = [
        Column("Name", names, 0, is_left=True, most_cells=_NAME_CELLS),
        Column("Tier", [tier.tier for tier in tiers], 1, is_left=True),
        Column("State", [tier.state for tier in tiers], 2, is_left=True),
        Column("Used", [format_size(tier.used_bytes) for tier in tiers], 3),
        Column("Limit", [size_or_dash(tier.limit_bytes) for tier in tiers], 4),
        Column("Records", [str(tier.records) for tier in tiers], 8),
        Column("Hits", [str(tier.hits) for tier in tiers], 6),
        Column("Misses", [str(tier.misses) for tier in tiers], 7),
        Column("Puts", [str(tier.puts) for tier in tiers], 11),
        Column("Refused", [str(tier.refused) for tier in tiers], 10),
        Column("Evicted", [str(tier.evicted) for tier in tiers], 12),
        Column("Errors", [str(tier.errors) for tier in tiers], 5),
        Column("Written", [format_size(tier.bytes_written) for tier in tiers], 13),
        Column("Read", [format_size(tier.bytes_read) for tier in tiers], 14),
        Column("Load", loads, 9),
        Column("Write left", [size_or_dash(tier.write_left_bytes) for tier in tiers], 15),
        Column("To write", [format_size(tier.waiting_bytes) for tier in tiers], 16),
    ]
    names = [printable(name) for name in all_shown]
    policies = [shown.policy for shown in all_shown.values()]
    became = [
        Column("Name", names, 0, is_left=True, most_cells=_NAME_CELLS),
        Column("Policy", policies, 1 + len(BLOCK_WORDS), is_left=True, most_cells=_POLICY_CELLS),
    ]
    for rank, (count, word) in enumerate(BLOCK_WORDS.items(), 1):
        counts = [str(getattr(shown.blocks, count)) for shown in all_shown.values()]
        became.append(Column(word.capitalize(), counts, rank, most_cells=_WORD_CELLS))
    return held, became


def as_object(name: str, shown: TiersStatus) -> dict[str, Any]:
    """Return the object for --json: the statistics, with times as text."""
    seconds = shown.published_realtime_ns / 1e9
    try:
        published = datetime.fromtimestamp(seconds, tz=timezone.utc).isoformat()
    except (OverflowError, ValueError, OSError):
        published = None
    return {
        "name": name,
        "published": published,
        "policy": shown.policy,
        "answered_revision": shown.answered_revision,
        **msgspec.structs.asdict(shown.blocks),
        "tiers": tier_rows(shown),
    }
