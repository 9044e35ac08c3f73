"""Memory that peers may access: the registered ranges, and the holds that keep them in place.

A peer names addresses, and this node looks them up here. A piece is refused unless it lies
completely inside one registered range.

    registered = register_pool(node, pool)        # an ElasticPool over memory of this process

Blocks of a pool are pinned during a copy, and their pages' generations are checked after it.
"""

from __future__ import annotations

import bisect
import contextlib
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from kvelastic import _vmm
from kvelastic.errors import InvalidArgumentError, NotRegisteredError, UnsupportedError
from kvelastic.pool.pool import ElasticPool
from kvelastic.transfer.memory_pieces import PackedPieces, Piece, packed_of

if TYPE_CHECKING:
    from kvelastic.transfer.node import Node


class Hold(Protocol):
    """Keeps memory in place for one copy."""

    def is_whole(self) -> bool:
        """Return whether the memory belonged to the same owner since the hold began."""

    def release(self) -> None:
        """Release the memory. Called once, from any thread."""


Holder = Callable[[Sequence[Piece]], Hold]
"""Starts a hold of pieces of the range, or raises to refuse. Must not block for long."""


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

    def find(self, pieces: Sequence[Piece]) -> dict[Registered, PackedPieces]:
        """Group pieces by range. Raises `NotRegisteredError` for a piece outside every range."""
        packed = packed_of(pieces)
        with self._lock:
            found = _vmm.pieces_by_range(
                packed.packed, self._starts.tobytes(), self._ends.tobytes()
            )
            ranges = [(self._ranges[at], some) for at, some in found]
        return {
            one: packed if some is packed.packed else PackedPieces(some) for one, some in ranges
        }

    def check_still(self, found: Iterable[Registered]) -> None:
        """Raise `NotRegisteredError` if a range that `find` returned has been removed.

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

    def hold(pieces: Sequence[Piece]) -> Hold:
        return _vmm.HeldBlocks.hold(memory, blocks, packed_of(pieces).packed)

    return node.register(memory.address, memory.range_bytes, hold=hold)
