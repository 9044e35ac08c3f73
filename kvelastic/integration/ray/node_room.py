"""What a node's ledgers say of one instance, above all the memory still available to it."""

from __future__ import annotations

from typing import Any

from kvelastic.shared import ledger
from kvelastic.shared.ledger_facts import LedgerInfo, Member


def ledger_report(instance: str, *, is_awake: bool) -> dict[str, Any]:
    """Return an instance's part of a replica's report. Blocks for milliseconds.

    `is_awake`: its engine is. Only then it matters for routers whether its memory sleeps.
    """
    found = [
        (info, member)
        for info in ledger.list_ledgers()
        for member in info.members
        if member.name == instance and member.status != "dead"
    ]
    members = [member for _, member in found]
    return {
        "memory_asleep": is_awake and any(member.asleep for member in members),
        "room_bytes": min((room_bytes(info, member) for info, member in found), default=0),
        "asked_s": max((member.ask_s for member in members), default=0.0),
        "guarantee_bytes": sum(member.min_bytes for member in members),
        "in_use_bytes": sum(member.in_use_bytes for member in members),
        "ask_bytes": sum(member.ask_bytes for member in members),
    }


def room_bytes(info: LedgerInfo, member: Member) -> int:
    """Return the memory still available to a member's requests, within its limit and device.

    Other members' caches count as available down to their guarantees, its own completely.
    """
    firm_bytes = sum(
        max(other.guaranteed_bytes, _held_bytes(other))
        for other in info.members
        if other is not member and other.status != "dead"
    )
    most_bytes = min(member.limit_bytes, info.capacity_bytes - info.taken_bytes - firm_bytes)
    return max(0, most_bytes - _held_bytes(member))


def _held_bytes(member: Member) -> int:
    """Return the part of a member's grant that cannot be reclaimed."""
    return max(0, member.granted_bytes - member.evictable_bytes - member.parked_bytes)
