"""Plans: the blocks that a request finds and holds in the tiers, and the graph that moves them.

    engine = GlobalCacheEngine(storage)
    graph, mask, plan, end_op_id = engine.get(1, token_ids, token_mask, slot_mapping)
    ...                                      # run the graph
    plan()                                   # or plan.abort(): release what the plan holds

Any thread may call. A lookup reads indexes in memory. A store that accesses a file system or server
for a lookup gets 20 ms.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np

from kvelastic.errors import InvalidArgumentError
from kvelastic.flexkv.cache.radixtree import RadixTree
from kvelastic.flexkv.cache.transfer_pattern import Fragment, get_graph, prefetch_graph, put_graph
from kvelastic.flexkv.common.arguments import as_mask
from kvelastic.flexkv.common.block import SequenceMeta
from kvelastic.flexkv.common.calls import ALL_LAYERS, check_layers
from kvelastic.flexkv.common.hash_utils import Tokens, as_tokens
from kvelastic.flexkv.common.request import Mask
from kvelastic.flexkv.common.transfer import BlockIds, DeviceType, TransferOpGraph
from kvelastic.flexkv.storage.storage_engine import StorageEngine
from kvelastic.tiers.base import KEY_BYTES, NO_KEY, Hold, Reservation, Selection
from kvelastic.tiers.lookup import Lookup, Segment
from kvelastic.tiers.workers import Workers

ERASE_S: Final = 60.0
"""How long `reset` waits for a store."""


class CacheEngine(RadixTree):
    """FlexKV's name for the index of one tier."""

    match = RadixTree.match_prefix
    num_used_blocks = RadixTree.total_cached_blocks


@dataclass(eq=False)
class Plan:
    """The graph of one request, and its holds and reservations in the tiers.

    Call the plan when the graph has ended or will not run (`abort` in FlexKV): this releases holds
    and space that was not filled. Idempotent; any thread may call.
    """

    graph: TransferOpGraph
    length: int = 0
    """Number of tokens of the request."""
    wanted: tuple[int, int] = (0, 0)
    """The first requested token, and the end of the last whole block that was requested."""
    first_token: int = 0
    tokens: int = 0
    """Number of tokens from `first_token` on that are moved or present."""
    fragments: Sequence[Fragment] = ()
    """The tiers in which the blocks of a get were found."""
    holds: Sequence[Hold] = ()
    place: Reservation | None = None
    """Space in the CPU tier for blocks that will be put."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def mask(self) -> Mask:
        """Return a mask of the tokens that are moved or present."""
        mask = np.zeros(self.length, np.bool_)
        mask[self.first_token : self.first_token + self.tokens] = True
        return mask

    def release_leases(self) -> None:
        """Let the tiers evict the blocks that were read."""
        with self._lock:
            holds, self.holds = self.holds, ()
        for hold in holds:
            hold.release()

    def __call__(self) -> None:
        """Release everything that the plan holds."""
        self.release_leases()
        with self._lock:
            place, self.place = self.place, None
        if place is not None:
            place.release()

    abort = __call__

    def keep_mask(self) -> None:
        """Release everything, and the graph. Only the mask is known afterwards."""
        self()
        self.graph, self.fragments = _NOTHING, ()


_NOTHING: Final = TransferOpGraph()


class GlobalCacheEngine:
    """All tiers of one storage. Any thread may call."""

    def __init__(
        self, storage: StorageEngine, may_ask: Callable[[int], bool] = lambda tier: True
    ) -> None:
        """`may_ask` returns whether the tier with this index responds now."""
        self._storage = storage
        self._may_ask = may_ask
        self._devices = list(storage.tiers)
        self._lookup = Lookup(list(storage.stores.values()))
        self.asks_medium = any(store.asks_medium for store in storage.stores.values())
        """Whether a lookup may wait for a file system or a server."""
        self._cpu = storage.stores[DeviceType.CPU]
        self.tokens_per_block = storage.tokens_per_block

    def engine(self, device_type: DeviceType) -> CacheEngine:
        """Return one tier. Raises `InvalidArgumentError` if it is not open."""
        return CacheEngine(self._storage.store(device_type), self._storage.namespace)

    def sequence(self, token_ids: Any, namespace: Sequence[str] | None = None) -> SequenceMeta:
        """Return a request's tokens with the keys of its blocks in these tiers."""
        seed = self._storage.namespace.fingerprint
        return SequenceMeta(token_ids, self.tokens_per_block, namespace, seed=seed)

    # --- FlexKV's calls ------------------------------------------------------------------------

    def get(
        self,
        request_id: int,
        token_ids: Any,
        token_mask: Any,
        slot_mapping: Any,
        layer_num: int = ALL_LAYERS,
        layer_granularity: int = ALL_LAYERS,
        dp_id: int = 0,
        *,
        namespace: Sequence[str] | None = None,
    ) -> tuple[TransferOpGraph, Mask, Plan, int]:
        """Plan a get. Returns (graph, return_mask, callback, task_end_op_id).

        `slot_mapping` has one slot for each True token of `token_mask`; with None or an empty one
        the blocks are bound later. Call the callback when the graph has ended, or its `abort`.
        Raises `InvalidArgumentError`, and `UnsupportedError` for anything but all layers at once.
        """
        check_layers(layer_num, layer_granularity)
        plan = self.plan_get(self.sequence(token_ids, namespace), token_mask, dp_id=dp_id)
        return self._bound(plan, token_mask, slot_mapping)

    def put(
        self,
        request_id: int,
        token_ids: Any,
        token_mask: Any,
        slot_mapping: Any,
        layer_num: int = ALL_LAYERS,
        dp_id: int = 0,
        *,
        namespace: Sequence[str] | None = None,
    ) -> tuple[TransferOpGraph, Mask, Plan, int, int]:
        """Plan a put. Returns (graph, return_mask, callback, task_end_op_id, skipped_gpu_blocks).

        `skipped_gpu_blocks` is the number of leading blocks that are present or in progress.
        Otherwise as `get`.
        """
        check_layers(layer_num, ALL_LAYERS)
        plan = self.plan_put(self.sequence(token_ids, namespace), token_mask, dp_id=dp_id)
        bound = self._bound(plan, token_mask, slot_mapping)
        skipped = (plan.first_token if plan.tokens else plan.wanted[1]) // self.tokens_per_block
        if plan.place is not None:
            store = plan.graph.ops[plan.graph.task_end_op_id]
            store.dst_block_ids = np.array(plan.place.slots[skipped:], np.int64)
        return *bound, skipped

    def _bound(
        self, plan: Plan, token_mask: Any, slot_mapping: Any
    ) -> tuple[TransferOpGraph, Mask, Plan, int]:
        try:
            if slot_mapping is not None and len(slot_mapping):
                slots = slots_of_plan(plan, token_mask, slot_mapping)
                if plan.tokens:
                    plan.graph.bind_engine_blocks(blocks_of_slots(slots, self.tokens_per_block))
        except BaseException:
            plan.abort()
            raise
        return plan.graph, plan.mask(), plan, plan.graph.task_end_op_id

    # --- plans ---------------------------------------------------------------------------------

    def plan_get(
        self,
        sequence: SequenceMeta,
        token_mask: Any = None,
        *,
        dp_id: int = 0,
        cpu_only: bool = False,
        is_prefetch: bool = False,
    ) -> Plan:
        """Hold the longest run of blocks in the tiers from the block of the first True token on."""
        start, end = true_span(token_mask, sequence.length)
        per_block = self.tokens_per_block
        first = start // per_block
        last = max(first, end // per_block)
        wanted = first * per_block, last * per_block
        keys = sequence.keys[first * KEY_BYTES : last * KEY_BYTES]
        may_ask = (lambda tier: tier == 0) if cpu_only else self._may_ask
        segments, holds = self._lookup.hold_leading(keys, may_ask)
        plan = Plan(TransferOpGraph(), sequence.length, wanted, wanted[0], holds=holds)
        try:
            if not segments:
                plan.release_leases()
                return plan
            count = sum(segment.count for segment in segments)
            keys = keys[: count * KEY_BYTES]
            after = sequence.parent(first)
            plan.fragments = [
                Fragment(self._devices[segment.tier], segment.first, segment.count)
                for segment in segments
            ]
            plan.place = self._room_for(keys, segments, after)
            plan.tokens = count * per_block
            if is_prefetch:
                plan.graph = prefetch_graph(keys, plan.fragments, chain_after=after)
            else:
                plan.graph = get_graph(keys, plan.fragments, chain_after=after, dp_id=dp_id)
            return plan
        except BaseException:
            plan.abort()
            raise

    def _room_for(
        self, keys: bytes, segments: Sequence[Segment], chain_after: bytes
    ) -> Reservation | None:
        """Reserve space in the CPU tier, from the first block that only a farther tier has."""
        first = next((segment.first for segment in segments if segment.tier), None)
        if first is None:
            return None
        at = first * KEY_BYTES
        after = keys[at - KEY_BYTES : at] if at else chain_after
        return self._cpu.reserve(keys[at:], chain_after=after)

    def plan_put(self, sequence: SequenceMeta, token_mask: Any = None, *, dp_id: int = 0) -> Plan:
        """Reserve CPU-tier space for blocks that are neither present nor in progress.

        If not all of them fit, the plan is empty and nothing is put. Raises `InvalidArgumentError`
        unless the mask is True from the first token on.
        """
        start, end = true_span(token_mask, sequence.length)
        if start:
            raise InvalidArgumentError(
                f"token_mask of a put begins with {start} False tokens; blocks are put from the"
                " first token on, and those that are there already are left out of the answer"
            )
        last = end // self.tokens_per_block
        wanted = 0, last * self.tokens_per_block
        keys = sequence.keys[: last * KEY_BYTES]
        place = self._cpu.reserve(keys, chain_after=NO_KEY) if keys else None
        first = None if place is None else place.first_new
        if first is None:
            if place is not None:
                place.release()
            return Plan(TransferOpGraph(), sequence.length, wanted)
        keys, after = keys[first * KEY_BYTES :], sequence.parent(first)
        graph = put_graph(keys, self._devices[1:], chain_after=after, dp_id=dp_id)
        first_token = first * self.tokens_per_block
        tokens = wanted[1] - first_token
        return Plan(graph, sequence.length, wanted, first_token, tokens, place=place)

    # --- the rest ------------------------------------------------------------------------------

    def reset(self, timeout_s: float = ERASE_S) -> list[str]:
        """Erase all blocks in all tiers; return the tiers that did not respond in time. Blocks.

        Erased blocks are never found again. Earlier plans keep their holds until they end.
        """
        # Erase all generations: an earlier reset may have missed blocks in a slow tier.
        selection = Selection(namespace=self._storage.namespace, every_generation=True)
        self._storage.next_generation()
        late = []
        for device, store in self._storage.stores.items():
            worker = Workers("kvelastic-reset")
            try:
                worker.run(partial(store.erase_matching, selection), timeout_s)
            except TimeoutError:
                late.append(device.name)
            finally:
                worker.close(0.0)
        return late

    def close(self, timeout_s: float = 5.0) -> None:
        """End the threads for lookups. The transfer engine closes the stores. Idempotent."""
        self._lookup.close(timeout_s)

    def check_integrity(self) -> None:
        """Check all stores. Raises `IntegrityError`. Blocks."""
        for store in self._storage.stores.values():
            store.check_integrity()


def true_span(token_mask: Any, length: int) -> tuple[int, int]:
    """Return the first True token and the end of the True run; None is all True.

    Raises `InvalidArgumentError` if it has gaps.
    """
    mask = as_mask(token_mask, length)
    if mask is None:
        return 0, length
    count = int(np.count_nonzero(mask))
    if count == 0:
        return 0, 0
    first = int(mask.argmax())
    if not mask[first : first + count].all():
        raise InvalidArgumentError(
            "token_mask has a False between two True tokens; pass one run of True"
        )
    return first, first + count


def slots_of_plan(plan: Plan, token_mask: Any, slot_mapping: Any) -> Tokens:
    """From slots for all True tokens of a request's mask, return those of the plan's tokens."""
    slots = as_tokens(slot_mapping, "slot_mapping")
    first, end = true_span(token_mask, plan.length)
    if len(slots) != end - first:
        raise InvalidArgumentError(
            f"slot_mapping has {len(slots)} slots for {end - first} True tokens; pass one for each"
        )
    if plan.tokens and plan.first_token < first:
        raise InvalidArgumentError(
            f"the first True token, {first}, is inside a block: its block begins at"
            f" {plan.first_token}, for which there are no slots; begin the mask at a block"
        )
    at = plan.first_token - first
    return slots[at : at + plan.tokens]


def blocks_of_slots(slots: Tokens, tokens_per_block: int) -> BlockIds:
    """Return the engine's blocks of whole pages of slots.

    Each block comes with its slots in order, or with its first slot for each token: FlexKV's own
    adapters send `block_ids.repeat(tokens_per_block) * tokens_per_block`. Raises
    `InvalidArgumentError` for anything else.
    """
    if len(slots) % tokens_per_block:
        raise InvalidArgumentError(
            f"{len(slots)} slots are no whole blocks of {tokens_per_block} tokens"
        )
    rows = slots.reshape(-1, tokens_per_block)
    firsts = rows[:, 0]
    steps = rows - firsts[:, None]
    is_whole = (steps == np.arange(tokens_per_block)).all() or not steps.any()
    if not is_whole or (firsts % tokens_per_block).any() or (firsts < 0).any():
        raise InvalidArgumentError(
            f"slot_mapping is not page aligned: each {tokens_per_block} slots must be those of one"
            " block in order, or its first slot for each token"
        )
    return firsts // tokens_per_block
