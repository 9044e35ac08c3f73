"""Slots of the host tier for records that are on their way.

A reservation is made on the path of a request, where nothing may wait for memory, and filled behind
it: memory comes with the records. It is unpacked only when the first record comes. Not thread-safe:
its owner holds a lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvelastic.errors import IntegrityError
from kvelastic.tiers.base import KEY_BYTES, Reservation


class Place(NamedTuple):
    """Where a record will lie, and whose reservation that is of."""

    slot: int
    ticket: int


class HostPlaces:
    """Reserved slots by ticket and by key."""

    def __init__(self) -> None:
        self._packed: dict[int, tuple[bytes, Sequence[int]]] = {}
        self._unpacked: dict[int, list[bytes]] = {}
        self._place_of: dict[bytes, Place] = {}
        self._last_ticket = 0
        self.count = 0
        """How many slots are reserved and not filled."""

    def add(self, keys: bytes, slots: Sequence[int], count: int) -> int:
        """The `count` keys with slots from 0 on; answers their ticket."""
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
                self._place_of[key] = Place(slot, ticket)

    def take(self, keys: bytes) -> dict[int, int]:
        """The slots of these keys, by their positions; they are the caller's from now on."""
        if not self.count:
            return {}
        self._unpack()
        taken: dict[int, int] = {}
        for at in range(len(keys) // KEY_BYTES):
            place = self._place_of.pop(keys[at * KEY_BYTES : (at + 1) * KEY_BYTES], None)
            if place is not None:
                taken[at] = place.slot
        self.count -= len(taken)
        return taken

    def give_up(self, ticket: int) -> bytes:
        """The keys of a reservation that were not filled, side by side. Repeatable."""
        packed = self._packed.pop(ticket, None)
        if packed is not None:
            names = _with_slots(*packed)
        else:
            # A key that was filled and went may be in another reservation by now.
            names = [
                key
                for key in self._unpacked.pop(ticket, ())
                if key in self._place_of and self._place_of[key].ticket == ticket
            ]
            for key in names:
                del self._place_of[key]
        self.count -= len(names)
        return b"".join(names)

    def check_integrity(self) -> None:
        """Count again; raises `IntegrityError` naming what disagrees."""
        packed = sum(slot >= 0 for _, slots in self._packed.values() for slot in slots)
        if packed + len(self._place_of) != self.count:
            raise IntegrityError(
                f"{packed + len(self._place_of)} slots are reserved, {self.count} are counted"
            )


def _with_slots(keys: bytes, slots: Sequence[int]) -> list[bytes]:
    return [
        keys[at * KEY_BYTES : (at + 1) * KEY_BYTES] for at, slot in enumerate(slots) if slot >= 0
    ]


class HostReservation(Reservation):
    """Slots that `release` gives up; `give_up` is told the ticket, once."""

    def __init__(self, slots: Sequence[int], ticket: int, give_up: Callable[[int], None]) -> None:
        self.slots = slots
        self._ticket: int | None = ticket
        self._give_up = give_up

    @property
    def is_new(self) -> Sequence[bool]:
        """As `Reservation.is_new`."""
        return [slot >= 0 for slot in self.slots]

    @property
    def first_new(self) -> int | None:
        """As `Reservation.first_new`."""
        return next((at for at, slot in enumerate(self.slots) if slot >= 0), None)

    def release(self) -> None:
        """As `Reservation.release`."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self._give_up(ticket)
