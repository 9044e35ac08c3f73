"""Reserved slots of the host tier, for records that will be put.

A reservation is made on a request's path, where waiting for memory is not allowed. It is filled
later, and memory is allocated then. The per-key table is built only when the first record arrives.
Not thread-safe: the owner holds a lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvelastic.errors import IntegrityError
from kvelastic.tiers.base import each_key, keys_at


class ReservedSlot(NamedTuple):
    """The slot of a future record, and the ticket of its reservation."""

    slot: int
    ticket: int


class SlotReservations:
    """Reserved slots by ticket and by key."""

    def __init__(self) -> None:
        self._packed: dict[int, tuple[bytes, Sequence[int]]] = {}
        self._unpacked: dict[int, list[bytes]] = {}
        self._slot_of: dict[bytes, ReservedSlot] = {}
        self._last_ticket = 0
        self.count = 0
        """Number of slots that are reserved and not filled."""

    def add(self, keys: bytes, slots: Sequence[int], count: int) -> int:
        """Add a reservation for the `count` keys whose slot is 0 or above; return its ticket."""
        self._last_ticket += 1
        self._packed[self._last_ticket] = (keys, slots)
        self.count += count
        return self._last_ticket

    def _unpack(self) -> None:
        while self._packed:
            ticket, (keys, slots) = self._packed.popitem()
            names = self._unpacked[ticket] = _with_slots(keys, slots)
            filled = (slot for slot in slots if slot >= 0)
            for key, slot in zip(names, filled, strict=True):
                self._slot_of[key] = ReservedSlot(slot, ticket)

    def take(self, keys: bytes) -> dict[int, int]:
        """Return the reserved slots of `keys` by position; the caller owns them from now on."""
        if not self.count:
            return {}
        self._unpack()
        taken: dict[int, int] = {}
        for at, key in enumerate(each_key(keys)):
            reserved = self._slot_of.pop(key, None)
            if reserved is not None:
                taken[at] = reserved.slot
        self.count -= len(taken)
        return taken

    def give_up(self, ticket: int) -> bytes:
        """End a reservation; return its unfilled keys, concatenated. Idempotent."""
        packed = self._packed.pop(ticket, None)
        if packed is not None:
            names = _with_slots(*packed)
        else:
            # A filled key whose record is gone may be in another reservation by now.
            names = [
                key
                for key in self._unpacked.pop(ticket, ())
                if key in self._slot_of and self._slot_of[key].ticket == ticket
            ]
            for key in names:
                del self._slot_of[key]
        self.count -= len(names)
        return b"".join(names)

    def check_integrity(self) -> None:
        """Recount; raises `IntegrityError` that names the disagreement."""
        packed = sum(slot >= 0 for _, slots in self._packed.values() for slot in slots)
        if packed + len(self._slot_of) != self.count:
            raise IntegrityError(
                f"{packed + len(self._slot_of)} slots are reserved, {self.count} are counted"
            )


def _with_slots(keys: bytes, slots: Sequence[int]) -> list[bytes]:
    return [keys_at(keys, at) for at, slot in enumerate(slots) if slot >= 0]
