"""Leases: memory held for copies by peers, until the peer has finished or the lease expires.

    begin --> in force -- settle --> "whole" or "lost"        the reader is done
                  |
                  '------ expire, end_of, end_in --> gone     a later settle returns "lost"

A copy under a lease that has ended is always lost, because its memory may be in use for another
purpose.
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
from kvelastic.transfer.memory_pieces import PackedPieces
from kvelastic.transfer.ranges import Hold, Ranges, Registered

_log = logging.getLogger("kvelastic.transfer")
MOST_LEASES: Final = 4096
ALWAYS_A_PEER: Final = 8
"""Leases that every peer may have, even if other peers use up `MOST_LEASES`."""


class Lease:
    """A lease, in force until `deadline_s` (monotonic clock) at the latest."""

    def __init__(self, number: int, owner: object, deadline_s: float) -> None:
        self.number: Final = number
        self.owner: Final = owner
        """Connection of the peer that holds the lease."""
        self.deadline_s: Final = deadline_s
        self.holds: dict[Registered, Hold] = {}
        self.sent: Future[None] | None = None
        """Completes when sending has finished or failed. None: the peer has not requested the
        bytes."""
        self.claimed: Hold | None = None
        self.pieces: bytes = b""
        self.read_bytes = 0
        """Bytes that the owner reads under the lease; 0 if this side counts them."""
        self.checksum: int | None = None
        """Checksum of the bytes sent under the lease."""

    def all_holds(self) -> list[Hold]:
        """Return the holds of the ranges and of the claim."""
        claimed = [] if self.claimed is None else [self.claimed]
        return [*self.holds.values(), *claimed]


class Leases:
    """The leases of a node. Thread-safe; holds are taken and released outside the lock."""

    def __init__(self, ranges: Ranges) -> None:
        self._ranges = ranges
        self._lock = threading.Lock()
        self._leases: dict[int, Lease] = {}
        self._by_owner: Counter[object] = Counter()
        self._numbers = itertools.count(1)
        self.expired = 0
        """Number of expired leases."""
        self.lost = 0
        """Number of copies reported as lost."""

    def begin(
        self,
        owner: object,
        pieces: PackedPieces,
        lease_s: float,
        claim: Callable[[], Hold | None] = lambda: None,
    ) -> Lease:
        """Hold the pieces, then the hold that `claim` returns.

        `claim` is called while the pieces are held, so its finding stays valid until the lease
        ends. Raises `NotRegisteredError`, `TransferBusyError`, and the errors of `claim` and of the
        holds; then nothing is held.
        """
        lease = Lease(next(self._numbers), owner, time.monotonic() + lease_s)
        lease.pieces = pieces.packed
        try:
            for registered, some in self._ranges.find(pieces).items():
                lease.holds[registered] = registered.hold(some)
            lease.claimed = claim()
            self._put(lease)
            # If a range was removed in the meantime, `end_in` has not seen this lease. Now `end_in`
            # can find it, so check the ranges again.
            self._ranges.check_still(lease.holds)
        except BaseException:
            with self._lock:
                self._remove(lease)
            _release(lease)
            raise
        return lease

    def lend(self, owner: object, packed: bytes, deadline_s: float) -> Lease:
        """Create a lease of memory that the caller keeps valid until `end`.

        Raises `TransferBusyError`.
        """
        lease = Lease(next(self._numbers), owner, deadline_s)
        lease.pieces = packed
        self._put(lease)
        return lease

    def end(self, lease: Lease) -> None:
        """End the lease if it is still in force."""
        self._take(lambda other: other is lease)

    def _put(self, lease: Lease) -> None:
        with self._lock:
            if len(self._leases) >= MOST_LEASES and self._by_owner[lease.owner] >= ALWAYS_A_PEER:
                raise TransferBusyError(f"{len(self._leases)} copies are under way; try again")
            self._leases[lease.number] = lease
            self._by_owner[lease.owner] += 1

    def _remove(self, lease: Lease) -> bool:
        """Remove a lease from the table, under the lock. False if it has already ended."""
        if self._leases.pop(lease.number, None) is None:
            return False
        self._by_owner[lease.owner] -= 1
        if not self._by_owner[lease.owner]:
            del self._by_owner[lease.owner]
        return True

    def find(self, number: int, owner: object) -> Lease | None:
        """Return the lease if it is in force and belongs to this peer, else None."""
        with self._lock:
            lease = self._leases.get(number)
        return lease if lease is not None and lease.owner is owner else None

    def settle(self, number: int, owner: object) -> bool:
        """End a lease after the copy. False if the copied bytes may not be the owner's."""
        with self._lock:
            lease = self._leases.get(number)
            if lease is not None and lease.owner is owner and lease.deadline_s > time.monotonic():
                self._remove(lease)
            else:
                lease = None
        if lease is None:
            self.lost += 1
            return False
        # The memory is still held: a lease is released only by the caller that removed it from the
        # table, which is this one.
        is_whole = False
        try:
            is_whole = all(hold.is_whole() for hold in lease.all_holds())
        finally:
            _release(lease)
            self.lost += not is_whole
        return is_whole

    def expire(self) -> float | None:
        """End expired leases; return the next deadline on the monotonic clock, or None."""
        now_s = time.monotonic()
        ended = self._take(lambda lease: lease.deadline_s <= now_s)
        self.expired += ended
        with self._lock:
            return min((lease.deadline_s for lease in self._leases.values()), default=None)

    def end_of(self, owner: object) -> int:
        """End the leases of a peer that is gone; return how many."""
        return self._take(lambda lease: lease.owner is owner)

    def end_in(self, registered: Registered) -> int:
        """End the leases in a range that is being removed; return how many."""
        return self._take(lambda lease: registered in lease.holds)

    def end_all(self) -> int:
        """End the leases of a node that closes; return how many."""
        return self._take(lambda lease: True)

    def by_owner(self) -> dict[object, int]:
        """Return the number of leases of each peer."""
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
        """Raise `IntegrityError` if the tables are inconsistent."""
        with self._lock:
            for number, lease in self._leases.items():
                if lease.number != number:
                    raise IntegrityError(f"lease {number} is not what the table says")
            if self._by_owner != Counter(lease.owner for lease in self._leases.values()):
                raise IntegrityError("leases are not counted as their peers have them")


def _release(lease: Lease) -> None:
    """Release each hold, even if one raises, so that other leases are not affected."""
    for hold in lease.all_holds():
        _release_one(hold)


def _release_one(hold: Hold) -> None:
    try:
        hold.release()
    except Exception:
        _log.exception("memory that a lease held was not released as it should be")
