"""vLLM's block pool over kvelastic's: sparse ids, and objects only for blocks that are in use.

vLLM's own pool has one `KVCacheBlock` for every id from 0 up and keeps the free ones in a linked
list. Here ids come from the native pool (`scheduling.blocks`), and an object exists only while its
block is in one of the first two of its three states:

    used     a request refers to it (ref_cnt > 0)
    cached   no request does, but its contents are worth keeping: it has a hash
    free     neither; the id may lie in a page that has no memory

What the native pool evicts or moves by itself is followed here before vLLM looks it up.

Imports vLLM: imported where its scheduler makes a block pool.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import AllBlocksCleared
from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from kvelastic.errors import IntegrityError, PoolExhaustedError
from kvelastic.scheduling.blocks import Changes, SchedulerBlocks

if TYPE_CHECKING:
    from kvelastic import _vmm
    from kvelastic.integration.vllm.in_tiers import EngineTiers
    from kvelastic.scheduling.over_limit import OverLimit
    from kvelastic.scheduling.starvation import Naps
    from kvelastic.scheduling.waiting import ShortRequest, WaitingRequests

_log = logging.getLogger("kvelastic.vllm")


class LiveBlocks:
    """The blocks that have an object, by id: stands where vLLM has a list of all blocks.

    `len()` is one more than the highest id there can be, as it is for that list.
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
        """The block's object, or None if the block is free."""
        return self._by_id.get(block_id)

    def add(self, block: Any) -> None:
        """Remember the object of a block that is in use from now on."""
        self._by_id[block.block_id] = block

    def drop(self, block_id: int) -> Any | None:
        """Forget the object of a block that is free from now on."""
        return self._by_id.pop(block_id, None)

    def ids(self) -> list[int]:
        """Ids of all objects, the null block's 0 included."""
        return list(self._by_id)


class ElasticBlockPool(BlockPool):  # type: ignore[misc]  # vLLM has no type information here
    """Takes the place of `BlockPool`; the same calls, the same meanings.

    `memory` is the native pool, `id_span` one more than its highest id, `instance_name` what
    operators call the instance. `num_gpu_blocks` stays the
    number of blocks that vLLM was configured with: what there can be at most, not what there is.
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
        # One block, the null block: everything that vLLM's constructor sizes stays small.
        super().__init__(1, *args, **kwargs)
        self.num_gpu_blocks = num_gpu_blocks
        self.memory = SchedulerBlocks(memory)
        """Sessions, steps, pins, and what there is."""
        self.memory.on_changes = self._follow
        self.naps: Naps | None = None
        self.over_limit: OverLimit | None = None
        self.waiting: WaitingRequests | None = None
        """The engine's loop's: `in_engine_core`."""
        self.instance_name = instance_name
        self.short: ShortRequest | None = None
        """The first request of this step that there was too little memory for."""
        self.tiers: EngineTiers | None = None
        """What keeps demoted blocks; None: evicted blocks are gone."""
        self._watched: dict[int, tuple[Any, int]] = {}
        """Blocks that `unpin_blocks` was called for, by id, each with the ticket of its pin."""
        self.blocks = LiveBlocks(id_span)
        self.blocks.add(self.null_block)

    def session(self) -> AbstractContextManager[None]:
        """Hold the native pool still while vLLM looks up, checks and takes blocks. May nest."""
        return self._session_with_readers() if self._watched else self.memory.session()

    @contextmanager
    def _session_with_readers(self) -> Iterator[None]:
        with self.memory.session():
            if self.memory.pool.is_over_limit:
                # Over the limit nobody uses them again, and their pages have to go.
                unused = [id_ for id_, (block, _) in self._watched.items() if block.ref_cnt == 0]
                self._tell_readers(unused)
                self.memory.follow()
            yield

    def pin(self, block_ids: Iterable[int]) -> int:
        """Keep these blocks' memory where it is until it is unpinned in `memory`.

        For what reads blocks outside of any step; returns a ticket. Blocks whose contents have been
        evicted are left out. vLLM itself may have such a block again at once, as it always could: a
        reader's own fence is for that.
        """
        with self.session():  # what was evicted meanwhile is known here, and nothing more goes
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
        """Take blocks, evicting cached ones where that is needed.

        Raises `PoolExhaustedError` (a `ValueError`) with nothing changed if there are too few;
        within a session not after `get_num_free_blocks` said that there are enough.
        """
        if num_blocks <= 0:
            return []
        ids = self.memory.take(num_blocks)
        if ids is None:
            raise PoolExhaustedError(
                f"Cannot get {num_blocks} free blocks from the pool: "
                f"{self.memory.reachable} can be had. Raise the limit (kvctl limit) or "
                "send fewer requests at once."
            )
        if self._watched:
            self._tell_readers(ids)
            self.memory.follow()
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
        """Refer to blocks once more; cached ones are in use from now on."""
        revived = dict.fromkeys(
            block.block_id for block in blocks if block.ref_cnt == 0 and not block.is_null
        )
        if revived:
            self.memory.touch(list(revived))  # raises with nothing changed: so it comes first
        for block in blocks:
            if block.is_null:
                continue
            block.ref_cnt += 1
            if self.metrics_collector:
                self.metrics_collector.on_block_accessed(block)

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Refer to blocks once less; the first of them is the first to be evicted later."""
        unused: list[Any] = []
        others: dict[Any, list[Any]] = {}
        for block in ordered_blocks:
            if block.pool is not None and block.pool is not self:
                others.setdefault(block.pool, []).append(block)
                continue
            if block.is_null:
                continue
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                unused.append(block)
        self._give_back(unused)
        # A preemption, while the limit is being lowered or the bound on cached blocks is met.
        self.memory.follow()
        for pool, blocks in others.items():
            pool.free_blocks(blocks)

    def unpin_blocks(self, blocks: Iterable[Any], on_reuse: Callable[[Any], None]) -> None:
        """Refer once less to blocks whose contents somebody reads until `on_reuse` is called."""
        unused = []
        for block in blocks:
            block.ref_cnt -= 1
            self._reuse_watchers[block.block_id] = on_reuse
            if block.block_id not in self._watched:
                self._watched[block.block_id] = (block, self.memory.pin([block.block_id]))
            if block.ref_cnt == 0:
                unused.append(block)
        self._give_back(unused)

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Drop these blocks' contents from the prefix cache; blocks in use stay in use."""
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
        """Drop everything cached. False, and nothing done, while a request still has blocks."""
        with self.session():
            if used := self.memory.used:
                _log.warning("The prefix cache was not reset: requests still hold %d blocks.", used)
                return False
            self.cached_block_hash_to_block = BlockHashToBlockMap()
            self.cached_block_hashes_by_block.clear()
            self._tell_readers(list(self._watched))
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
        """How many blocks can be taken now; binding until the session ends, or a block is taken."""
        return self.memory.at_hand

    def get_usage(self) -> float:
        """The part (0 to 1) of what may be used under the present limit that requests use."""
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
        """Blocks that nobody refers to any more: cached where they have contents, else free."""
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

    def _tell_readers(self, block_ids: Iterable[int]) -> None:
        """Blocks that were unpinned with a watcher are about to lose their contents."""
        for block_id in block_ids:
            block, ticket = self._watched.pop(block_id, (None, 0))
            if block is not None:
                self._notify_reuse([block])
                self.memory.unpin(ticket)

    def _release(self, block_ids: list[int]) -> None:
        """Give blocks back that are cached in the native pool but have no hash any more."""
        for block_id in block_ids:
            self.blocks.drop(block_id)
        self.memory.drop(block_ids)

    def check_integrity(self) -> None:
        """Compare with the native pool's own books; raises `IntegrityError`. Takes a while."""
        self.memory.check_integrity()
        used = sum(1 for block in self.blocks if block.ref_cnt > 0 and not block.is_null)
        if used != self.memory.used:
            raise IntegrityError(f"{used} blocks are in use, {self.memory.used} were counted")
