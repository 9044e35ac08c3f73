"""Calls that both generations' managers share: caches, copies, and transfers.

Any thread may call. Each call blocks until it is done or `sync_kv_timeout` has passed. Calls raise
`TypeError` for a wrong type, `LLMParamError` (a `ValueError`) for a wrong value, and `LLMException`
otherwise; `docs/datadist.md` lists the codes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, Generic, TypeVar, cast

from kvelastic.datadist import cache_layout, checks, wire
from kvelastic.datadist.cache_layout import TENSORS_PER_LAYER, layer_tensors
from kvelastic.datadist.cache_table import Entry
from kvelastic.datadist.caches import CacheHandle
from kvelastic.datadist.descriptors import BlocksCacheKey, CacheDesc, CacheKey, CacheKeyByIdAndIndex
from kvelastic.datadist.enums import LLMRole, Placement
from kvelastic.datadist.layers import (
    CacheTask,
    Config,
    LayerPushes,
    LayerSender,
    LayerSynchronizer,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from kvelastic.datadist.links import Links
from kvelastic.datadist.local_caches import LocalCaches
from kvelastic.datadist.options import Options
from kvelastic.datadist.peer import TransferRuns, refuse_found_blocks
from kvelastic.datadist.status import LLMParamError, LLMStatusCode, as_llm_exceptions, failure

_log = logging.getLogger("kvelastic")

Handle = TypeVar("Handle", bound=CacheHandle)
Method = TypeVar("Method", bound=Callable[..., Any])


def manager_call(role: LLMRole | None = None) -> Callable[[Method], Method]:
    """Make a method a call of a manager, which only a live one serves, and only in `role`.

    The role counts in the first generation. kvelastic's errors become `LLMException`.
    """

    def decorate(method: Method) -> Method:
        @wraps(method)
        def call(self: ManagerCalls[Any], *arguments: Any, **named: Any) -> Any:
            self._begin(method.__name__, role)
            with as_llm_exceptions(method.__name__):
                return method(self, *arguments, **named)

        return cast("Method", call)

    return decorate


class LayerArguments:
    """`src_layer_range`, `dst_layer_range` and `tensor_num_per_layer` of a call, checked."""

    def __init__(
        self,
        src_layer_range: object = None,
        dst_layer_range: object = None,
        tensor_num_per_layer: object = TENSORS_PER_LAYER,
    ) -> None:
        self.sources = checks.step_one("src_layer_range", src_layer_range)
        self.targets = checks.step_one("dst_layer_range", dst_layer_range)
        self._per_layer = checks.integer(
            "tensor_num_per_layer", tensor_num_per_layer, least=1, most=checks.MAX_UINT32
        )

    @classmethod
    def only(cls, call: str, kwargs: dict[str, object]) -> LayerArguments:
        """Create from a call's keyword arguments. Raises `TypeError` for unknown ones."""
        known = {"src_layer_range", "dst_layer_range", "tensor_num_per_layer"}
        if others := sorted(kwargs.keys() - known):
            raise TypeError(f"{call}() got unexpected keyword arguments: {', '.join(others)}")
        return cls(**kwargs)

    def tensors(self, desc: CacheDesc, *, of_source: bool, other: range | None = None) -> range:
        """Return the tensors of the source or the target, as many as the `other` side's."""
        name, layers = (
            ("src_layer_range", self.sources) if of_source else ("dst_layer_range", self.targets)
        )
        found = layer_tensors(name, desc, layers, self._per_layer)
        if other is not None and len(other) != len(found):
            raise LLMParamError(
                f"{len(other)} tensors here and {len(found)} of the peer are named; name as many"
                " layers of both"
            )
        return found


class ManagerCalls(Generic[Handle]):
    """Base of `KvCacheManager` and `CacheManager`. Created by `LLMDataDist.init` only."""

    _handle: type[Handle]
    """Type of handle that the calls take and return."""
    _role: LLMRole | None = None
    """Role in the first generation, where some calls need a role; None in the second."""

    def __init__(self, caches: LocalCaches, links: Links, options: Options) -> None:
        self._caches = caches
        self._links = links
        self._options = options
        self._sender = LayerSender()
        self._initialized = True

    def finalize(self) -> None:
        """Refuse further calls and end layered transfers. Idempotent."""
        self._initialized = False
        self._sender.end()

    def check_integrity(self) -> None:
        """Check references, keys and memory. Call it only while no other call is in progress."""
        self._caches.check_integrity()

    def _begin(self, call: str, role: LLMRole | None = None) -> None:
        """Check that a call is allowed; `role` is the role it needs in the first generation."""
        if not self._initialized:
            raise failure(
                LLMStatusCode.LLM_ENGINE_FINALIZED,
                "the LLMDataDist of this manager was finalized; init another one",
            )
        if self._role is not None and role not in {None, self._role}:
            raise LLMParamError(f"{call} is not for a {self._role.name}")

    # --- caches with memory of their own ---------------------------------------------------------

    @manager_call()
    def allocate_cache(self, cache_desc: CacheDesc, cache_keys: Sequence[CacheKey] = ()) -> Handle:
        """Allocate a cache in the pool of its placement, with a key for each row.

        Fewer keys than rows leave the last rows without key. A key with `req_id` 2**64-1 leaves its
        row without key. Of equal keys the last counts. Memory is released once the id is dropped
        (`deallocate_cache`) and all keys are (pulled, pushed or removed). Raises
        `LLM_FEATURE_NOT_ENABLED` without such a pool, `LLM_OUT_OF_MEMORY`, and `LLM_PARAM_INVALID`
        for a key of another cache.

        In the first generation only device caches can be allocated, only a PROMPT may give keys,
        and the error is `LLM_DEVICE_OUT_OF_MEMORY`. Deleting the handle also drops the id's
        reference.
        """
        keys = checks.instances("cache_keys", cache_keys, CacheKey)
        if keys:
            self._begin("allocate_cache with cache_keys", LLMRole.PROMPT)
        return self._allocate(cache_desc, keys, None, is_blocks=False)

    @manager_call()
    def allocate_blocks_cache(
        self, cache_desc: CacheDesc, blocks_cache_key: BlocksCacheKey | None = None
    ) -> Handle:
        """Allocate a cache whose rows are blocks. Peers find one such cache per model by its key.

        Deallocation releases it even if peers know the key. Otherwise as `allocate_cache`.
        """
        if blocks_cache_key is not None and self._role is LLMRole.DECODER:
            raise LLMParamError("blocks_cache_key is of a PROMPT, and this is a DECODER")
        return self._allocate(cache_desc, (), blocks_cache_key, is_blocks=True)

    def _allocate(
        self,
        desc: CacheDesc,
        keys: Sequence[CacheKey],
        blocks_key: BlocksCacheKey | None,
        *,
        is_blocks: bool,
    ) -> Handle:
        checks.instance("cache_desc", desc, CacheDesc)
        if self._role is not None and desc.placement is not Placement.DEVICE:
            raise LLMParamError("only device caches are allocated; use KvCache.create_cpu_cache")
        entry = self._caches.allocate(desc, keys, model_of(blocks_key), is_blocks=is_blocks)
        return self._handle(
            entry.cache_id,
            desc,
            entry.addrs,
            is_blocks_cache=is_blocks,
            on_delete=self._caches.delete_later,
        )

    @manager_call()
    def deallocate_cache(self, cache: Handle) -> None:
        """Drop the id's reference and invalidate the handle. Idempotent.

        In the first generation it also takes blocks caches.
        """
        checks.instance("cache", cache, self._handle)
        if self._role is None:
            refuse_blocks("cache", cache)
        elif cache.is_cpu_cache:
            raise LLMParamError("a CPU cache is its maker's; there is nothing to deallocate")
        self._deallocate(cache)

    def _deallocate(self, cache: Handle) -> None:
        """Drop the id's reference. Registered caches are left unchanged."""
        if self._caches.deallocate(cache.cache_id):
            cache.invalidate()

    @manager_call(LLMRole.PROMPT)
    def remove_cache_key(self, cache_key: CacheKey) -> None:
        """Drop a key's reference: its row can no longer be pulled. Idempotent."""
        checks.instance("cache_key", cache_key, CacheKey)
        self._caches.remove_key(cache_key.index)

    # --- copies in this process ------------------------------------------------------------------

    @manager_call()
    def copy_cache(
        self,
        dst: Handle,
        src: Handle,
        dst_batch_index: int = 0,
        src_batch_index: int = 0,
        offset: int = 0,
        size: int = -1,
        req_id: int | None = None,
    ) -> None:
        """Copy `size` bytes from `offset` of a row to the same offset of another, in all tensors.

        A size of -1 copies to the row's end. `req_id` is only logged. In the first generation both
        caches must be device caches.
        """
        for name, cache in (("dst", dst), ("src", src)):
            checks.instance(name, cache, self._handle)
            if cache.is_cpu_cache and self._role is not None:
                raise LLMParamError(f"{name} is a CPU cache; copy_cache is for device caches")
        checks.integer("offset", offset, most=checks.MAX_INT64)
        checks.size("size", size)
        if req_id is not None:
            checks.integer("req_id", req_id)
        refuse_blocks("dst", dst)
        refuse_blocks("src", src)
        source, target = src.cache_desc, dst.cache_desc
        from_row = cache_layout.row_index("src_batch_index", source, src_batch_index)
        to_row = cache_layout.row_index("dst_batch_index", target, dst_batch_index)
        cache_layout.same_shape(source, target)
        size = source.row_bytes - offset if size == -1 else size
        tensors = range(source.num_tensors)
        pairs = cache_layout.pairs_merged(
            cache_layout.row_runs(source, tensors, from_row, offset, size),
            cache_layout.row_runs(target, tensors, to_row, offset, size),
        )
        self._caches.copy(pairs, src, dst)
        if req_id is not None:
            _log.debug("copied cache %d to %d (request %d)", src.cache_id, dst.cache_id, req_id)

    @manager_call()
    def copy_blocks(self, cache: Handle, copy_block_info: Mapping[int, Sequence[int]]) -> None:
        """Copy each block to its list of target blocks, in all tensors."""
        checks.instance("cache", cache, self._handle)
        checks.instance("copy_block_info", copy_block_info, dict)
        refuse_rows("cache", cache)
        desc = cache.cache_desc
        moves = [
            (source, target)
            for source, targets in copy_block_info.items()
            for target in cache_layout.block_indices("copy_block_info", desc, targets)
        ]
        if {source for source, _ in moves} & {target for _, target in moves}:
            raise LLMParamError("a block is copied to and copied from")
        self._caches.copy(cache_layout.copied_blocks(desc, desc, moves), cache, cache)

    @manager_call()
    def swap_blocks(
        self, src_cache: Handle, dst_cache: Handle, src_to_dst: Mapping[int, int]
    ) -> None:
        """Copy blocks between a host and a device cache; adjacent blocks are copied together.

        Raises `AttributeError` for None.
        """
        if src_cache is None or dst_cache is None or src_to_dst is None:
            raise AttributeError("swap_blocks() needs two caches and a dict, and got None")
        checks.instance("src_cache", src_cache, self._handle)
        checks.instance("dst_cache", dst_cache, self._handle)
        checks.instance("src_to_dst", src_to_dst, dict)
        source, target = src_cache.cache_desc, dst_cache.cache_desc
        if source.placement is target.placement:
            raise LLMParamError(
                "swap_blocks copies between host and device; both caches are"
                f" {source.placement.name} caches"
            )
        refuse_rows("src_cache", src_cache)
        refuse_rows("dst_cache", dst_cache)
        pairs = cache_layout.copied_blocks(source, target, list(src_to_dst.items()))
        self._caches.copy(pairs, src_cache, dst_cache)

    # --- transfers -------------------------------------------------------------------------------

    def _entry_of(self, name: str, cache: Handle, *, is_blocks: bool) -> Entry:
        """Return the cache of an argument, which is used by blocks or by rows."""
        entry = self._caches.own(name, checks.instance(name, cache, self._handle))
        (refuse_rows if is_blocks else refuse_blocks)(name, cache)
        return entry

    def _transfer_row(
        self,
        key: CacheKey | CacheKeyByIdAndIndex,
        entry: Entry,
        row: int,
        size: int,
        layers: LayerArguments,
        offsets: tuple[int, int] = (0, 0),
        *,
        is_push: bool = False,
    ) -> None:
        """Copy between a local row and the row of a key; `offsets` are the peer's and the local."""
        their_offset, our_offset = offsets
        size = entry.row_bytes - our_offset if size == -1 else size
        tensors = layers.tensors(entry.desc, of_source=is_push)
        ours = cache_layout.row_runs(entry.desc, tensors, row, our_offset, size)

        def runs(found: wire.Cache) -> TransferRuns:
            refuse_found_blocks(found)
            theirs = layers.tensors(found.desc, of_source=not is_push, other=tensors)
            at = cache_layout.row_runs(found.desc, theirs, found.row, their_offset, size)
            return ours, at, theirs

        self._transfer(key, entry, runs, is_push=is_push)

    def _transfer_blocks(
        self,
        key: wire.AnyKey,
        entry: Entry,
        our_blocks: Sequence[int],
        their_blocks: Sequence[int],
        layers: LayerArguments,
        *,
        is_push: bool = False,
    ) -> None:
        """Copy between local blocks and the blocks of a key, or the row of another key."""
        our_name, their_name = ("src_blocks", "dst_blocks")[:: 1 if is_push else -1]
        ours_at = cache_layout.block_indices(our_name, entry.desc, our_blocks)
        theirs_at = checks.integers(
            their_name, their_blocks, most=checks.MAX_UINT32, empty=not is_push
        )
        is_blocks = isinstance(key, BlocksCacheKey)
        if len(theirs_at) != (len(ours_at) if is_blocks else 0):
            raise LLMParamError(
                f"{len(ours_at)} {our_name} and {len(theirs_at)} {their_name} are given; give as"
                " many, and src_blocks for a BlocksCacheKey only"
            )
        tensors = layers.tensors(entry.desc, of_source=is_push)
        ours = cache_layout.block_runs(entry.desc, tensors, ours_at)

        def runs(found: wire.Cache) -> TransferRuns:
            theirs = layers.tensors(found.desc, of_source=not is_push, other=tensors)
            if is_blocks:
                cache_layout.same_rows(found.desc, entry.desc)
                cache_layout.block_indices(their_name, found.desc, theirs_at)
                return ours, cache_layout.block_runs(found.desc, theirs, theirs_at), theirs
            refuse_found_blocks(found)
            row = found.desc, theirs, found.row, len(ours_at), entry.row_bytes
            return ours, cache_layout.row_as_blocks(*row), theirs

        self._transfer(key, entry, runs, is_push=is_push)

    def _transfer(
        self,
        key: wire.AnyKey,
        entry: Entry,
        runs: Callable[[wire.Cache], TransferRuns],
        *,
        is_push: bool,
    ) -> None:
        if isinstance(key, CacheKey):
            key.index  # noqa: B018 - refuse an invalid key before any request
        with self._links.call(key.cluster_id) as peer:
            peer.transfer(key, entry, runs, is_push=is_push)

    # --- layer by layer --------------------------------------------------------------------------

    @manager_call(LLMRole.PROMPT)
    def transfer_cache_async(
        self,
        src_cache: Handle,
        layer_synchronizer: LayerSynchronizer,
        transfer_configs: Sequence[Config],
        src_block_indices: Sequence[int] | None = None,
        dst_block_indices: Sequence[int] | None = None,
        dst_block_memory_size: int | None = None,
    ) -> CacheTask:
        """Push a device cache layer by layer, each when its synchronizer allows; see `layers`.

        Returns at once. Configurations are `TransferWithCacheKeyConfig` with
        `enable_remote_cache_accessible`, otherwise `TransferConfig`. Blocks are sent to blocks. A
        row is sent to a row, or to blocks of `dst_block_memory_size` bytes in each tensor. In the
        first generation only a PROMPT may call it.
        """
        checks.instance("src_cache", src_cache, self._handle)
        checks.instance("layer_synchronizer", layer_synchronizer, (LayerSynchronizer,))
        given: list[Config] = checks.instances(
            "transfer_configs", transfer_configs, (TransferConfig, TransferWithCacheKeyConfig)
        )
        configs = [replace(one) for one in given]  # checks fields assigned after construction
        entry = self._caches.own("src_cache", src_cache)
        if not configs:
            raise LLMParamError("transfer_configs is empty; name at least one")
        kind = (
            TransferWithCacheKeyConfig if self._options.remembers_remote_caches else TransferConfig
        )
        if not all(isinstance(config, kind) for config in configs):
            raise LLMParamError(
                "transfer_configs must be TransferWithCacheKeyConfig with"
                " enable_remote_cache_accessible, TransferConfig without it"
            )
        if entry.desc.placement is Placement.HOST:
            raise LLMParamError("src_cache lies in host memory; the call is for device caches")
        if len(entry.addrs) > 1:
            raise LLMParamError("transfer_cache_async is not for a process with several devices")
        if entry.desc.num_tensors % TENSORS_PER_LAYER:
            raise LLMParamError(
                f"src_cache has {entry.desc.num_tensors} tensors; K and V of each layer are needed"
            )
        blocks = src_block_indices, dst_block_indices, dst_block_memory_size
        sending = LayerPushes(self._links, entry, configs, *blocks)
        return self._sender.send(layer_synchronizer, sending.layers, sending.push_layer)


def model_of(key: BlocksCacheKey | None) -> int | None:
    """Return the model of an optional key argument. Raises `TypeError`."""
    if key is None:
        return None
    return checks.instance("blocks_cache_key", key, BlocksCacheKey).model_id


def refuse_blocks(name: str, cache: CacheHandle) -> None:
    """Refuse a cache that has no rows."""
    if not cache.is_rows_cache:
        raise LLMParamError(f"{name} is a blocks cache, and the call is for rows")


def refuse_rows(name: str, cache: CacheHandle) -> None:
    """Refuse a cache that has no blocks."""
    if not cache.is_blocks_cache:
        raise LLMParamError(f"{name} is no blocks cache, and the call is for blocks")
