"""What tiers need of a pool and of its staging memory; the native ones fit.

Stated here so that nothing of tiers depends on more, and so that tests can put their own in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class StagingMemory(Protocol):
    """Aligned slots, each of one record. `_vmm.Staging` is one."""

    @property
    def slots(self) -> int:
        """How many there are."""

    @property
    def record_bytes(self) -> int:
        """Of one slot."""

    def view(self, slot: int) -> memoryview:
        """The bytes of a slot, writable."""


class Copies(Protocol):
    """Copies between blocks and staging slots, one slot a block. They block, and raise
    `DriverError` where the device fails; the GIL is released meanwhile. `staging` is of the kind
    that these copies know.
    """

    def copy_out(self, ids: Sequence[int], staging: Any, slots: Sequence[int]) -> None:
        """Blocks to slots."""

    def copy_in(self, staging: Any, slots: Sequence[int], ids: Sequence[int]) -> None:
        """Slots to blocks, which the caller has in use."""


class Demotion(Protocol):
    """What shrinking waits for."""

    @property
    def reason(self) -> str:
        """reclaim, limit or sleep."""

    @property
    def blocks(self) -> int:
        """How many it wants cleaned."""

    @property
    def seconds_left(self) -> float:
        """After that it goes on without."""


class Leaving(Protocol):
    """Dirty cached blocks whose copies are being made."""

    @property
    def ids(self) -> list[int]:
        """The blocks, those that would be evicted first in front."""

    @property
    def keys(self) -> bytes:
        """Theirs, side by side."""

    @property
    def ticket(self) -> int:
        """For `end_leaving`."""


class LeavingBlocks(Protocol):
    """The pool's side of demotion. Calls are short but for `next_demotion`."""

    def next_demotion(self, timeout_s: float) -> Demotion | None:
        """Waits until shrinking wants blocks cleaned; None after `timeout_s`."""

    def stop_demotions(self) -> None:
        """Nobody calls `next_demotion` any more: who waits there returns, and shrinking goes on."""

    def begin_leaving(self, most: int) -> Leaving:
        """Take dirty cached blocks in hand, `most` at most; none pinned."""

    def still_leaving(self, ticket: int) -> list[bool]:
        """For each block of it, whether it has not been taken, evicted or renamed since."""

    def end_leaving(self, ticket: int, copied: Sequence[bool]) -> int:
        """Those copied are clean, if nothing has happened to them; answers how many are."""

    def stats(self) -> dict[str, int]:
        """The pool's counts."""

    @property
    def max_cached_blocks(self) -> int:
        """How many blocks the pool keeps cached; -1: no bound."""

    @property
    def oldest_copyable_s(self) -> float:
        """For how long the oldest block that a tier can copy has been cached; 0 without one."""
