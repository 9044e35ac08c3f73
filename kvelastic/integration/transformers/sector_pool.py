"""transformers' pool of sectors, over kvelastic's native pool of blocks.

transformers hands out its cache in *sectors*. Each kind of attention (full, sliding, MLA) has an
allocator, which takes whole sectors and divides them into its own blocks. Here each sector is one
block of the native pool, so sector ids are not consecutive, and a sector has memory only while in
use. transformers also has two trash sectors, for the rows that padding reads and writes, and uses
one row of each. Here sector 0, the native pool's null block, has both rows::

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
    from kvelastic.pool.scheduling.blocks import SchedulerBlocks

TRASH_SECTOR: Final = 0


class SectorPool(CachePool):  # type: ignore[misc]  # transformers is untyped here
    """Replaces `CachePool` in a cache, with the same methods and semantics."""

    def __init__(self, num_sectors: int, num_allocators: int, memory: SchedulerBlocks) -> None:
        self.memory = memory
        self._is_made = False
        self.warms_up = False
        """While True, requests get the trash sector for all of their blocks."""
        super().__init__(num_sectors, num_allocators)

    def reset(self) -> None:
        """Release every sector; all allocated ids become invalid."""
        if self._is_made:
            self.memory.clear()
        self._is_made = True
        self._free_blocks = [RegularTrees(blocks) for blocks in self.blocks_per_sector]

    @property
    def num_free_sectors(self) -> int:
        """Sectors available now, including by mapping pages and by evicting cached blocks.

        While requests are preempted no page can be mapped, so sectors without memory do not count.
        """
        return self.memory.at_hand if self.memory.is_at_work else self.memory.reachable

    def allocate_sector(self, index: int) -> None:
        """Give a sector to the allocator `index`.

        Raises `PoolExhaustedError` if none is available.
        """
        ids = self.memory.take(1)
        if ids is None:
            raise PoolExhaustedError(
                "no sector of the KV cache can be had: send fewer requests at once, or raise the"
                " limit (kvctl limit)"
            )
        self._free_blocks[index].add_tree(ids[0])

    def free_blocks(self, index: int, block_ids: list[int]) -> None:
        """Release blocks of the allocator `index`, and the sectors that become empty."""
        first = (TRASH_SECTOR + 1) * self.blocks_per_sector[index]
        super().free_blocks(index, [block for block in block_ids if block >= first])
        self.try_to_free_sectors()

    def try_to_free_sectors(self) -> None:
        """Release sectors without a used block to the native pool."""
        emptied = [root for trees in self._free_blocks for root in trees.delete_full_trees()]
        if emptied:
            self.memory.give_back(emptied)
            self.memory.follow()
