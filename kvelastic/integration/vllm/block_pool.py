"""vLLM's block pool over kvelastic's: sparse ids, and objects only for blocks that are in use.

vLLM's own pool has one `KVCacheBlock` for every id from 0 up and keeps the free ones in a linked
list. Here ids come from the native pool, which knows three states of a block, and an object exists
only while its block is one of the first two:

    used     a request refers to it (ref_cnt > 0)
    cached   no request does, but its contents are worth keeping: it has a hash
    free     neither; the id may lie in a page that has no memory

A block that a step on its way or a transfer still uses when it is given back is *pinned* natively
until they have ended: it stays where it is, and is used again only as its reader allows.

The native pool may turn cached blocks into free ones by itself (the limit was lowered, more is
cached than allowed), or move their contents to other ids (to empty a page), also while this process
sleeps. It then queues what it did, and this class must follow before anybody looks them up:
`session()` does so on entry, and holds the native pool still until it ends, so that what was
checked can be taken. Everything here is called by the one thread that vLLM's scheduler runs in.

Imports vLLM: imported where its scheduler makes a block pool.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import AllBlocksCleared
from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from kvelastic.errors import IntegrityError, PoolExhaustedError
from kvelastic.integration.vllm.steps import PinsOfSteps, StepsOnTheirWay

_ARRIVALS_WRAP = 1 << 32
"""The native pool's count of arrivals is a word that wraps."""


if TYPE_CHECKING:
    from kvelastic import _vmm
    from kvelastic.integration.vllm.in_tiers import EngineTiers

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

    `memory` is the native pool, `id_span` one more than its highest id. `num_gpu_blocks` stays the
    number of blocks that vLLM was configured with: what there can be at most, not what there is.
    """

    def __init__(
        self,
        num_gpu_blocks: int,
        *args: Any,
        memory: _vmm.Pool,
        id_span: int,
        **kwargs: Any,
    ) -> None:
        # One block, the null block: everything that vLLM's constructor sizes stays small.
        super().__init__(1, *args, **kwargs)
        self.num_gpu_blocks = num_gpu_blocks
        self._memory = memory
        self.headroom = 0
        """Blocks that vLLM wants to leave free where it can (its watermark)."""
        self._used = 0
        self._depth = 0
        self.fell_short = False
        """Whether, in the present session, blocks were wanted that could not be had."""
        self.starvation: Any = None
        self.last_starvation: Any = None
        """The newest one, also when it is over. Both are the engine's loop's: `in_engine_core`."""
        self.tiers: EngineTiers | None = None
        """What keeps demoted blocks; None: evicted blocks are gone."""
        self._steps = StepsOnTheirWay()
        self._pins_of_steps = PinsOfSteps()
        self._pins_after_next_step = PinsOfSteps()
        self._reused_under = 0
        self._watched: dict[int, tuple[Any, int]] = {}
        """Blocks that `unpin_blocks` was called for, by id, each with the ticket of its pin."""
        self.blocks = LiveBlocks(id_span)
        self.blocks.add(self.null_block)

    # --- sessions -------------------------------------------------------------------------------

    @contextmanager
    def session(self) -> Iterator[None]:
        """Hold the native pool still while vLLM looks up, checks and takes blocks. May nest."""
        self._memory.enter()
        try:
            if self._depth == 0:
                self.fell_short = False
            self._depth += 1
            if self._watched and self._memory.is_over_limit:
                # Over the limit nobody uses them again, and their pages have to go.
                unused = [id_ for id_, (block, _) in self._watched.items() if block.ref_cnt == 0]
                self._tell_readers(unused)
            self._follow_changes()
            yield
        finally:
            self._depth -= 1
            self._memory.exit()

    def prepare(self, num_blocks: int) -> None:
        """Have memory mapped for `num_blocks`, which vLLM is about to ask for, if it may be.

        Waits for the workers at most as long as `KVELASTIC_IPC_TIMEOUT` says. Evicts nothing, so
        cached blocks that were just found stay. That it was not enough shows in
        `get_num_free_blocks`.
        """
        at_hand = self._memory.reusable
        wanted = num_blocks + self.headroom - at_hand
        if wanted <= 0 or self._memory.ensure(wanted) >= wanted:
            return
        least = num_blocks - at_hand
        if self.headroom == 0 or (least > 0 and self._memory.ensure(least) < least):
            self.fell_short = True

    @property
    def given_back(self) -> int:
        """Of the native pool's arrivals, those that came of blocks given back here."""
        return self._memory.given_back_arrivals

    @property
    def arrivals(self) -> int:
        """Changes whenever blocks can be had that could not be had before, from anywhere else.

        What this engine itself gives back does not count: it knows of that (`given_back`).
        """
        return (self._memory.arrivals - self.given_back) % _ARRIVALS_WRAP

    def wait_for_arrival(self, seen: int, timeout_s: float) -> None:
        """Block until `arrivals` is another than `seen`, or `timeout_s` has passed.

        For the thread that gives blocks back; no other does while it waits.
        """
        self._memory.wait_for_arrival((seen + self.given_back) % _ARRIVALS_WRAP, timeout_s)

    # --- steps ----------------------------------------------------------------------------------

    def step_begins(self, *, works: bool = True) -> int:
        """A step was scheduled; returns its number, for `step_ends`. Not all have work to do."""
        return self._steps.begin(works=works)

    @property
    def is_at_work(self) -> bool:
        """Whether a step that has work to do is on its way."""
        return self._steps.is_at_work

    @property
    def reused_under(self) -> int:
        """The newest step on its way under which blocks were handed out again; 0: there is none.

        It may still read and write them. Work of later steps comes after its own by itself; whoever
        else writes to blocks that were just taken waits until it `has_ended`.
        """
        return 0 if self.has_ended(self._reused_under) else self._reused_under

    def has_ended(self, step: int) -> bool:
        """Whether the workers have carried out this step, and all before it."""
        return self._steps.ended >= step

    def step_ends(self, step: int) -> None:
        """The workers have carried out this step, and all before it."""
        self._steps.end(step)
        for pins in (self._pins_of_steps, self._pins_after_next_step):
            for ticket in pins.take_ended(self._steps.ended):
                self.unpin(ticket)

    @property
    def waits_for_steps(self) -> bool:
        """Whether blocks that were given back wait for a step to end."""
        return len(self._pins_of_steps) > 0

    def pin(self, block_ids: Iterable[int]) -> int:
        """Keep these blocks' memory where it is until `unpin`, whoever gives them back meanwhile.

        For what reads blocks outside of any step; returns a ticket. Blocks whose contents have been
        evicted are left out. vLLM itself may have such a block again at once, as it always could: a
        reader's own fence is for that.
        """
        with self.session():  # what was evicted meanwhile is known here, and nothing more goes
            still_read = set(self._memory.pinned())
            ids = [
                block_id
                for block_id in block_ids
                if block_id != 0
                and (self.blocks.get(block_id) is not None or block_id in still_read)
            ]
            return self._memory.pin(ids, kind="fenced")

    def unpin(self, ticket: int) -> None:
        """End a pin; blocks that nobody else needs are free, or cached, now."""
        self._memory.unpin(ticket)

    def unpin_after_next_step(self, ticket: int) -> None:
        """The same once the step that is scheduled next has ended."""
        self._pins_after_next_step.add(self._steps.next, ticket)

    @property
    def held_back_ids(self) -> set[int]:
        """The blocks that nobody refers to, and that a step or a reader may still use."""
        return set(self._memory.pinned())

    # --- what vLLM calls ------------------------------------------------------------------------

    def get_new_blocks(self, num_blocks: int) -> list[Any]:
        """Take blocks, evicting cached ones where that is needed.

        Raises `PoolExhaustedError` (a `ValueError`) with nothing changed if there are too few;
        within a session not after `get_num_free_blocks` said that there are enough.
        """
        if num_blocks <= 0:
            return []
        reusable = self._memory.reusable if self.waits_for_steps else 0
        ids = self._memory.alloc(num_blocks, reuse=True)
        if ids is None:
            raise PoolExhaustedError(
                f"Cannot get {num_blocks} free blocks from the pool: "
                f"{self.available_size()} can be had. Raise the limit (kvctl limit) or "
                "send fewer requests at once."
            )
        if reusable > 0 and self._memory.reusable != reusable:
            self._reused_under = self._steps.newest
        if self._watched:
            self._tell_readers(ids)
        # An id may have been evicted just now to be handed out again: its old object goes first.
        self._follow_changes()
        self._used += num_blocks
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
            self._memory.touch(list(revived))  # raises with nothing changed: so it comes first
            self._used += len(revived)
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
        self._used -= len(unused)
        self._give_back(unused)
        if self._depth:
            # A preemption, while the limit is being lowered or the bound on cached blocks is met.
            self._follow_changes()
        for pool, blocks in others.items():
            pool.free_blocks(blocks)

    def unpin_blocks(self, blocks: Iterable[Any], on_reuse: Callable[[Any], None]) -> None:
        """Refer once less to blocks whose contents somebody reads until `on_reuse` is called."""
        unused = []
        for block in blocks:
            block.ref_cnt -= 1
            self._reuse_watchers[block.block_id] = on_reuse
            if block.block_id not in self._watched:
                ticket = self._memory.pin([block.block_id], kind="fenced")
                self._watched[block.block_id] = (block, ticket)
            if block.ref_cnt == 0:
                unused.append(block)
        self._used -= len(unused)
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
            if self._used:
                _log.warning(
                    "The prefix cache was not reset: requests still hold %d blocks.", self._used
                )
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
        return self._memory.available_mapped() + self._memory.reusable

    def available_size(self) -> int:
        """How many blocks could be had now, by mapping pages too; says nothing of the future."""
        return self._memory.available_size() + self._memory.reusable

    def get_usage(self) -> float:
        """The part (0 to 1) of what may be used under the present limit that requests use."""
        if not self._used:
            return 0.0
        return self._used / (self._used + self.available_size())

    # --- what the native pool did ---------------------------------------------------------------

    def _follow_changes(self) -> None:
        if not self._memory.has_evicted:
            return
        for block_id, moved_to in self._memory.take_changes():
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
        if newest := self._steps.newest:
            ids = [block.block_id for block in blocks]
            self._pins_of_steps.add(newest, self._memory.pin(ids, kind="ordered"))
        free: list[int] = []
        cached: list[int] = []
        hashes: list[bytes] = []
        for block in blocks:
            if self.enable_caching and block.block_hash is not None:
                cached.append(block.block_id)
                hashes.append(block.block_hash)
            else:
                free.append(block.block_id)
        if free:
            for block_id in free:
                self.blocks.drop(block_id)
            self._memory.free(free)
        if cached and self.tiers is not None:
            self._memory.cache(cached, b"".join(map(self.tiers.key_of, hashes)))
        elif cached:
            self._memory.cache(cached)

    def _tell_readers(self, block_ids: Iterable[int]) -> None:
        """Blocks that were unpinned with a watcher are about to lose their contents."""
        for block_id in block_ids:
            block, ticket = self._watched.pop(block_id, (None, 0))
            if block is not None:
                self._notify_reuse([block])
                self.unpin(ticket)

    def _release(self, block_ids: list[int]) -> None:
        """Give blocks back that are cached in the native pool but have no hash any more."""
        for block_id in block_ids:
            self.blocks.drop(block_id)
        if block_ids:
            self._memory.free(block_ids)

    def check_integrity(self) -> None:
        """Compare with the native pool's own books; raises `IntegrityError`. Takes a while."""
        self._memory.check_integrity()
        used = sum(1 for block in self.blocks if block.ref_cnt > 0 and not block.is_null)
        if used != self._used:
            raise IntegrityError(f"{used} blocks are in use, {self._used} were counted")
