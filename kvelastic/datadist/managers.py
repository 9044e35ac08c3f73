"""`CacheManager`, and the calls that the first generation's `KvCacheManager` shares with it.

    manager = datadist.cache_manager
    cache = manager.register_blocks_cache(desc, addrs, BlocksCacheKey(1))
    manager.pull_blocks(BlocksCacheKey(2), cache, [0, 1], [4, 5])

In the second generation both sides pull and push, and memory can be registered.

Any thread may call. Each call blocks until it is done or `sync_kv_timeout` has passed. Calls raise
`TypeError` for a wrong type, `LLMParamError` (a `ValueError`) for a wrong value, and `LLMException`
otherwise; `docs/datadist.md` lists the codes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, Generic, NoReturn, TypeVar, cast

from kvelastic.datadist import cache_layout, checks
from kvelastic.datadist.cache_layout import TENSORS_PER_LAYER, LayerRanges, Part, row_index
from kvelastic.datadist.caches import Cache, CacheHandle
from kvelastic.datadist.descriptors import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    MemInfo,
)
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
from kvelastic.datadist.local_caches import Entry, Keys, LocalCaches
from kvelastic.datadist.options import Options
from kvelastic.datadist.peer import Transfer
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
        return self._allocate(cache_desc, keys, is_blocks=False)

    @manager_call()
    def allocate_blocks_cache(
        self, cache_desc: CacheDesc, blocks_cache_key: BlocksCacheKey | None = None
    ) -> Handle:
        """Allocate a cache whose rows are blocks. Peers find one such cache per model by its key.

        Deallocation releases it even if peers know the key. Otherwise as `allocate_cache`.
        """
        if blocks_cache_key is not None and self._role is LLMRole.DECODER:
            raise LLMParamError("blocks_cache_key is of a PROMPT, and this is a DECODER")
        return self._allocate(cache_desc, keys_of_blocks(blocks_cache_key), is_blocks=True)

    def _allocate(self, desc: CacheDesc, keys: Keys, *, is_blocks: bool) -> Handle:
        checks.instance("cache_desc", desc, CacheDesc)
        if self._role is not None and desc.placement is not Placement.DEVICE:
            raise LLMParamError("only device caches are allocated; use KvCache.create_cpu_cache")
        entry = Entry(desc, is_blocks)
        self._caches.allocate(entry, keys)
        return self._handle(entry, self._caches.delete_later)

    @manager_call()
    def deallocate_cache(self, cache: Handle) -> None:
        """Drop the id's reference and invalidate the handle. Idempotent.

        In the first generation it also takes blocks caches.
        """
        checks.instance("cache", cache, self._handle)
        if self._role is None:
            self._entry("cache", cache, is_blocks=False)
        elif cache.entry.is_cpu_cache:
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
        target = self._entry("dst", dst, is_blocks=False)
        source = self._entry("src", src, is_blocks=False)
        if self._role is not None and (target.is_cpu_cache or source.is_cpu_cache):
            raise LLMParamError("dst or src is a CPU cache; copy_cache is for device caches")
        checks.integer("offset", offset, most=checks.MAX_INT64)
        checks.size("size", size)
        if req_id is not None:
            checks.integer("req_id", req_id)
        from_row = cache_layout.row_index("src_batch_index", source.desc, src_batch_index)
        to_row = cache_layout.row_index("dst_batch_index", target.desc, dst_batch_index)
        cache_layout.same_shape(source.desc, target.desc)
        size = source.desc.row_bytes - offset if size == -1 else size
        tensors = range(source.desc.num_tensors)
        pairs = cache_layout.pairs_merged(
            cache_layout.row_runs(source.desc, tensors, from_row, offset, size),
            cache_layout.row_runs(target.desc, tensors, to_row, offset, size),
        )
        self._caches.copy(pairs, source, target)
        if req_id is not None:
            _log.debug("copied cache %d to %d (request %d)", src.cache_id, dst.cache_id, req_id)

    @manager_call()
    def copy_blocks(self, cache: Handle, copy_block_info: Mapping[int, Sequence[int]]) -> None:
        """Copy each block to its list of target blocks, in all tensors."""
        entry = self._entry("cache", cache, is_blocks=True)
        checks.instance("copy_block_info", copy_block_info, dict)
        moves = [
            (source, target)
            for source, targets in copy_block_info.items()
            for target in cache_layout.block_indices("copy_block_info", entry.desc, targets)
        ]
        if {source for source, _ in moves} & {target for _, target in moves}:
            raise LLMParamError("a block is copied to and copied from")
        pairs = cache_layout.copied_blocks(entry.desc, entry.desc, moves)
        self._caches.copy(pairs, entry, entry)

    @manager_call()
    def swap_blocks(
        self, src_cache: Handle, dst_cache: Handle, src_to_dst: Mapping[int, int]
    ) -> None:
        """Copy blocks between a host and a device cache; adjacent blocks are copied together.

        Raises `AttributeError` for None.
        """
        if src_cache is None or dst_cache is None or src_to_dst is None:
            raise AttributeError("swap_blocks() needs two caches and a dict, and got None")
        source = self._entry("src_cache", src_cache, is_blocks=True)
        target = self._entry("dst_cache", dst_cache, is_blocks=True)
        checks.instance("src_to_dst", src_to_dst, dict)
        if source.desc.placement is target.desc.placement:
            raise LLMParamError(
                "swap_blocks copies between host and device; both caches are"
                f" {source.desc.placement.name} caches"
            )
        pairs = cache_layout.copied_blocks(source.desc, target.desc, list(src_to_dst.items()))
        self._caches.copy(pairs, source, target)

    def _entry(self, name: str, cache: Handle, *, is_blocks: bool) -> Entry:
        """Return the cache of an argument, which is used by blocks or by rows."""
        entry = checks.instance(name, cache, self._handle).entry
        if is_blocks and not entry.is_blocks:
            raise LLMParamError(f"{name} is no blocks cache, and the call is for blocks")
        if not is_blocks and entry.is_blocks and not entry.is_cpu_cache:
            raise LLMParamError(f"{name} is a blocks cache, and the call is for rows")
        return entry

    # --- transfers -------------------------------------------------------------------------------

    def _own_entry(self, name: str, cache: Handle, *, is_blocks: bool) -> Entry:
        """Return the cache of an argument, which peers copy from or to."""
        self._caches.refuse_foreign(name, checks.instance(name, cache, self._handle).entry)
        return self._entry(name, cache, is_blocks=is_blocks)

    def _transfer(self, transfer: Transfer) -> None:
        with self._links.call(transfer.key.cluster_id) as peer:
            peer.transfer(transfer)

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
        entry = src_cache.entry
        self._caches.refuse_foreign("src_cache", entry)
        by_key = self._options.remembers_remote_caches
        blocks = src_block_indices, dst_block_indices, dst_block_memory_size
        sending = LayerPushes(self._links, entry, given, *blocks, by_key=by_key)
        return self._sender.send(layer_synchronizer, sending.layers, sending.push_layer)


class CacheManager(ManagerCalls[Cache]):
    """The manager of the second generation. Obtain it from `LLMDataDist.cache_manager`."""

    _handle = Cache

    @manager_call()
    def deallocate_blocks_cache(self, cache: Cache) -> None:
        """Release a blocks cache and invalidate its handle. Idempotent."""
        self._entry("cache", cache, is_blocks=True)
        self._deallocate(cache)

    # --- caches over memory of the caller's ------------------------------------------------------

    @manager_call()
    def register_cache(
        self,
        cache_desc: CacheDesc,
        addrs: Sequence[int],
        cache_keys: Sequence[CacheKey] = (),
        remote_accessible: bool | None = None,
    ) -> Cache:
        """Register a cache over the caller's memory, mapped at least until `unregister_cache`.

        Peers can access the cache if `remote_accessible` is true. The default is true for device
        memory registered before the first link, otherwise false. Raises `LLM_PARAM_INVALID`, also
        if the process would have more than 240 registered addresses.
        """
        keys = checks.instances("cache_keys", cache_keys, CacheKey)
        return self._register(cache_desc, addrs, keys, remote_accessible, is_blocks=False)

    @manager_call()
    def register_blocks_cache(
        self,
        cache_desc: CacheDesc,
        addrs: Sequence[int],
        blocks_cache_key: BlocksCacheKey | None = None,
        remote_accessible: bool | None = None,
    ) -> Cache:
        """Register a cache whose rows are blocks. Otherwise as `register_cache`."""
        keys = keys_of_blocks(blocks_cache_key)
        return self._register(cache_desc, addrs, keys, remote_accessible, is_blocks=True)

    def _register(
        self,
        desc: CacheDesc,
        addrs: Sequence[int],
        keys: Keys,
        remote_accessible: bool | None,
        *,
        is_blocks: bool,
    ) -> Cache:
        if desc is None or addrs is None:
            raise AttributeError("a cache needs a cache_desc and addrs, and got None")
        checks.instance("cache_desc", desc, CacheDesc)
        places = checks.integers("addrs", addrs, least=1)
        if remote_accessible is None:
            is_late = self._links.has_linked
            remote_accessible = desc.placement is Placement.DEVICE and not is_late
        checks.instance("remote_accessible", remote_accessible, bool)
        entry = Entry(desc, is_blocks, addrs=(tuple(places),), remote_accessible=remote_accessible)
        self._caches.register(entry, keys)
        try:
            if remote_accessible:
                self._links.exposed.expose(entry)
        except BaseException:
            self._caches.unregister(entry.cache_id)
            raise
        return Cache(entry)

    @manager_call()
    def unregister_cache(self, cache_id: int) -> None:
        """Unregister a cache and its keys. Waits for transfers that use it.

        An unknown id is ignored. Raises `LLM_PARAM_INVALID` for an allocated cache.
        """
        checks.integer("cache_id", cache_id, least=-checks.MAX_INT64 - 1, most=checks.MAX_INT64)
        entry = self._caches.unregister(cache_id)
        if entry is not None:
            self._links.exposed.withdraw(entry)

    def remap_registered_memory(self, mem_infos: MemInfo | Sequence[MemInfo]) -> NoReturn:
        """Raises `LLM_FEATURE_NOT_ENABLED`: not supported, as in the original."""
        if not isinstance(mem_infos, MemInfo):
            checks.instances("mem_infos", mem_infos, MemInfo)
        raise failure(
            LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
            "remap_registered_memory is reserved: there are no Ascend devices to be mended here",
        )

    # --- transfers -------------------------------------------------------------------------------

    @manager_call()
    def pull_cache(
        self,
        cache_key: CacheKey | CacheKeyByIdAndIndex,
        cache: Cache,
        batch_index: int = 0,
        size: int = -1,
        **kwargs: object,
    ) -> None:
        """Copy a peer's row into a local row. Blocks.

        `size` is in bytes of each tensor; -1 copies the whole local row. `src_layer_range`,
        `dst_layer_range` (`range`, step 1) and `tensor_num_per_layer` select layers. A request's
        key is dropped once all tensors of its row were pulled, by any key. Prefix keys and keys of
        registered caches stay. Raises `LLM_KV_CACHE_NOT_EXIST`, `LLM_NOT_YET_LINK`,
        `LLM_LINK_BUSY`, and `LLM_TIMEOUT`, after which the clusters must link again.
        """
        layers = LayerRanges.only("pull_cache", kwargs)
        checks.instance("cache_key", cache_key, (CacheKey, CacheKeyByIdAndIndex))
        checks.size("size", size)
        self._refuse_consumed_key(cache_key)
        entry = self._own_entry("cache", cache, is_blocks=False)
        row = row_index("batch_index", entry.desc, batch_index)
        self._transfer(Transfer.of_row(cache_key, entry, layers, Part(row=row), size))

    @manager_call()
    def pull_blocks(
        self,
        src_cache_key: CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey,
        dst_cache: Cache,
        src_blocks: Sequence[int] | None = (),
        dst_blocks: Sequence[int] = (),
        **kwargs: object,
    ) -> None:
        """Copy a peer's blocks to local blocks, in order. Blocks.

        If the key names a row instead of a blocks cache, the row fills the local blocks. Layer
        arguments and errors are those of `pull_cache`.
        """
        layers = LayerRanges.only("pull_blocks", kwargs)
        keys = (CacheKey, CacheKeyByIdAndIndex, BlocksCacheKey)
        checks.instance("src_cache_key", src_cache_key, keys)
        self._refuse_consumed_key(src_cache_key)
        of = () if src_blocks is None else src_blocks
        entry = self._own_entry("dst_cache", dst_cache, is_blocks=True)
        self._transfer(Transfer.of_blocks(src_cache_key, entry, layers, dst_blocks, of))

    @manager_call()
    def push_cache(
        self,
        dst_cache_key: CacheKeyByIdAndIndex,
        src_cache: Cache,
        src_batch_index: int = 0,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        size: int = -1,
        tensor_num_per_layer: int = TENSORS_PER_LAYER,
    ) -> None:
        """Copy a local row into a peer's row; the peer drops keys as for a pull. Blocks.

        Needs `enable_remote_cache_accessible` (else `LLM_FEATURE_NOT_ENABLED`). `size` must be -1
        and both ranges equally long. Errors are those of `pull_cache`.
        """
        layers = self._push_layers(src_layer_range, dst_layer_range, tensor_num_per_layer)
        checks.instance("dst_cache_key", dst_cache_key, CacheKeyByIdAndIndex)
        if checks.size("size", size) != -1:
            raise LLMParamError(f"size={size} is not accepted; push_cache copies whole rows: -1")
        entry = self._own_entry("src_cache", src_cache, is_blocks=False)
        row = row_index("src_batch_index", entry.desc, src_batch_index)
        self._transfer(Transfer.of_row(dst_cache_key, entry, layers, Part(row=row), is_push=True))

    @manager_call()
    def push_blocks(
        self,
        dst_cache_key: BlocksCacheKey,
        src_cache: Cache,
        src_blocks: Sequence[int] = (),
        dst_blocks: Sequence[int] = (),
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = TENSORS_PER_LAYER,
    ) -> None:
        """Copy local blocks to a peer's blocks, in order. Rules and errors as `push_cache`."""
        layers = self._push_layers(src_layer_range, dst_layer_range, tensor_num_per_layer)
        checks.instance("dst_cache_key", dst_cache_key, BlocksCacheKey)
        entry = self._own_entry("src_cache", src_cache, is_blocks=True)
        self._transfer(
            Transfer.of_blocks(dst_cache_key, entry, layers, src_blocks, dst_blocks, is_push=True)
        )

    def _push_layers(self, source: object, target: object, tensors: object) -> LayerRanges:
        if not self._options.remembers_remote_caches:
            raise failure(
                LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
                "a push needs enable_remote_cache_accessible; set it before init, on both sides",
            )
        layers = LayerRanges(source, target, tensors)
        if len(layers.sources or ()) != len(layers.targets or ()):
            raise LLMParamError("src_layer_range and dst_layer_range must be equally long")
        return layers

    def _refuse_consumed_key(self, key: object) -> None:
        """Refuse a key that a pull consumes: here the peer's caches are only remembered."""
        if self._options.remembers_remote_caches and isinstance(key, CacheKey):
            raise LLMParamError(
                "with enable_remote_cache_accessible a row is named by CacheKeyByIdAndIndex"
            )


def keys_of_blocks(key: BlocksCacheKey | None) -> list[BlocksCacheKey]:
    """Return the keys of a blocks cache with this optional argument. Raises `TypeError`."""
    return [] if key is None else [checks.instance("blocks_cache_key", key, BlocksCacheKey)]
