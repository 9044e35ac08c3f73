"""Memory that peers may access: registered ranges, and the leases that hold it for copies.

    registered = register_pool(node, pool)        # an ElasticPool over memory of this process

A peer names addresses, and this node looks them up here. A piece is refused unless it lies
completely inside one registered range. Blocks of a pool are pinned during a copy, and their pages'
generations are checked after it.

    begin --> in force -- settle --> "whole" or "lost"        the reader is done
                  |
                  '------ expire, end_of, end_in --> gone     a later settle returns "lost"

A copy under a lease that has ended is always lost, because its memory may be in use for another
purpose.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import logging
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from kvelastic import _vmm
from kvelastic.errors import (
    IntegrityError,
    InvalidArgumentError,
    NotRegisteredError,
    TransferBusyError,
    UnsupportedError,
)
from kvelastic.pool.pool import ElasticPool

if TYPE_CHECKING:
    from kvelastic.transfer.node import Node

_log = logging.getLogger("kvelastic.transfer")
MOST_LEASES: Final = 4096
ALWAYS_A_PEER: Final = 8
"""Leases that every peer may have, even if other peers use up `MOST_LEASES`."""


class Hold(Protocol):
    """Keeps memory in place for one copy."""

    def is_whole(self) -> bool:
        """Return whether the memory belonged to the same owner since the hold began."""

    def release(self) -> None:
        """Release the memory. Called once, from any thread."""


Holder = Callable[[bytes], Hold]
"""Starts a hold of packed pieces of the range, or raises to refuse. Must not block for long."""


class _NoHold:
    """The hold of memory that stays in place while it is registered."""

    def is_whole(self) -> bool:
        return True

    def release(self) -> None:
        pass


class Registered:
    """A registered range. `Node.unregister` ends the registration."""

    def __init__(self, address: int, size_bytes: int, hold: Holder | None) -> None:
        self.address: Final = address
        self.size_bytes: Final = size_bytes
        self.hold: Final = hold or (lambda _: _NoHold())
        self._written = threading.Condition()
        self._writers = 0

    @contextlib.contextmanager
    def being_written(self) -> Iterator[None]:
        """Mark the range as being written by a copy while the block runs."""
        with self._written:
            self._writers += 1
        try:
            yield
        finally:
            with self._written:
                self._writers -= 1
                self._written.notify_all()

    def wait_until_unwritten(self) -> None:
        """Block until no copy writes into the range. No new copy may start during the call."""
        with self._written:
            self._written.wait_for(lambda: not self._writers)

    @property
    def end(self) -> int:
        """The first address after the range."""
        return self.address + self.size_bytes


class Ranges:
    """The registered ranges of a node, without overlaps. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starts = array("Q")
        self._ends = array("Q")
        self._ranges: list[Registered] = []

    def add(self, address: int, size_bytes: int, hold: Holder | None) -> Registered:
        """Add a range. Raises `InvalidArgumentError` if it is empty or overlaps another range."""
        if address <= 0 or size_bytes <= 0 or address + size_bytes > 1 << 63:
            raise InvalidArgumentError(f"{size_bytes} bytes at {address:#x} are no memory")
        new = Registered(address, size_bytes, hold)
        with self._lock:
            at = bisect.bisect_right(self._starts, address)
            if (at and self._ranges[at - 1].end > address) or (
                at < len(self._ranges) and self._ranges[at].address < new.end
            ):
                raise InvalidArgumentError(
                    f"{size_bytes} bytes at {address:#x} are registered already, in part at least"
                )
            self._starts.insert(at, address)
            self._ends.insert(at, new.end)
            self._ranges.insert(at, new)
        return new

    def remove(self, registered: Registered) -> bool:
        """Remove a range. Returns False if it is already removed."""
        with self._lock:
            at = bisect.bisect_left(self._starts, registered.address)
            if at == len(self._ranges) or self._ranges[at] is not registered:
                return False
            del self._starts[at]
            del self._ends[at]
            del self._ranges[at]
            return True

    def hold(self, pieces: bytes) -> dict[Registered, Hold]:
        """Hold packed pieces; return the hold in each range. `release` them.

        Raises `NotRegisteredError` for a piece outside every range, and the errors of the holds;
        then nothing is held.
        """
        with self._lock:
            found = _vmm.pieces_by_range(pieces, self._starts.tobytes(), self._ends.tobytes())
            ranges = [(self._ranges[at], some) for at, some in found]
        holds: dict[Registered, Hold] = {}
        try:
            for registered, some in ranges:
                holds[registered] = registered.hold(some)
        except BaseException:
            release(holds.values())
            raise
        return holds

    def check_still(self, found: Iterable[Registered]) -> None:
        """Raise `NotRegisteredError` if a range that `hold` returned has been removed.

        Its addresses may have been registered again for other data.
        """
        with self._lock:
            for registered in found:
                at = bisect.bisect_left(self._starts, registered.address)
                if at == len(self._ranges) or self._ranges[at] is not registered:
                    raise NotRegisteredError(
                        "the memory of a copy was unregistered before it began"
                    )

    @property
    def sizes(self) -> tuple[int, int]:
        """Number of ranges, and their total bytes."""
        with self._lock:
            return len(self._ranges), sum(one.size_bytes for one in self._ranges)

    def check_integrity(self) -> None:
        """Raise AssertionError if ranges overlap or are out of order."""
        with self._lock:
            assert list(self._starts) == [one.address for one in self._ranges]
            assert list(self._ends) == [one.end for one in self._ranges]
            for one, other in zip(self._ranges, self._ranges[1:], strict=False):
                assert one.end <= other.address


def release(holds: Iterable[Hold]) -> None:
    """Release each hold, even if one raises, so that other copies are not affected."""
    try:
        with contextlib.ExitStack() as releases:
            for hold in holds:
                releases.callback(hold.release)
    except Exception:
        _log.exception("memory that a copy held was not released as it should be")


@dataclass(eq=False)
class Lease:
    """A lease, in force until `deadline_s` (monotonic clock) at the latest."""

    number: int
    owner: object
    """Connection of the peer that holds the lease."""
    deadline_s: float
    pieces: bytes
    ranges: Collection[Registered] = ()
    holds: list[Hold] = field(default_factory=list)
    """Holds in the ranges, and that of the claim."""
    read_bytes: int = 0
    """Bytes that the owner reads under the lease; 0 if this side counts them."""
    sent: Future[None] | None = None
    """Completes when sending has finished or failed. None: the peer has not requested the bytes."""
    checksum: int | None = None
    """Checksum of the bytes sent under the lease."""


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
        pieces: bytes,
        lease_s: float,
        claim: Callable[[], Hold | None] = lambda: None,
    ) -> Lease:
        """Hold the packed pieces, then the hold that `claim` returns.

        `claim` is called while the pieces are held, so its finding stays valid until the lease
        ends. Raises `NotRegisteredError`, `TransferBusyError`, and the errors of `claim` and of the
        holds; then nothing is held.
        """
        deadline_s = time.monotonic() + lease_s
        held = self._ranges.hold(pieces)
        lease = Lease(next(self._numbers), owner, deadline_s, pieces, held, [*held.values()])
        try:
            claimed = claim()
            if claimed is not None:
                lease.holds.append(claimed)
            self._put(lease)
        except BaseException:
            release(lease.holds)
            raise
        # If a range was removed in the meantime, `end_in` has not seen this lease. Now `end_in` can
        # find it, so check the ranges again.
        try:
            self._ranges.check_still(held)
        except BaseException:
            self._take(lambda other: other is lease)
            raise
        return lease

    @contextlib.contextmanager
    def lent(self, owner: object, packed: bytes, deadline_s: float) -> Iterator[int]:
        """Yield the number of a lease of memory that the caller keeps valid in this context.

        Raises `TransferBusyError`.
        """
        lease = Lease(next(self._numbers), owner, deadline_s, packed)
        self._put(lease)
        try:
            yield lease.number
        finally:
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
            is_whole = all(hold.is_whole() for hold in lease.holds)
        finally:
            release(lease.holds)
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
        return self._take(lambda lease: registered in lease.ranges)

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
            release(lease.holds)
        return len(taken)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if the tables are inconsistent."""
        with self._lock:
            for number, lease in self._leases.items():
                if lease.number != number:
                    raise IntegrityError(f"lease {number} is not what the table says")
            if self._by_owner != Counter(lease.owner for lease in self._leases.values()):
                raise IntegrityError("leases are not counted as their peers have them")


# --- elastic pools as ranges ------------------------------------------------------------------


def register_pool(node: Node, pool: ElasticPool) -> Registered:
    """Allow peers to access the pool's blocks in use. The pool may map and unmap pages as usual.

    A copy of a block that is neither in use nor cached is refused (`UnknownBlockError`). Raises
    `UnsupportedError` for memory that other processes map, and for GPU memory.
    """
    if not isinstance(pool.memory, _vmm.Range) or not pool.is_on_host:
        raise UnsupportedError("peers reach pools in host memory of this process only")
    return register_blocks(node, pool.memory, pool.blocks)


def register_blocks(node: Node, memory: _vmm.Range, blocks: _vmm.Pool) -> Registered:
    """Register the blocks of a native pool over host memory; see `register_pool`."""

    def hold(pieces: bytes) -> Hold:
        return _vmm.HeldBlocks.hold(memory, blocks, pieces)

    return node.register(memory.address, memory.range_bytes, hold=hold)
