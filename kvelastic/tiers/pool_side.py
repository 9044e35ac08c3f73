"""The interfaces of a pool and its staging memory that tiers need. `_vmm` implements them.

They keep tiers independent of the rest of the pool, and let tests substitute fakes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class StagingMemory(Protocol):
    """Aligned slots of one record each, such as `_vmm.Staging`."""

    @property
    def slots(self) -> int:
        """Number of slots."""

    @property
    def record_bytes(self) -> int:
        """Size of one slot."""

    def view(self, slot: int) -> memoryview:
        """Return a writable view of a slot."""


class Copies(Protocol):
    """Copies between blocks and staging slots, one slot per block.

    The copies block and release the GIL. They raise `DriverError` if the device fails. `staging`
    must have the type that the implementation expects.
    """

    def copy_out(self, ids: Sequence[int], staging: Any, slots: Sequence[int]) -> None:
        """Copy blocks to slots."""

    def copy_in(self, staging: Any, slots: Sequence[int], ids: Sequence[int]) -> None:
        """Copy slots to blocks, which must be in use by the caller."""


class Demotion(Protocol):
    """A request of a shrinking pool to clean blocks."""

    @property
    def reason(self) -> str:
        """Why the pool shrinks: reclaim, limit or sleep."""

    @property
    def blocks(self) -> int:
        """Number of blocks to clean."""

    @property
    def seconds_left(self) -> float:
        """Seconds until the pool stops waiting."""


class WritebackBatch(Protocol):
    """Dirty cached blocks under writeback."""

    @property
    def ids(self) -> list[int]:
        """The blocks, in eviction order."""

    @property
    def keys(self) -> bytes:
        """The keys of the blocks, concatenated."""

    @property
    def ticket(self) -> int:
        """Identifies the writeback in `still_unchanged` and `end_writeback`."""


class LeavingBlocks(Protocol):
    """The demotion interface of the pool. All calls are short, except `next_demotion`."""

    def next_demotion(self, timeout_s: float) -> Demotion | None:
        """Block until a shrinking pool requests clean blocks. None after `timeout_s`."""

    def stop_demotions(self) -> None:
        """End demotion: a waiting `next_demotion` returns, and shrinking no longer waits."""

    def begin_writeback(self, most: int) -> WritebackBatch:
        """Start the writeback of at most `most` dirty cached blocks. Skips pinned blocks."""

    def still_unchanged(self, ticket: int) -> list[bool]:
        """For each block of a writeback, whether it was not used, evicted or renamed since."""

    def end_writeback(self, ticket: int, copied: Sequence[bool]) -> int:
        """End a writeback, and mark copied blocks clean if they are unchanged.

        Returns how many blocks were marked clean.
        """

    def stats(self) -> dict[str, int]:
        """Return the pool's counters."""

    @property
    def max_cached_blocks(self) -> int:
        """Maximum number of cached blocks; -1: no limit."""

    @property
    def oldest_copyable_s(self) -> float:
        """Age in seconds of the oldest cached block that a tier can copy; 0 without one."""
