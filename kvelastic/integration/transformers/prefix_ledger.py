"""transformers' record of cached blocks, over a pool that evicts and moves them on its own.

transformers keeps the contents of unreferenced blocks and finds them by a hash of their tokens. The
native pool must know these cached blocks. It evicts them when blocks are needed or the limit is
lowered, and this ledger is updated.

Imports transformers: only `in_cache` may import this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers.generation.continuous_batching.cache_allocators.cache_allocator import BlockLedger

from kvelastic.errors import IntegrityError

if TYPE_CHECKING:
    from kvelastic.pool.scheduling.blocks import Changes, SchedulerBlocks


class PrefixLedger(BlockLedger):  # type: ignore[misc]  # transformers is untyped here
    """Replaces `BlockLedger` for an allocator whose blocks are the pool's sectors."""

    def __init__(self, memory: SchedulerBlocks) -> None:
        super().__init__()
        self._memory = memory
        memory.on_changes = self._follow

    def acquire(self, block_id: int) -> None:
        """Add a reference to a block; a cached block becomes used."""
        if block_id in self.cached_blocks:
            self._memory.touch([block_id])  # first, because it may raise and then changes nothing
        super().acquire(block_id)

    def release(self, block_id: int, no_cache: bool = False) -> bool:
        """Remove a reference to a block; return True if the caller must release it to the pool."""
        is_free: bool = super().release(block_id, no_cache)
        if not is_free and block_id in self.cached_blocks:
            self._memory.give_back([], [block_id])
            self._memory.follow()  # there may be too many cached blocks now
        return is_free

    def evict_cached_blocks(self) -> list[int]:
        """Return an empty list: an allocation evicts the cached blocks that it needs."""
        return []

    def _follow(self, changes: Changes) -> None:
        """Remove evicted blocks, and renumber moved ones."""
        for block_id, moved_to in changes:
            if block_id not in self.cached_blocks:
                continue
            del self.cached_blocks[block_id]
            block_hash = self.block_to_hash.pop(block_id)
            if moved_to < 0:
                del self.hash_to_block[block_hash]
                continue
            self.cached_blocks[moved_to] = None
            self.block_to_hash[moved_to] = block_hash
            self.hash_to_block[block_hash] = moved_to

    def reset(self) -> None:
        """Remove all entries; cached blocks become free."""
        with self._memory.session():
            self._memory.drop(list(self.cached_blocks))
        super().reset()

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if the hashes of both directions or the pool disagree."""
        backwards = {block: found for found, block in self.hash_to_block.items()}
        if backwards != self.block_to_hash:
            raise IntegrityError("the hashes of blocks and the blocks of hashes differ")
        unknown = self.cached_blocks.keys() - self.block_to_hash.keys()
        if unknown:
            raise IntegrityError(f"cached blocks without a hash: {sorted(unknown)}")
        pool = self._memory.pool
        cached = pool.stats()["blocks_cached"]
        if not pool.has_evicted and cached != len(self.cached_blocks):
            raise IntegrityError(f"{len(self.cached_blocks)} blocks are cached, the pool: {cached}")
