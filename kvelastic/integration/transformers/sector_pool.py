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

from typing import TYPE_CHECKING, Final

from transformers.generation.continuous_batching.cache_allocators.cache_pool import (
    CachePool,
    RegularTrees,
)

from kvelastic.errors import PoolExhaustedError

if TYPE_CHECKING:
    from kvelastic.scheduling.blocks import SchedulerBlocks

TRASH_SECTOR: Final = 0


class SectorPool(CachePool):  # type: ignore[misc]  # transformers is untyped here
    """Takes the place of `CachePool` in a cache; the same calls, the same meanings."""

    def __init__(self, num_sectors: int, num_allocators: int, memory: SchedulerBlocks) -> None:
        self.memory = memory
        self._is_made = False
        self.warms_up = False
        """While set, requests get the trash sector for all of their blocks."""
        super().__init__(num_sectors, num_allocators)

    def reset(self) -> None:
        """Take every sector back; ids handed out before are void."""
        if self._is_made:
            self.memory.clear()
        self._is_made = True
        self._free_blocks = [RegularTrees(blocks) for blocks in self.blocks_per_sector]

    @property
    def num_free_sectors(self) -> int:
        """Sectors that could be had now, by mapping pages and by evicting cached blocks.

        While requests are preempted no page could be had: those that have none do not count.
        """
        return self.memory.at_hand if self.memory.is_at_work else self.memory.reachable

    def allocate_sector(self, index: int) -> None:
        """Give a sector to the allocator `index`. Raises `PoolExhaustedError` if none is there."""
        ids = self.memory.take(1)
        if ids is None:
            raise PoolExhaustedError(
                "no sector of the KV cache can be had: send fewer requests at once, or raise the"
                " limit (kvctl limit)"
            )
        self._free_blocks[index].add_tree(ids[0])

    def free_blocks(self, index: int, block_ids: list[int]) -> None:
        """Take blocks of the allocator `index` back, and with them the sectors that are empty."""
        first = (TRASH_SECTOR + 1) * self.blocks_per_sector[index]
        super().free_blocks(index, [block for block in block_ids if block >= first])
        self.try_to_free_sectors()

    def try_to_free_sectors(self) -> None:
        """Give sectors of which no block is in use back to the native pool."""
        emptied = [root for trees in self._free_blocks for root in trees.delete_full_trees()]
        if emptied:
            self.memory.give_back(emptied)
            self.memory.follow()
