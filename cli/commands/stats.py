"""kvctl stats: all statistics of one instance, with rates if it was read twice.

The keys of `Stats` are the schema of `kvctl stats --json` (docs/kvctl.md): those of a row of `list`
and more. No key is ever omitted, and unknown values are None.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import click

from kvelastic.cli.arguments import NameType, SecondsType
from kvelastic.cli.rendering.printing import print_json, print_lines
from kvelastic.cli.segment_lookup import sweep
from kvelastic.instance.reading import ledgers
from kvelastic.instance.row import DeviceUseRow, Row, TierRow, printable, row_of
from kvelastic.instance.status import status_of
from kvelastic.shared.tier_status import tiers_of

if TYPE_CHECKING:
    from kvelastic.shared.segment import SegmentInfo
    from kvelastic.shared.tier_status import TiersStatus


@click.command("stats", short_help="Show all statistics of one instance.")
@click.argument("name", type=NameType())
@click.option(
    "--interval",
    "interval_s",
    type=SecondsType(0.01),
    metavar="SECONDS",
    help="Read twice, this far apart, and show rates.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one object (docs/kvctl.md).")
def stats_command(name: str, interval_s: float | None, as_json: bool) -> None:
    """Show all statistics of one instance: limits, memory, blocks, pages, counters.

    --interval adds the counters' rates per second.
    """
    first = look(name, sweep())
    if interval_s is None:
        stats = stats_of(first)
    else:
        time.sleep(interval_s)
        stats = stats_of(look(name, []), before=first)
    if as_json:
        print_json(stats)
    else:
        print_lines(*stats_text(stats).split("\n"))


class Stats(Row):
    """All values of one segment."""

    blocks_total: int
    """Number of block ids in the range."""
    blocks_in_use: int
    blocks_cached: int
    blocks_available: int
    """Blocks that could be allocated now."""
    blocks_reserved: int
    pages_mapped: int
    pages_parked: int
    updated_s: float | None
    """Seconds since the usage was last published; None if it never was."""
    answered_s: float | None
    """Seconds since the last acknowledgement of a request; None without one."""
    interval_s: float | None
    """Actual seconds between the two reads for the rates; None with one read."""
    rates: dict[str, float] | None
    """Rate of every counter per second."""


_TIER_COUNTS: Final = (
    "records", "puts", "refused", "hits", "misses", "torn", "evicted", "errors",
)  # fmt: skip


@dataclass(frozen=True)
class Look:
    """A segment, and the time of its read (CLOCK_MONOTONIC, like the segment's own times)."""

    info: SegmentInfo
    at_ns: int
    shown: TiersStatus | None = None


def look(name: str, reaped: list[str]) -> Look:
    """Read one segment. Raises the errors of `kvelastic.cli.segment_lookup.readable`."""
    from kvelastic.cli.segment_lookup import readable

    info = readable(name, reaped)
    return Look(info, time.monotonic_ns(), tiers_of([info]).get(info.name))


def stats_of(now: Look, before: Look | None = None) -> Stats:
    """Return the statistics of a read, with rates since the previous one.

    If another instance has taken the name since then, there are no rates.
    """
    usage, ack = now.info.usage, now.info.ack
    rates: dict[str, float] | None = None
    interval_s: float | None = None
    if before is not None and before.info.header["uuid"] == now.info.header["uuid"]:
        interval_s = (now.at_ns - before.at_ns) / 1e9
        rates = {
            counter: round((count - before.info.counters[counter]) / interval_s, 3)
            for counter, count in now.info.counters.items()
        }
    status = status_of(now.info, ledgers(), now_ns=now.at_ns, shown_tiers=now.shown)
    return Stats(
        **row_of(status),
        blocks_total=status.blocks_total,
        blocks_in_use=status.blocks_in_use,
        blocks_cached=status.blocks_cached,
        blocks_available=status.blocks_available,
        blocks_reserved=status.blocks_reserved,
        pages_mapped=status.pages_mapped,
        pages_parked=status.pages_parked,
        updated_s=_age_s(usage["updated_ns"], now.at_ns),
        answered_s=_age_s(ack["acknowledged_ns"], now.at_ns),
        interval_s=None if interval_s is None else round(interval_s, 6),
        rates=rates,
    )


def _age_s(then_ns: int, now_ns: int) -> float | None:
    return round(max(0, now_ns - then_ns) / 1e9, 3) if then_ns else None


def stats_text(stats: Stats) -> str:
    """Return the statistics as plain text: one value per line, by topic."""
    from kvelastic.cli.rendering.columns import size_or_dash as size
    from kvelastic.cli.rendering.tier_tables import BLOCK_WORDS

    def ago(seconds: float | None) -> str:
        return "never" if seconds is None else f"{seconds:.1f} s ago"

    def on_device(use: DeviceUseRow) -> str:
        name = printable(use["device"] or "-")
        if len(stats["devices"] or []) == 1:
            return name
        parts = [f"{size(use['mapped_bytes'])} mapped", f"{size(use['granted_bytes'])} granted"]
        parts += [f"{size(use['reserved_bytes'])} reserved"] * bool(use["reserved_bytes"])
        return f"{name}: {', '.join(parts)}"

    requested = stats["requested_limit_bytes"]
    reserved = size(stats["reserved_bytes"])
    if stats["reserved_bytes"]:
        reserved += " when it wakes" if stats["asleep"] else " besides the KV cache"
    state = stats["state"] + (f" ({printable(stats['reason'])})" if stats["reason"] else "")
    topics: dict[str, list[tuple[str, str]]] = {
        f"{printable(stats['name'])}": [
            ("engine", printable(stats["engine"] or "-")),
            ("model", printable(stats["model"] or "-")),
            *(("device", on_device(use)) for use in stats["devices"] or []),
            ("process", f"{stats['pid']} of user {stats['uid']}"),
            ("created", stats["created"] or "-"),
            ("segment", stats["uuid"] or "-"),
        ],
        "Limits": [
            ("state", state),
            ("asleep", "yes" if stats["asleep"] else "no"),
            ("limit", size(stats["limit_bytes"]) if stats["is_limited"] else "none"),
            ("in effect", size(stats["effective_limit_bytes"])),
            ("last request", "none" if requested is None else size(requested)),
            ("still over", size(stats["over_bytes"])),
            ("guarantee", size(stats["min_bytes"])),
            ("priority", str(stats["priority"])),
            ("revision", f"{stats['answered_revision']} of {stats['revision']} answered"),
            ("answered", ago(stats["answered_s"])),
        ],
        "Memory": [
            ("capacity", size(stats["capacity_bytes"])),
            ("mapped", size(stats["mapped_bytes"])),
            ("  in use", size(stats["in_use_bytes"])),
            ("  set aside", size(stats["set_aside_bytes"])),
            ("  cached", size(stats["cached_bytes"])),
            ("  parked", size(stats["parked_bytes"])),
            ("  slack", size(stats["slack_bytes"])),
            ("used", size(stats["used_bytes"])),
            ("granted", size(stats["granted_bytes"])),
            ("reserved", reserved),
            ("updated", ago(stats["updated_s"])),
        ],
        "Pages": [
            ("one page", size(stats["page_bytes"])),
            ("mapped now", str(stats["pages_mapped"])),
            ("parked now", str(stats["pages_parked"])),
        ],
        "Blocks": [
            ("in range", str(stats["blocks_total"])),
            ("in use", str(stats["blocks_in_use"])),
            ("cached", str(stats["blocks_cached"])),
            ("reserved", str(stats["blocks_reserved"])),
            ("available", str(stats["blocks_available"])),
        ],
    }
    for tier in stats["tiers"] or []:
        topics[f"Tier {tier['tier']}"] = _tier_lines(tier)
    if stats["tier_blocks"] is not None:
        topics[f"Blocks and tiers, {stats['tier_policy']}"] = [
            (word, str(stats["tier_blocks"][count])) for count, word in BLOCK_WORDS.items()
        ]
    counters, rates = stats["counters"] or {}, stats["rates"]
    if rates is None:
        heading = "Counters since its start"
        counted = [(name, str(count)) for name, count in counters.items()]
    else:
        heading = f"Counters since its start, and rates over {stats['interval_s']:.3g} s"
        digits = max(len(str(count)) for count in counters.values())
        counted = [
            (name, f"{count:>{digits}}  {rates[name]:g}/s") for name, count in counters.items()
        ]
    topics[heading] = [(name.replace("_", " "), text) for name, text in counted]
    width = max(len(label) for lines in topics.values() for label, _ in lines)
    return "\n\n".join(
        "\n".join([title, *(f"  {label:<{width}}  {value}" for label, value in lines)])
        for title, lines in topics.items()
    )


def _tier_lines(tier: TierRow) -> list[tuple[str, str]]:
    from kvelastic.units import format_size

    def size(size_bytes: int | None, none: str) -> str:
        return none if size_bytes is None else format_size(size_bytes)

    load_us = tier["load_us"]
    left = size(tier["write_left_bytes"], "no bound")
    if tier["write_budget_bytes"] is not None:
        left += f" of {format_size(tier['write_budget_bytes'])}"
    return [
        ("state", tier["state"]),
        ("used", format_size(tier["used_bytes"])),
        ("limit", size(tier["limit_bytes"], "others decide")),
        *((what, str(tier[what])) for what in _TIER_COUNTS),
        ("written", format_size(tier["bytes_written"])),
        ("read", format_size(tier["bytes_read"])),
        ("may be written today", left),
        ("still to be written", format_size(tier["waiting_bytes"])),
        ("to load a block", "not known" if load_us is None else f"{load_us / 1000:.2f} ms"),
    ]
