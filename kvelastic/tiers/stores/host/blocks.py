"""Blocks of the host tier's pool: holders, and tracking of the pool's moves and evictions.

A record without readers is in a *cached* block. The pool moves or evicts such blocks on its own
when host memory is needed elsewhere. A *held* record (found by a lookup, or being read) is in a
*used* block, which the pool does not touch. The pool queues its changes (`take_changes`), and every
access to a block processes the queue first:

    take the queue -> touch the blocks -> take the queue -> are they still the blocks of the slots?

Between the first two steps a block can be evicted, and can even receive another record. The last
step detects that. After the touch the block does not change. So no pool session is needed, and a
lookup never waits while pages are unmapped.

Not thread-safe except for `take`: the owner holds its lock for all other calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvelastic import _vmm
from kvelastic.errors import BlockError, IntegrityError
from kvelastic.tiers.stores.host.slots import GONE, HostSlots

EVICTED = -1
"""Block number that `take_changes` reports for an evicted block: any number below 0."""


class HostBlocks:
    """Blocks of `pool` by slot. `forget` receives the keys of records that the pool evicted."""

    def __init__(self, pool: _vmm.Pool, forget: Callable[[bytes], None]) -> None:
        self._pool = pool
        self._forget = forget
        self.slots = HostSlots()
        self._holders: dict[int, int] = {}
        self._doomed: set[int] = set()
        """Held blocks whose records were erased. Freed when their last holder releases them."""

    def take(self, count: int) -> list[int]:
        """Allocate blocks for `count` new records; returns fewer if memory is short.

        Any thread may call; may map pages. The pool evicts its oldest records if necessary. Raises
        `DriverError` as the pool's `alloc` does.
        """
        while count > 0:
            ids = self._pool.alloc(count)
            if ids is not None:
                return ids
            count = min(count - 1, self._pool.available_mapped())  # do not wait again
        return []

    def fill(self, slot: int, block: int, key: bytes, owner_id: int, now_ns: int) -> None:
        """Set the record of a block from `take`. The block is held once; see `release`."""
        self.slots.fill(slot, block, key, owner_id, now_ns)
        self._holders[block] = 1

    def follow(self) -> None:
        """Apply what the pool has moved and evicted since the last call."""
        if not self._pool.has_evicted:
            return
        gone = bytearray()
        for old, new in self._pool.take_changes():
            if new > EVICTED:
                self.slots.move(old, new)
                continue
            slot = self.slots.slot_of(old)
            if slot is not None:
                gone += self.slots.key_of(slot)
                self.slots.empty(slot)
        if gone:
            self._forget(bytes(gone))

    def hold(self, slots: Sequence[int]) -> list[int]:
        """Keep these records in place until `release`; return their blocks.

        Returns GONE for records that the pool evicted; `forget` has received their keys.
        """
        while True:
            self.follow()
            blocks = [self.slots.block_of(slot) for slot in slots]
            cached = [
                block
                for block in dict.fromkeys(blocks)
                if block != GONE and block not in self._holders
            ]
            try:
                self._pool.touch(cached)
            except BlockError:  # one was evicted since `follow`; nothing was touched
                continue
            self.follow()
            if blocks == [self.slots.block_of(slot) for slot in slots]:
                break
            self._pool.cache(cached)  # they may hold other records by now
        for block in blocks:
            if block != GONE:
                self._holders[block] = self._holders.get(block, 0) + 1
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Undo `hold`. Blocks without holders may then be evicted, the last in `blocks` first."""
        idle, erased = [], []
        for block in reversed(blocks):
            if block == GONE:
                continue
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            del self._holders[block]
            if block in self._doomed:
                self._doomed.discard(block)
                erased.append(block)
            else:
                idle.append(block)
        if erased:
            self._pool.free(erased)
        if idle:
            self._pool.cache(idle)

    def drop(self, slots: Sequence[int]) -> None:
        """Drop erased or displaced records. Held blocks are freed by their last holder."""
        blocks = self.hold(slots)
        for slot, block in zip(slots, blocks, strict=True):
            if block != GONE:
                self.slots.empty(slot)
                self._doomed.add(block)
        self.release(blocks)

    def check_integrity(self, *, quiet: bool) -> None:
        """Recount; raises `IntegrityError` that names the disagreement.

        `quiet` means that no put is in progress, so every block of the pool belongs to a record.
        """
        self.follow()
        self.slots.check_integrity()
        for block, holders in self._holders.items():
            if holders < 1 or (block in self._doomed) == (self.slots.slot_of(block) is not None):
                raise IntegrityError(f"block {block} has {holders} holders and is of no record")
        if not self._doomed <= self._holders.keys():
            raise IntegrityError("an erased record keeps a block that nobody holds")
        have = self._pool.stats()
        ours = len(self.slots) + len(self._doomed)
        taken = have["blocks_used"] + have["blocks_cached"]
        # The pool may evict concurrently; evictions since `follow` are in the queue.
        if quiet and taken != ours and not self._pool.has_evicted:
            raise IntegrityError(f"{taken} blocks of the pool are taken, and {ours} hold records")
