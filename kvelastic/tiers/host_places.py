"""Places of the host tier for records that are on their way: a slot and a block for each.

A reservation is made on the path of a request and filled behind it, so it is unpacked only when
the first record comes. Not thread-safe: its owner holds a lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvelastic.errors import IntegrityError
from kvelastic.tiers.base import KEY_BYTES, Reservation


class Place(NamedTuple):
    """Where a record will lie, and whose reservation that is of."""

    slot: int
    block: int
    ticket: int


class HostPlaces:
    """Reserved places by ticket and by key."""

    def __init__(self) -> None:
        self._packed: dict[int, tuple[bytes, Sequence[int], list[int]]] = {}
        self._unpacked: dict[int, list[bytes]] = {}
        self._place_of: dict[bytes, Place] = {}
        self._last_ticket = 0
        self.blocks = 0
        """How many places are reserved and not filled."""

    def add(self, keys: bytes, slots: Sequence[int], blocks: list[int]) -> int:
        """Keys with slots (those below 0 are not of it) and one block for each; its ticket."""
        self._last_ticket += 1
        self._packed[self._last_ticket] = (keys, slots, blocks)
        self.blocks += len(blocks)
        return self._last_ticket

    def _unpack(self) -> None:
        while self._packed:
            ticket, (keys, slots, blocks) = self._packed.popitem()
            names = self._unpacked[ticket] = []
            each = iter(blocks)
            for at, slot in enumerate(slots):
                if slot >= 0:
                    key = keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]
                    self._place_of[key] = Place(slot, next(each), ticket)
                    names.append(key)

    def count(self, keys: Sequence[bytes]) -> int:
        """How many of these have places."""
        if not self.blocks:
            return 0
        self._unpack()
        return sum(key in self._place_of for key in keys)

    def take(self, keys: Sequence[bytes]) -> dict[int, Place]:
        """The places of these keys, by their positions; they are the caller's from now on."""
        if not self.blocks:
            return {}
        self._unpack()
        taken: dict[int, Place] = {}
        for at, key in enumerate(keys):
            place = self._place_of.pop(key, None)
            if place is not None:
                taken[at] = place
        self.blocks -= len(taken)
        return taken

    def give_up(self, ticket: int) -> tuple[bytes, list[int]]:
        """What of a reservation was not filled: keys side by side, and their blocks. Repeatable."""
        packed = self._packed.pop(ticket, None)
        if packed is not None:
            keys, slots, blocks = packed
            names = [
                keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]
                for at, slot in enumerate(slots)
                if slot >= 0
            ]
        else:
            # A key that was filled and went may be in another reservation by now.
            names = [
                key
                for key in self._unpacked.pop(ticket, ())
                if key in self._place_of and self._place_of[key].ticket == ticket
            ]
            blocks = [self._place_of.pop(key).block for key in names]
        self.blocks -= len(blocks)
        return b"".join(names), blocks

    def check_integrity(self) -> None:
        """Count again; raises `IntegrityError` naming what disagrees."""
        packed = sum(len(blocks) for _, _, blocks in self._packed.values())
        if packed + len(self._place_of) != self.blocks:
            raise IntegrityError(
                f"{packed + len(self._place_of)} places are reserved, {self.blocks} are counted"
            )


class HostReservation(Reservation):
    """Places that `release` gives up; `give_up` is told the ticket, once."""

    def __init__(self, slots: Sequence[int], ticket: int, give_up: Callable[[int], None]) -> None:
        self.slots = slots
        self.is_new = [slot >= 0 for slot in slots]
        self._ticket: int | None = ticket
        self._give_up = give_up

    def release(self) -> None:
        """As `Reservation.release`."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self._give_up(ticket)
