"""Ledgers in kvctl: finds the ledger of an instance, and removes entries of dead instances."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvelastic.shared.ledger_facts import LedgerInfo


def choose_ledger(ledgers: list[LedgerInfo], uuid: bytes, device: str) -> LedgerInfo | None:
    """Return the ledger with a member of that segment, else an unreadable one of the device.

    Returns None without either. An unreadable ledger may or may not contain the instance. For an
    instance on several devices, return the ledger where it waits for the most memory, else the
    fullest one: memory that is missing there limits the instance on all devices.
    """
    own = [
        (-member.ask_bytes, ledger.free_bytes, index)
        for index, ledger in enumerate(ledgers)
        for member in ledger.members
        if member.uuid == uuid
    ]
    if own:
        return ledgers[min(own)[-1]]
    for ledger in ledgers:
        # An unreadable ledger has only its file name: group, underscore, device.
        is_of_device = ledger.device == device or ledger.device.endswith(f"_{device}")
        if is_of_device and ledger.status != "readable":
            return ledger
    return None


@dataclass(frozen=True)
class FreedSlot:
    """The removed ledger entry of a dead instance."""

    name: str
    """Name of the instance's segment."""
    device: str
    granted_bytes: int


def reap_ledgers() -> tuple[list[str], list[FreedSlot]]:
    """Remove the entries of dead instances, and ledgers without members.

    Returns the removed files, and the entries removed from the remaining ledgers.
    """
    from kvelastic.shared.ledger import list_ledgers, reap

    before = _dead_slots(list_ledgers())
    removed = [str(path) for path in reap()]
    left = set(_dead_slots(list_ledgers()))
    return removed, [place for key, place in before.items() if key not in left]


def _dead_slots(ledgers: list[LedgerInfo]) -> dict[tuple[str, str, bytes], FreedSlot]:
    return {
        (ledger.group, ledger.device, member.uuid): FreedSlot(
            member.name, ledger.device, member.granted_bytes
        )
        for ledger in ledgers
        for member in ledger.members
        if member.status == "dead"
    }
