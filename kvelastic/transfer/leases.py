"""Leases: what is held for copies by others, until they say that they are done, or their time ends.

    begin --> in force -- settle --> "whole" or "lost"        the reader is done
                  |
                  '------ expire, end_of, end_in --> gone     a later settle answers "lost"

A lease that has ended is lost, whatever happens after: its memory may be somebody else's by then.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from kvelastic.errors import IntegrityError, TransferBusyError
from kvelastic.transfer.pieces import PackedPieces
from kvelastic.transfer.ranges import Hold, Ranges, Registered

_log = logging.getLogger("kvelastic.transfer")
MOST_LEASES: Final = 4096
ALWAYS_A_PEER: Final = 8
"""As many each peer may have, also where others have all of the rest."""


class Lease:
    """One of them, in force until `deadline_s` at most."""

    def __init__(self, number: int, owner: object, deadline_s: float) -> None:
        self.number: Final = number
        self.owner: Final = owner
        """The connection of the peer that has it."""
        self.deadline_s: Final = deadline_s
        self.holds: dict[Registered, Hold] = {}
        self.sent: Future[None] | None = None
        """Done when its bytes are sent, or could not be; None: the peer has not asked for them."""
        self.claimed: Hold | None = None
        self.pieces: bytes = b""
        self.read_bytes = 0
        """That its owner reads under it; 0 where that is counted by this side."""
        self.checksum: int | None = None
        """Of what was sent under it."""

    def all_holds(self) -> list[Hold]:
        """Of ranges, and of the claim."""
        claimed = [] if self.claimed is None else [self.claimed]
        return [*self.holds.values(), *claimed]


class Leases:
    """All of a node. Any thread; holds are begun and released outside the lock."""

    def __init__(self, ranges: Ranges) -> None:
        self._ranges = ranges
        self._lock = threading.Lock()
        self._leases: dict[int, Lease] = {}
        self._by_owner: Counter[object] = Counter()
        self._numbers = itertools.count(1)
        self.expired = 0
        """How many have ended by their time."""
        self.lost = 0
        """How many copies were answered with "lost"."""

    def begin(
        self,
        owner: object,
        pieces: PackedPieces,
        lease_s: float,
        claim: Callable[[], Hold | None] = lambda: None,
    ) -> Lease:
        """Hold these pieces, and then what `claim` answers, which is asked when they are held.

        So what a claim finds to be right stays right until the lease ends.

        Raises `NotRegisteredError`, `TransferBusyError`, what a hold raises; nothing is held then.
        """
        lease = Lease(next(self._numbers), owner, time.monotonic() + lease_s)
        lease.pieces = pieces.packed
        try:
            for registered, some in self._ranges.find(pieces).items():
                lease.holds[registered] = registered.hold(some)
            lease.claimed = claim()
            self._put(lease)
            # A range that went meanwhile has not seen this lease: look once more, now that it is
            # where `end_in` finds it.
            self._ranges.check_still(lease.holds)
        except BaseException:
            with self._lock:
                self._remove(lease)
            _release(lease)
            raise
        return lease

    def lend(self, owner: object, packed: bytes, deadline_s: float) -> Lease:
        """A lease of what the caller itself keeps until `end`. Raises `TransferBusyError`."""
        lease = Lease(next(self._numbers), owner, deadline_s)
        lease.pieces = packed
        self._put(lease)
        return lease

    def end(self, lease: Lease) -> None:
        """End it, if it has not ended."""
        self._take(lambda other: other is lease)

    def _put(self, lease: Lease) -> None:
        with self._lock:
            if len(self._leases) >= MOST_LEASES and self._by_owner[lease.owner] >= ALWAYS_A_PEER:
                raise TransferBusyError(f"{len(self._leases)} copies are under way; try again")
            self._leases[lease.number] = lease
            self._by_owner[lease.owner] += 1

    def _remove(self, lease: Lease) -> bool:
        """False: it has ended before. The lock is held."""
        if self._leases.pop(lease.number, None) is None:
            return False
        self._by_owner[lease.owner] -= 1
        if not self._by_owner[lease.owner]:
            del self._by_owner[lease.owner]
        return True

    def find(self, number: int, owner: object) -> Lease | None:
        """The lease if it is in force and this peer's."""
        with self._lock:
            lease = self._leases.get(number)
        return lease if lease is not None and lease.owner is owner else None

    def settle(self, number: int, owner: object) -> bool:
        """The reader is done. False: what it has may be somebody else's bytes."""
        with self._lock:
            lease = self._leases.get(number)
            if lease is not None and lease.owner is owner and lease.deadline_s > time.monotonic():
                self._remove(lease)
            else:
                lease = None
        if lease is None:
            self.lost += 1
            return False
        # Still held: whoever ends a lease takes it out of the table first, and this call has.
        is_whole = False
        try:
            is_whole = all(hold.is_whole() for hold in lease.all_holds())
        finally:
            _release(lease)
            self.lost += not is_whole
        return is_whole

    def expire(self) -> float | None:
        """End those whose time is over; answers when the next one ends, on the monotonic clock."""
        now_s = time.monotonic()
        ended = self._take(lambda lease: lease.deadline_s <= now_s)
        self.expired += ended
        with self._lock:
            return min((lease.deadline_s for lease in self._leases.values()), default=None)

    def end_of(self, owner: object) -> int:
        """The peer has gone: nothing is held for it any more."""
        return self._take(lambda lease: lease.owner is owner)

    def end_in(self, registered: Registered) -> int:
        """The range goes."""
        return self._take(lambda lease: registered in lease.holds)

    def end_all(self) -> int:
        """The node closes."""
        return self._take(lambda lease: True)

    def by_owner(self) -> dict[object, int]:
        """How many each has now."""
        with self._lock:
            return Counter(self._by_owner)

    def __len__(self) -> int:
        return len(self._leases)

    def _take(self, which: Callable[[Lease], bool]) -> int:
        with self._lock:
            taken = [lease for lease in self._leases.values() if which(lease)]
            for lease in taken:
                self._remove(lease)
        for lease in taken:
            _release(lease)
        return len(taken)

    def check_integrity(self) -> None:
        """Raises `IntegrityError` for a lease in the wrong place."""
        with self._lock:
            for number, lease in self._leases.items():
                if lease.number != number:
                    raise IntegrityError(f"lease {number} is not what the table says")
            if self._by_owner != Counter(lease.owner for lease in self._leases.values()):
                raise IntegrityError("leases are not counted as their peers have them")


def _release(lease: Lease) -> None:
    """All of it, whatever one of them raises: other leases wait behind this one."""
    for hold in lease.all_holds():
        _release_one(hold)


def _release_one(hold: Hold) -> None:
    try:
        hold.release()
    except Exception:
        _log.exception("memory that a lease held was not released as it should be")
