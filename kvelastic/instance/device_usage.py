"""The memory of a device ledger's members, by use.

    for use in member_uses(ledger, statuses): print(use.member.name, use.cached_bytes)

A ledger has the grants of its device. A member's own control block has the use of its pages. So a
device's parts are the sums of the values shown for its instances. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvelastic.instance.status import DeviceUse, InstanceStatus
    from kvelastic.shared.ledger_facts import LedgerInfo, Member


@dataclass(frozen=True)
class MemberUse:
    """One member and its memory on the ledger's device."""

    member: Member
    mapped_bytes: int
    in_use_bytes: int
    cached_bytes: int
    parked_bytes: int

    @property
    def slack_bytes(self) -> int:
        """Mapped memory not used, cached or parked: free blocks of used pages, and padding."""
        rest_bytes = self.in_use_bytes + self.cached_bytes + self.parked_bytes
        return max(0, self.mapped_bytes - rest_bytes)


def member_uses(ledger: LedgerInfo, statuses: Iterable[InstanceStatus]) -> list[MemberUse]:
    """Return every member of a ledger, in the ledger's order.

    A member that is dead or not in `statuses` counts with the ledger's grant.
    """
    uses = {
        status.uuid: use
        for status in statuses
        if status.is_alive
        for use in status.uses
        if use.share is not None
        and (use.share.device, use.share.group) == (ledger.device, ledger.group)
    }
    return [_use(member, uses.get(member.uuid)) for member in ledger.members]


def _use(member: Member, use: DeviceUse | None) -> MemberUse:
    if use is None:
        return MemberUse(
            member,
            member.granted_bytes,
            member.in_use_bytes,
            member.evictable_bytes,
            member.parked_bytes,
        )
    return MemberUse(member, use.mapped_bytes, use.in_use_bytes, use.cached_bytes, use.parked_bytes)
