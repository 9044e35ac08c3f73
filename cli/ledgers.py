"""What kvctl does with ledgers: find the one of an instance, and reap what the dead have left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvelastic.ledger_facts import LedgerInfo


def choose_ledger(ledgers: list[LedgerInfo], uuid: bytes, device: str) -> LedgerInfo | None:
    """The one that has a member of that segment; else an unreadable one of that device; or None.

    What an unreadable one says, and whether the instance is in it, is not known.
    Of an instance on several devices it is the one where it waits for most, else the fullest: what
    it lacks there it can use nowhere.
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
        # Of one that cannot be read only the file's name is known: group, underscore, device.
        is_of_device = ledger.device == device or ledger.device.endswith(f"_{device}")
        if is_of_device and ledger.status != "readable":
            return ledger
    return None


@dataclass(frozen=True)
class FreedPlace:
    """What a dead instance had of a device, and has no more."""

    name: str
    """Of the segment that it had."""
    device: str
    granted_bytes: int


def reap_ledgers() -> tuple[list[str], list[FreedPlace]]:
    """Free the places of the dead and remove ledgers that have no member.

    Returns the files that were removed, and the places that were freed in those that stay.
    """
    from kvelastic.ledger import list_ledgers, reap

    before = _dead_places(list_ledgers())
    removed = [str(path) for path in reap()]
    left = set(_dead_places(list_ledgers()))
    return removed, [place for key, place in before.items() if key not in left]


def _dead_places(ledgers: list[LedgerInfo]) -> dict[tuple[str, str, bytes], FreedPlace]:
    return {
        (ledger.group, ledger.device, member.uuid): FreedPlace(
            member.name, ledger.device, member.granted_bytes
        )
        for ledger in ledgers
        for member in ledger.members
        if member.status == "dead"
    }
