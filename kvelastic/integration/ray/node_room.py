"""What instances could still get of a node's memory, and how much a node has: from its ledgers."""

from __future__ import annotations

from kvelastic.ledger_facts import LedgerInfo, Member


def room_bytes(info: LedgerInfo, member: Member) -> int:
    """What a member could still get for requests, of its limit and of its device.

    Caches of others give way down to their guarantees, its own do altogether.
    """
    firm_bytes = sum(
        max(other.guaranteed_bytes, _held_bytes(other))
        for other in info.members
        if other is not member and other.status != "dead"
    )
    most_bytes = min(member.limit_bytes, info.capacity_bytes - info.taken_bytes - firm_bytes)
    return max(0, most_bytes - _held_bytes(member))


def _held_bytes(member: Member) -> int:
    """What of its grant no other instance can have."""
    return max(0, member.granted_bytes - member.evictable_bytes - member.parked_bytes)
