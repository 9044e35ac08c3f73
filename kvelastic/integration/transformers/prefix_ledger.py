"""transformers' record of cached blocks, over a pool that evicts and moves them by itself.

transformers keeps blocks that no request refers to for their contents and finds them by a hash of
their tokens. The native pool has to know which these are: it evicts them when blocks are wanted or
the limit is lowered, and this ledger follows.

Imports transformers: only `in_cache` may import this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers.generation.continuous_batching.cache_allocators.cache_allocator import BlockLedger

from kvelastic.errors import IntegrityError

if TYPE_CHECKING:
    from kvelastic.scheduling.blocks import Changes, SchedulerBlocks


class PrefixLedger(BlockLedger):  # type: ignore[misc]  # transformers is untyped here
    """Takes the place of `BlockLedger`, for an allocator whose blocks are the pool's sectors."""

    def __init__(self, memory: SchedulerBlocks) -> None:
        super().__init__()
        self._memory = memory
        memory.on_changes = self._follow

    def acquire(self, block_id: int) -> None:
        """Refer to a block once more; a cached one is in use from now on."""
        if block_id in self.cached_blocks:
            self._memory.touch([block_id])  # raises with nothing changed: so it comes first
        super().acquire(block_id)

    def release(self, block_id: int, no_cache: bool = False) -> bool:
        """Refer to a block once less; True: its user gives it back to the pool."""
        is_free: bool = super().release(block_id, no_cache)
        if not is_free and block_id in self.cached_blocks:
            self._memory.give_back([], [block_id])
            self._memory.follow()  # more may be cached than is allowed
        return is_free

    def evict_cached_blocks(self) -> list[int]:
        """Nothing: an alloc takes cached blocks by itself, as many as it needs and no more."""
        return []

    def _follow(self, changes: Changes) -> None:
        """Forget what was evicted, and rename what was moved."""
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
        """Forget everything; cached blocks are free."""
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
