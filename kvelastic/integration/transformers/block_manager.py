"""transformers 5.17's block manager, over kvelastic's native pool.

Before 5.18 a block is a number of tokens in each tensor of a group of layers, with separate tensors
for K and V. To the native pool it is a block in as many buffers, with sparse ids. transformers
keeps the ids without a request in two lists. Here the native pool keeps both::

    transformers    meaning                           native pool
    in use          a request refers to it            used
    initialized     no request does; has a hash       cached
    uninitialized   no request, no hash               free, perhaps without memory

Block 0 is the native pool's null block, mapped whenever any other is. It replaces the two blocks of
padding that transformers has at the end of its tensors, of which three rows are used::

    block 0, in each tensor:  [ row 0      | row 1        |  ...  | last row    ]
                                read trash   sentinel               write trash
                                (zeros)      (never read)           (never read)

Imports transformers: only `in_block_cache` may import this module.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from transformers.generation.continuous_batching.cache_manager import Block, BlockManager

from kvelastic.errors import IntegrityError

if TYPE_CHECKING:
    from kvelastic.pool.scheduling.blocks import Changes, SchedulerBlocks

TRASH_BLOCK: Final = 0


class ElasticBlockManager(BlockManager):  # type: ignore[misc]  # transformers is untyped here
    """Replaces `BlockManager` in a cache, with the same methods and semantics.

    `_init_block_ids` has the cached blocks. `_uninit_block_ids` stays empty: only the native pool
    knows the free blocks.
    """

    def __init__(
        self, num_blocks: int, block_size: int, tp_on: bool, memory: SchedulerBlocks
    ) -> None:
        super().__init__(0, block_size, tp_on)
        self.num_blocks = num_blocks
        self.warms_up = False
        """While True, requests get the trash block for all of their blocks."""
        self.children: dict[str, int] = {}
        """Number of children of each request that is forked next."""
        self.memory = memory
        memory.on_changes = self._follow

    # --- availability ---------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        """Blocks available now, including by mapping pages and by evicting cached blocks.

        While requests are preempted no page can be mapped, so blocks without memory do not count.
        """
        return self.memory.at_hand if self.memory.is_at_work else self.memory.reachable

    # --- called by transformers -----------------------------------------------------------------

    def has_enough_free_blocks(self, n_blocks: int) -> bool:
        """Map memory for `n_blocks` blocks; return True if they can be taken now."""
        return self.memory.prepare(n_blocks) >= n_blocks

    def get_free_blocks(
        self, n_blocks: int, last_block_id: int | None, shareable: bool, group_id: int
    ) -> list[int] | None:
        """Take blocks, evicting cached ones if needed; return None if there are too few."""
        if self.warms_up:
            return [TRASH_BLOCK] * n_blocks
        if n_blocks <= 0:
            return []
        if not self.has_enough_free_blocks(n_blocks):
            return None
        ids = self.memory.take(n_blocks)
        if ids is None:
            return None
        if shareable:
            for block_id in ids:
                self._id_to_block[block_id] = Block(block_id, last_block_id, group_id)
                last_block_id = block_id
        return ids

    def increase_ref_count(self, block_id: int) -> None:
        """Add a reference to a block; a cached block becomes used."""
        if block_id in self._init_block_ids:
            self.memory.touch([block_id])  # first, because it may raise and then changes nothing
        super().increase_ref_count(block_id)

    def decrease_ref_count(self, block_id: int) -> None:
        """Remove a reference to a block."""
        self.free_blocks([block_id], shareable=True)

    def free_blocks(self, blocks: list[int], shareable: bool) -> None:
        """Release a request's blocks from the tail. Blocks cached first are evicted first, and a
        prefix is useless without its head."""
        if not shareable:
            self.memory.give_back([block_id for block_id in blocks if block_id != TRASH_BLOCK])
            return
        free: list[int] = []
        cached: list[int] = []
        for block_id in reversed(blocks):
            if block_id == TRASH_BLOCK:
                continue
            block = self._id_to_block[block_id]
            block.ref_count -= 1
            if block.ref_count > 0:
                continue
            if block.is_complete:
                cached.append(block_id)
            else:
                del self._id_to_block[block_id]
                free.append(block_id)
        self._init_block_ids.update(dict.fromkeys(cached))
        self.memory.give_back(free, cached)
        self.memory.follow()  # there may be too many cached blocks now

    def uninitialize_unshared_block(self, block_id: int) -> None:
        """Release a block whose contents another block has too."""
        super().uninitialize_unshared_block(block_id)
        self._uninit_block_ids.clear()
        self.memory.give_back([block_id])

    # --- forks ----------------------------------------------------------------------------------

    def forks_that_fit(self, request_id: str, allocators: Iterable[Any]) -> int | None:
        """Return how many children of a request fit now. Call it in a session of the native pool.

        Returns None if any number fits, because children share all blocks.
        """
        blocks = 0
        for allocator in allocators:
            table = allocator.block_table[request_id]
            blocks += len(table)
            if allocator.uses_block_sharing:
                for block_id in table:
                    if not self._id_to_block[block_id].is_complete:
                        break
                    blocks -= 1
        if blocks == 0:
            return None
        return self.memory.prepare(blocks * self.children.get(request_id, 1)) // blocks

    # --- changes by the native pool -------------------------------------------------------------

    def _follow(self, changes: Changes) -> None:
        """Remove evicted blocks, and renumber moved ones."""
        for block_id, moved_to in changes:
            if block_id not in self._init_block_ids:
                continue
            del self._init_block_ids[block_id]
            block = self._id_to_block.pop(block_id)
            if moved_to < 0:
                del self._hash_to_id[block.hash]
                continue
            block.id = moved_to
            self._init_block_ids[moved_to] = None
            self._id_to_block[moved_to] = block
            self._hash_to_id[block.hash] = moved_to

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if hashes, blocks and the native pool's blocks disagree."""
        self.memory.check_integrity()
        if self.memory.pool.has_evicted:
            return  # reported at the next session
        hashed = {id_: block.hash for id_, block in self._id_to_block.items() if block.is_complete}
        if {id_: hash_ for hash_, id_ in self._hash_to_id.items()} != hashed:
            raise IntegrityError("the hashes of blocks and the blocks of hashes differ")
        unknown = self._init_block_ids.keys() - hashed.keys()
        if unknown:
            raise IntegrityError(f"cached blocks without a hash: {sorted(unknown)}")
        cached = self.memory.pool.stats()["blocks_cached"]
        if cached != len(self._init_block_ids):
            raise IntegrityError(
                f"{len(self._init_block_ids)} blocks are cached, in the native pool {cached}"
            )
