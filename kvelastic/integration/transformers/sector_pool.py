"""transformers' pool of sectors, over kvelastic's native pool of blocks.

A *sector* is what one kind of attention gets of the cache at once; allocators divide it into
blocks, one or several. Sectors are the native pool's blocks: sparse ids, memory only where they are
in use. Sector 0 is the native pool's null block, mapped whenever any other is. It serves both of
transformers' trash sectors, of which one row each is used::

    sector 0, in the page of every layer:  [ row 0 | row 1    |  ...  | last row    ]
                                             read    sentinel           write trash
                                             trash (never read)         (never read)
                                             (zeros)

Imports transformers: only `in_cache` may import this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from transformers.generation.continuous_batching.cache_allocators.cache_pool import (
    CachePool,
    RegularTrees,
)

from kvelastic.errors import IntegrityError, PoolExhaustedError

if TYPE_CHECKING:
    from kvelastic import _vmm

TRASH_SECTOR: Final = 0


class SectorPool(CachePool):  # type: ignore[misc]  # transformers is untyped here
    """Takes the place of `CachePool` in a cache; the same calls, the same meanings.

    `follow` is called after everything by which the native pool may have evicted cached blocks.
    """

    def __init__(self, num_sectors: int, num_allocators: int, memory: _vmm.Pool) -> None:
        self._memory = memory
        self._is_made = False
        self._used = 0
        self._pins: list[int] | None = None
        self.follow: Callable[[], None] = lambda: None
        self.warms_up = False
        """While set, requests get the trash sector for all of their blocks."""
        super().__init__(num_sectors, num_allocators)

    def reset(self) -> None:
        """Take every sector back; ids handed out before are void."""
        if self._is_made:
            self._memory.clear()
            self.follow()
        self._is_made = True
        self._used = 0
        self._free_blocks = [RegularTrees(blocks) for blocks in self.blocks_per_sector]

    @property
    def num_free_sectors(self) -> int:
        """Sectors that could be had now, by mapping pages and by evicting cached blocks.

        While requests are preempted no page could be had: those that have none do not count.
        """
        if self._pins is not None:
            return self._memory.available_mapped() + self._memory.reusable
        return self._memory.available_size() + self._memory.reusable

    @property
    def used_sectors(self) -> int:
        """Sectors of which a request has a block; cached ones are not among them."""
        return self._used

    def keep_cached(self, sector: int) -> None:
        """No request has the sector any more, and its contents are worth keeping."""
        self._used -= 1
        self._memory.cache([sector])

    def use_again(self, sector: int) -> None:
        """A cached sector is in use from now on. Raises `BlockError` with nothing changed."""
        self._memory.touch([sector])
        self._used += 1

    def prepare(self, sectors: int) -> bool:
        """Have memory mapped for `sectors`; True: they can be taken, until the session ends.

        Waits for the driver, and for what others give as long as `KVELASTIC_RECLAIM_WAIT` says.
        Evicts nothing, so cached blocks that were just found stay.
        """
        wanted = sectors - self._memory.reusable
        return wanted <= 0 or self._memory.ensure(wanted) >= wanted

    def allocate_sector(self, index: int) -> None:
        """Give a sector to the allocator `index`. Raises `PoolExhaustedError` if none is there."""
        ids = self._memory.alloc(1, reuse=True)
        if ids is None:
            raise PoolExhaustedError(
                "no sector of the KV cache can be had: send fewer requests at once, or raise the"
                " limit (kvctl limit)"
            )
        # An id may have been evicted just now to be handed out again: its hash goes first.
        self.follow()
        self._used += 1
        self._free_blocks[index].add_tree(ids[0])

    def free_blocks(self, index: int, block_ids: list[int]) -> None:
        """Take blocks of the allocator `index` back, and with them the sectors that are empty."""
        first = (TRASH_SECTOR + 1) * self.blocks_per_sector[index]
        super().free_blocks(index, [block for block in block_ids if block >= first])
        self.try_to_free_sectors()

    def try_to_free_sectors(self) -> None:
        """Give sectors of which no block is in use back to the native pool."""
        emptied = [root for trees in self._free_blocks for root in trees.delete_full_trees()]
        if not emptied:
            return
        if self._pins is not None:
            self._pins.append(self._memory.pin(emptied, kind="ordered"))
        self._used -= len(emptied)
        self._memory.free(emptied)
        self.follow()

    @contextmanager
    def preempting(self) -> Iterator[None]:
        """Keep the memory of what is freed in the body until it ends, and count it as free.

        transformers frees the blocks of a request first and copies them to the host then. The copy
        is queued before whatever writes to these blocks next.
        """
        self._pins = []
        try:
            yield
        finally:
            tickets, self._pins = self._pins, None
            for ticket in tickets:
                self._memory.unpin(ticket)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if sectors and the native pool's blocks disagree."""
        self._memory.check_integrity()
        used = self._memory.stats()["blocks_used"]
        if used != self._used:
            raise IntegrityError(f"{self._used} sectors are in use, in the native pool {used}")
