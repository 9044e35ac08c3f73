"""vLLM's block pool on top of kvelastic's: sparse ids, objects only for used and cached blocks.

vLLM's own pool has a `KVCacheBlock` for every id from 0 and keeps free ones in a linked list. Here
the native pool hands out the ids (`scheduling.blocks`). A block has an object only while it is in
one of the first two of three states:

    used     a request refers to it (ref_cnt > 0)
    cached   no request refers to it, but it has a hash and its contents may be reused
    free     neither; the id may lie in a page that is not mapped

The native pool also evicts and moves blocks on its own. This class applies these changes before
vLLM looks blocks up.

Imports vLLM, so it is imported only when vLLM's scheduler creates a block pool.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import AllBlocksCleared
from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from kvelastic.errors import IntegrityError, PoolExhaustedError, UnsupportedEngineError
from kvelastic.pool.scheduling.blocks import Changes, SchedulerBlocks

if TYPE_CHECKING:
    from kvelastic import _vmm
    from kvelastic.integration.vllm.in_tiers import EngineTiers
    from kvelastic.pool.scheduling.memory_wait import Backoff
    from kvelastic.pool.scheduling.over_limit import OverLimit
    from kvelastic.pool.scheduling.waiting import ShortRequest, WaitingRequests

_log = logging.getLogger("kvelastic.vllm")


class LiveBlocks:
    """The blocks that have an object, by id. Replaces vLLM's list of blocks.

    `len()` is the highest possible id plus one, as for that list.
    """

    def __init__(self, id_span: int) -> None:
        self._by_id: dict[int, Any] = {}
        self._id_span = id_span

    def __len__(self) -> int:
        return self._id_span

    def __getitem__(self, block_id: int) -> Any:
        try:
            return self._by_id[block_id]
        except KeyError:
            raise IndexError(f"block {block_id} is neither in use nor cached") from None

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._by_id.values()))

    def get(self, block_id: int) -> Any | None:
        """Return the block's object, or None if the block is free."""
        return self._by_id.get(block_id)

    def add(self, block: Any) -> None:
        """Add the object of a block that has become used."""
        self._by_id[block.block_id] = block

    def drop(self, block_id: int) -> Any | None:
        """Remove and return the object of a block that has become free."""
        return self._by_id.pop(block_id, None)

    def ids(self) -> list[int]:
        """Return the ids of the blocks that have an object, including the null block's 0."""
        return list(self._by_id)


class ElasticBlockPool(BlockPool):  # type: ignore[misc]  # vLLM has no type information here
    """Replaces vLLM's `BlockPool`; its methods have the same meaning.

    `memory` is the native pool, `id_span` its highest id plus one, `instance_name` the instance's
    name for operators. `num_gpu_blocks` stays the number of blocks that vLLM was configured with.
    It is an upper bound; fewer may be available.
    """

    def __init__(
        self,
        num_gpu_blocks: int,
        *args: Any,
        memory: _vmm.Pool,
        id_span: int,
        instance_name: str = "",
        **kwargs: Any,
    ) -> None:
        # One block, the null block: keeps everything small that vLLM's constructor allocates.
        super().__init__(1, *args, **kwargs)
        self.num_gpu_blocks = num_gpu_blocks
        self.memory = SchedulerBlocks(memory)
        """Sessions, steps, pins and block counts."""
        self.memory.on_changes = self._follow
        self.backoff: Backoff | None = None
        self.over_limit: OverLimit | None = None
        self.waiting: WaitingRequests | None = None
        """Set by the engine's loop (`in_engine_core`)."""
        self.instance_name = instance_name
        self.short: ShortRequest | None = None
        """The first request in this step that lacked memory."""
        self.tiers: EngineTiers | None = None
        """The tiers that store demoted blocks, or None: then evicted blocks are dropped."""
        self.blocks = LiveBlocks(id_span)
        self.blocks.add(self.null_block)

    def session(self) -> AbstractContextManager[None]:
        """Keep the native pool unchanged while vLLM looks up, checks and takes blocks. Can nest."""
        return self.memory.session()

    def pin(self, block_ids: Iterable[int]) -> int:
        """Keep these blocks' pages mapped and in place until `memory.unpin` is called.

        For readers outside any step. Returns a ticket. Skips blocks whose contents were evicted.
        vLLM may still hand such a block out again immediately, as in stock vLLM; readers need their
        own fence for that.
        """
        with self.session():  # applies earlier evictions and prevents new ones
            still_read = self.memory.held_back
            ids = [
                block_id
                for block_id in block_ids
                if block_id != 0
                and (self.blocks.get(block_id) is not None or block_id in still_read)
            ]
            return self.memory.pin(ids)

    # --- what vLLM calls ------------------------------------------------------------------------

    def get_new_blocks(self, num_blocks: int) -> list[Any]:
        """Take blocks, evicting cached ones if needed.

        Raises `PoolExhaustedError` (a `ValueError`) with nothing changed if there are too few.
        Within a session it does not raise if `get_num_free_blocks` returned enough.
        """
        if num_blocks <= 0:
            return []
        ids = self.memory.take(num_blocks)
        if ids is None:
            raise PoolExhaustedError(
                f"Cannot get {num_blocks} free blocks from the pool: "
                f"only {self.memory.reachable} are available. Raise the limit (kvctl limit) or "
                "send fewer requests at once."
            )
        add = self.blocks.add
        taken = []
        for block_id in ids:
            block = KVCacheBlock(block_id, pool=self)
            block.ref_cnt = 1
            add(block)
            taken.append(block)
        if self.metrics_collector:
            for block in taken:
                self.metrics_collector.on_block_allocated(block)
        return taken

    def touch(self, blocks: Sequence[Any]) -> None:
        """Add a reference to each block; cached ones become used."""
        revived = dict.fromkeys(
            block.block_id for block in blocks if block.ref_cnt == 0 and not block.is_null
        )
        if revived:
            self.memory.touch(list(revived))  # first, because it raises with nothing changed
        for block in blocks:
            if block.is_null:
                continue
            block.ref_cnt += 1
            if self.metrics_collector:
                self.metrics_collector.on_block_accessed(block)

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Drop one reference to each block. Those given first are evicted first."""
        unused: list[Any] = []
        for block in ordered_blocks:
            if block.is_null:
                continue
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                unused.append(block)
        self._give_back(unused)
        # A preemption while the limit is being lowered, or the bound on cached blocks is reached.
        self.memory.follow()

    def unpin_blocks(self, blocks: Iterable[Any], on_reuse: Callable[[Any], None]) -> None:
        """Raise: only HiSparse calls it, which is refused."""
        raise UnsupportedEngineError(
            "vLLM unpins blocks that are still read, which kvelastic does not support. Unset"
            " ENABLE_KVELASTIC to run this without kvelastic."
        )

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Remove these blocks from the prefix cache; used blocks stay used."""
        for block_id in block_ids:
            if not 0 <= block_id < len(self.blocks):
                raise ValueError(
                    f"block {block_id} is outside the pool's ids 0 to {len(self.blocks) - 1}"
                )
        with self.session():
            free: list[int] = []
            for block_id in block_ids:
                block = self.blocks.get(block_id)
                if block is None:
                    continue
                self._maybe_evict_cached_block(block)
                if block.ref_cnt == 0 and not block.is_null:
                    free.append(block_id)
            self._release(free)

    def reset_prefix_cache(self) -> bool:
        """Drop all cached blocks. Returns False with nothing changed if a request has blocks."""
        with self.session():
            if used := self.memory.used:
                _log.warning("The prefix cache was not reset: requests still hold %d blocks.", used)
                return False
            self.cached_block_hash_to_block = BlockHashToBlockMap()
            self.cached_block_hashes_by_block.clear()
            for block in self.blocks:
                block.reset_hash()
            self._release([id_ for id_ in self.blocks.ids() if id_ != 0])
            if self.metrics_collector:
                self.metrics_collector.reset()
            if self.enable_kv_cache_events:
                self.kv_event_queue.append(AllBlocksCleared())
        _log.info("The prefix cache was reset.")
        return True

    def get_num_free_blocks(self) -> int:
        """Return how many blocks can be taken. Valid until the session ends or a block is taken."""
        return self.memory.at_hand

    def get_usage(self) -> float:
        """Return the fraction (0 to 1) of the current limit that requests use."""
        return self.memory.usage

    # --- what the native pool did ---------------------------------------------------------------

    def _follow(self, changes: Changes) -> None:
        for block_id, moved_to in changes:
            block = self.blocks.drop(block_id)
            if block is None:
                continue
            if moved_to >= 0:
                successor = KVCacheBlock(moved_to, pool=self)
                self.move_block_hashes(block, successor)
                self.blocks.add(successor)
            else:
                self._maybe_evict_cached_block(block)

    def _give_back(self, blocks: list[Any]) -> None:
        """Return unreferenced blocks: those with a hash become cached, the others free."""
        if not blocks:
            return
        free: list[int] = []
        cached: list[int] = []
        hashes: list[bytes] = []
        for block in blocks:
            if self.enable_caching and block.block_hash is not None:
                cached.append(block.block_id)
                hashes.append(block.block_hash)
            else:
                free.append(block.block_id)
        for block_id in free:
            self.blocks.drop(block_id)
        tiers = self.tiers
        keys = b"".join(map(tiers.key_of, hashes)) if tiers is not None and cached else None
        self.memory.give_back(free, cached, keys)

    def _release(self, block_ids: list[int]) -> None:
        """Release blocks that are cached in the native pool but no longer have a hash."""
        for block_id in block_ids:
            self.blocks.drop(block_id)
        self.memory.drop(block_ids)

    def check_integrity(self) -> None:
        """Compare with the native pool's counts. Raises `IntegrityError`. Slow."""
        self.memory.check_integrity()
        used = sum(1 for block in self.blocks if block.ref_cnt > 0 and not block.is_null)
        if used != self.memory.used:
            raise IntegrityError(f"{used} blocks are in use, {self.memory.used} were counted")
