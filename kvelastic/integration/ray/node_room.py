"""Memory of a node that is still available to instances, from the node's ledgers."""

from __future__ import annotations

from kvelastic.shared.ledger_facts import LedgerInfo, Member


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
