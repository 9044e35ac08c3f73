"""The blocks of the host tier's pool: who holds them, and what the pool does with the others.

A record that nobody reads lies in a *cached* block, which the pool moves or evicts by itself when
the host's memory is needed elsewhere. A *held* record (leased, or being read) lies in a *used*
block, which nobody takes. What the pool has done waits in a queue (`take_changes`), and every look
at a block goes through it first:

    take the queue -> touch the blocks -> take the queue -> are they still the blocks of the slots?

A block can be evicted between the first two steps and can even hold another record by then; the
last step finds that out, and from the touch on nothing more happens to it. So no session of the
pool is needed, and a lookup never waits for the unmapping of pages.

Not thread-safe but for `take`: the owner holds its lock for all else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvelastic import _vmm
from kvelastic.errors import BlockError, IntegrityError
from kvelastic.tiers.host_slots import GONE, HostSlots

EVICTED = -1
"""Where `take_changes` says that a block has gone, any number below 0."""


class HostBlocks:
    """Blocks of `pool` by slot. `forget` is told the keys of records that the pool has evicted."""

    def __init__(self, pool: _vmm.Pool, forget: Callable[[bytes], None]) -> None:
        self._pool = pool
        self._forget = forget
        self.slots = HostSlots()
        self._holders: dict[int, int] = {}
        self._doomed: set[int] = set()
        """Held blocks whose records were erased: free when their last holder lets go."""

    def take(self, count: int) -> list[int]:
        """Blocks for `count` new records, fewer where memory lacks. Any thread; may map pages.

        The pool evicts its oldest records for it where it must. Raises `DriverError` as its alloc.
        """
        while count > 0:
            ids = self._pool.alloc(count)
            if ids is not None:
                return ids
            count = min(count - 1, self._pool.available_mapped())  # nobody is waited for again
        return []

    def fill(self, slot: int, block: int, key: bytes, world: int, now_s: float) -> None:
        """A block of `take` holds this record now; it is held once, see `release`."""
        self.slots.fill(slot, block, key, world, now_s)
        self._holders[block] = 1

    def follow(self) -> None:
        """Learn what the pool has moved and evicted since the last look."""
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
        """Keep these records where they are until `release`; answers their blocks.

        GONE for those that the pool has evicted; `forget` has been told of them.
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
            except BlockError:  # one of them has been evicted since the look; nothing is touched
                continue
            self.follow()
            if blocks == [self.slots.block_of(slot) for slot in slots]:
                break
            self._pool.cache(cached)  # what lies in them by now
        for block in blocks:
            if block != GONE:
                self._holders[block] = self._holders.get(block, 0) + 1
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """End of `hold`. What nobody holds any more may be evicted, the last named first."""
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
        """These records are erased or displaced; blocks that are held go with their holders."""
        blocks = self.hold(slots)
        for slot, block in zip(slots, blocks, strict=True):
            if block != GONE:
                self.slots.empty(slot)
                self._doomed.add(block)
        self.release(blocks)

    def check_integrity(self, *, quiet: bool) -> None:
        """Recount; raises `IntegrityError` naming what disagrees.

        `quiet`: no put is on its way, so that every block of the pool is a record's.
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
        # The pool evicts meanwhile: what it has evicted since the look is in the queue.
        if quiet and taken != ours and not self._pool.has_evicted:
            raise IntegrityError(f"{taken} blocks of the pool are taken, and {ours} hold records")
