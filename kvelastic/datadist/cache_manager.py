"""`CacheManager`, the second generation: either side pulls and pushes, memory is registered.

    manager = datadist.cache_manager
    cache = manager.register_blocks_cache(desc, addrs, BlocksCacheKey(1))
    manager.pull_blocks(BlocksCacheKey(2), cache, [0, 1], [4, 5])

Every call may be made from any thread, and blocks until it is done or `sync_kv_timeout` is over.
Calls raise `TypeError` for a wrong type, `LLMParamError` (a `ValueError`) for a wrong value, and
`LLMException` for all else; `docs/datadist.md` has the codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from kvelastic.datadist import checks
from kvelastic.datadist.caches import Cache
from kvelastic.datadist.descriptors import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    MemInfo,
)
from kvelastic.datadist.enums import Placement
from kvelastic.datadist.layer_pushes import Config
from kvelastic.datadist.layers import CacheTask, LayerSynchronizer
from kvelastic.datadist.manager_calls import LayerArguments, ManagerCalls, only_layers
from kvelastic.datadist.pieces import TENSORS_PER_LAYER
from kvelastic.datadist.status import (
    LLMException,
    LLMParamError,
    LLMStatusCode,
    as_llm_exceptions,
)


class CacheManager(ManagerCalls):
    """See the module; `LLMDataDist.cache_manager` is the only one of its kind."""

    # --- caches with memory of their own ---------------------------------------------------------

    def allocate_cache(self, cache_desc: CacheDesc, cache_keys: Sequence[CacheKey] = ()) -> Cache:
        """A cache in the pool of its placement, a key for each row.

        Keys are fewer than rows where the last rows have none; one with `req_id` 2**64-1 keeps a
        row free, and of equal keys the last counts. Memory goes when the id (`deallocate_cache`)
        and all keys (pulled, pushed or removed) are gone. Raises `LLM_FEATURE_NOT_ENABLED` without
        such a pool, `LLM_OUT_OF_MEMORY`, `LLM_PARAM_INVALID` for a key that another cache has.
        """
        self._refuse_finalized()
        checks.instance("cache_desc", cache_desc, CacheDesc)
        keys = checks.instances("cache_keys", cache_keys, CacheKey)
        with as_llm_exceptions("allocate_cache"):
            entry = self._caches.allocate(cache_desc, keys=keys)
        return Cache(entry.cache_id, cache_desc, entry.addrs)

    def deallocate_cache(self, cache: Cache) -> None:
        """Drop the id's reference; the handle is of no use then. Twice is no error."""
        self._refuse_finalized()
        checks.instance("cache", cache, Cache)
        if not cache.is_rows_cache:
            raise LLMParamError("a blocks cache is deallocated by deallocate_blocks_cache")
        self._deallocate(cache)

    def allocate_blocks_cache(
        self, cache_desc: CacheDesc, blocks_cache_key: BlocksCacheKey | None = None
    ) -> Cache:
        """A cache whose rows are blocks, one a model may be found by its key. As `allocate_cache`.

        It goes with `deallocate_blocks_cache`, whoever knows the key.
        """
        self._refuse_finalized()
        checks.instance("cache_desc", cache_desc, CacheDesc)
        model_id = _model_of(blocks_cache_key)
        with as_llm_exceptions("allocate_blocks_cache"):
            entry = self._caches.allocate(cache_desc, model_id=model_id, is_blocks=True)
        return Cache(entry.cache_id, cache_desc, entry.addrs, is_blocks_cache=True)

    def deallocate_blocks_cache(self, cache: Cache) -> None:
        """Give a blocks cache back; the handle is of no use then. Twice is no error."""
        self._refuse_finalized()
        checks.instance("cache", cache, Cache)
        if not cache.is_blocks_cache:
            raise LLMParamError("the cache is no blocks cache; use deallocate_cache")
        self._deallocate(cache)

    def _deallocate(self, cache: Cache) -> None:
        """What was registered is left as it is, as is a CPU cache."""
        with as_llm_exceptions("deallocate"):
            if self._caches.deallocate(cache.cache_id):
                cache.invalidate()

    def remove_cache_key(self, cache_key: CacheKey) -> None:
        """Drop a key's reference: its row cannot be pulled any more. Twice is no error."""
        self._refuse_finalized()
        checks.instance("cache_key", cache_key, CacheKey)
        with as_llm_exceptions("remove_cache_key"):
            self._caches.remove_key(cache_key.index)

    # --- caches over memory of the caller's ------------------------------------------------------

    def register_cache(
        self,
        cache_desc: CacheDesc,
        addrs: Sequence[int],
        cache_keys: Sequence[CacheKey] = (),
        remote_accessible: bool | None = None,
    ) -> Cache:
        """A cache over memory of the caller's, which stays mapped until `unregister_cache`.

        Peers reach it if it is `remote_accessible`: by default device memory, unless it is
        registered after the first link. Raises `LLM_PARAM_INVALID`, also for more than 240
        addresses in all.
        """
        return self._register(cache_desc, addrs, cache_keys, None, remote_accessible, False)

    def register_blocks_cache(
        self,
        cache_desc: CacheDesc,
        addrs: Sequence[int],
        blocks_cache_key: BlocksCacheKey | None = None,
        remote_accessible: bool | None = None,
    ) -> Cache:
        """The same for a cache whose rows are blocks."""
        return self._register(cache_desc, addrs, (), blocks_cache_key, remote_accessible, True)

    def _register(
        self,
        desc: CacheDesc,
        addrs: Sequence[int],
        keys: Sequence[CacheKey],
        blocks_key: BlocksCacheKey | None,
        remote_accessible: bool | None,
        is_blocks: bool,
    ) -> Cache:
        self._refuse_finalized()
        if desc is None or addrs is None:
            raise AttributeError("a cache needs a cache_desc and addrs, and got None")
        checks.instance("cache_desc", desc, CacheDesc)
        places = checks.integers("addrs", addrs, least=1)
        found = checks.instances("cache_keys", keys, CacheKey)
        if remote_accessible is None:
            is_late = self._remote.has_linked
            remote_accessible = desc.placement is Placement.DEVICE and not is_late
        checks.flag("remote_accessible", remote_accessible)
        with as_llm_exceptions("register"):
            entry = self._caches.register(
                desc,
                places,
                remote_accessible=remote_accessible,
                keys=found,
                model_id=_model_of(blocks_key),
                is_blocks=is_blocks,
            )
            try:
                if remote_accessible:
                    self._remote.expose(entry)
            except BaseException:
                self._caches.unregister(entry.cache_id)
                raise
        return Cache(entry.cache_id, desc, entry.addrs, is_blocks_cache=is_blocks)

    def unregister_cache(self, cache_id: int) -> None:
        """Forget a registered cache with its keys; waits for transfers that use it.

        An unknown id is no error. Raises `LLM_PARAM_INVALID` for one that was allocated.
        """
        self._refuse_finalized()
        checks.integer("cache_id", cache_id, least=-(1 << 63), most=(1 << 63) - 1)
        with as_llm_exceptions("unregister_cache"):
            entry = self._caches.unregister(cache_id)
            if entry is not None:
                self._remote.withdraw(entry)

    def remap_registered_memory(self, mem_infos: MemInfo | Sequence[MemInfo]) -> NoReturn:
        """Not supported, here as in the original: `LLM_FEATURE_NOT_ENABLED`."""
        if not isinstance(mem_infos, MemInfo):
            checks.instances("mem_infos", mem_infos, MemInfo)
        raise LLMException(
            "remap_registered_memory is reserved: there are no Ascend devices to be mended here",
            status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
        )

    # --- copies in this process ------------------------------------------------------------------

    def copy_cache(
        self,
        dst: Cache,
        src: Cache,
        dst_batch_index: int = 0,
        src_batch_index: int = 0,
        offset: int = 0,
        size: int = -1,
        req_id: int | None = None,
    ) -> None:
        """Copy `size` bytes from `offset` of a row to the same place of another, in all tensors.

        -1: to the row's end. `req_id` is for the log.
        """
        self._copy_cache(
            checks.instance("dst", dst, Cache),
            checks.instance("src", src, Cache),
            dst_batch_index,
            src_batch_index,
            offset,
            size,
            req_id,
        )

    def copy_blocks(self, cache: Cache, copy_block_info: dict[int, list[int]]) -> None:
        """Copy each block to its list of blocks, in all tensors."""
        self._copy_blocks(checks.instance("cache", cache, Cache), copy_block_info)

    def swap_blocks(self, src_cache: Cache, dst_cache: Cache, src_to_dst: dict[int, int]) -> None:
        """Copy blocks between a host and a device cache, neighbours in one piece.

        None raises `AttributeError`.
        """
        if src_cache is None or dst_cache is None or src_to_dst is None:
            raise AttributeError("swap_blocks() needs two caches and a dict, and got None")
        self._swap_blocks(
            checks.instance("src_cache", src_cache, Cache),
            checks.instance("dst_cache", dst_cache, Cache),
            src_to_dst,
        )

    # --- transfers -------------------------------------------------------------------------------

    def pull_cache(
        self,
        cache_key: CacheKey | CacheKeyByIdAndIndex,
        cache: Cache,
        batch_index: int = 0,
        size: int = -1,
        **kwargs: object,
    ) -> None:
        """Copy a peer's row into a row of ours: `size` bytes of each tensor, -1 for all of ours.

        `src_layer_range`, `dst_layer_range` (`range`, step 1) and `tensor_num_per_layer` choose
        layers. A request's key is dropped when all tensors of its row were pulled, by whatever key;
        a prefix stays, and so do keys of registered caches. Raises
        `LLM_KV_CACHE_NOT_EXIST`, `LLM_NOT_YET_LINK`, `LLM_LINK_BUSY`, and `LLM_TIMEOUT`, after
        which the link has to be made again.
        """
        self._refuse_finalized()
        layers = only_layers("pull_cache", kwargs)
        checks.instance("cache_key", cache_key, (CacheKey, CacheKeyByIdAndIndex))
        checks.instance("cache", cache, Cache)
        checks.size("size", size)
        self._refuse_consumed_key(cache_key)
        with as_llm_exceptions("pull_cache"):
            self._pull_row(cache_key, cache, batch_index, size, layers)

    def pull_blocks(
        self,
        src_cache_key: CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey,
        dst_cache: Cache,
        src_blocks: Sequence[int] | None = (),
        dst_blocks: Sequence[int] = (),
        **kwargs: object,
    ) -> None:
        """Copy a peer's blocks to blocks of ours, in order; of another key, its row fills them.

        Layers and errors as `pull_cache`.
        """
        self._refuse_finalized()
        layers = only_layers("pull_blocks", kwargs)
        checks.instance(
            "src_cache_key", src_cache_key, (CacheKey, CacheKeyByIdAndIndex, BlocksCacheKey)
        )
        checks.instance("dst_cache", dst_cache, Cache)
        self._refuse_consumed_key(src_cache_key)
        with as_llm_exceptions("pull_blocks"):
            self._pull_blocks(
                src_cache_key,
                dst_cache,
                () if src_blocks is None else src_blocks,
                dst_blocks,
                layers,
            )

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
        """Copy a row of ours into a peer's; keys there are dropped as by a pull.

        Needs `enable_remote_cache_accessible` (`LLM_FEATURE_NOT_ENABLED`); `size` must be -1, and
        both ranges equally long. Errors as `pull_cache`.
        """
        self._refuse_finalized()
        layers = self._push_layers(src_layer_range, dst_layer_range, tensor_num_per_layer)
        checks.instance("dst_cache_key", dst_cache_key, CacheKeyByIdAndIndex)
        checks.instance("src_cache", src_cache, Cache)
        if checks.size("size", size) != -1:
            raise LLMParamError(f"size={size} is not accepted; push_cache copies whole rows: -1")
        with as_llm_exceptions("push_cache"):
            self._push_row(dst_cache_key, src_cache, src_batch_index, layers)

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
        """Copy blocks of ours to blocks of a peer's, in order. As `push_cache`."""
        self._refuse_finalized()
        layers = self._push_layers(src_layer_range, dst_layer_range, tensor_num_per_layer)
        checks.instance("dst_cache_key", dst_cache_key, BlocksCacheKey)
        checks.instance("src_cache", src_cache, Cache)
        with as_llm_exceptions("push_blocks"):
            self._push_blocks(dst_cache_key, src_cache, src_blocks, dst_blocks, layers)

    def transfer_cache_async(
        self,
        src_cache: Cache,
        layer_synchronizer: LayerSynchronizer,
        transfer_configs: Sequence[Config],
        src_block_indices: Sequence[int] | None = None,
        dst_block_indices: Sequence[int] | None = None,
        dst_block_memory_size: int | None = None,
    ) -> CacheTask:
        """Push a device cache layer by layer, each when its synchronizer says so; see `layers`.

        Answers at once. Configurations are `TransferWithCacheKeyConfig` with
        `enable_remote_cache_accessible` and `TransferConfig` without. A blocks cache is sent to
        blocks, a row to a row, or to blocks of `dst_block_memory_size` bytes a tensor.
        """
        return self._transfer_cache_async(
            checks.instance("src_cache", src_cache, Cache),
            layer_synchronizer,
            transfer_configs,
            src_block_indices,
            dst_block_indices,
            dst_block_memory_size,
        )

    def _push_layers(self, source: object, target: object, tensors: object) -> LayerArguments:
        if not self._options.remembers_remote_caches:
            raise LLMException(
                "a push needs enable_remote_cache_accessible; set it before init, on both sides",
                status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
            )
        layers = LayerArguments(source, target, tensors)
        if not layers.is_same:
            raise LLMParamError("src_layer_range and dst_layer_range must be equally long")
        return layers

    def _refuse_consumed_key(self, key: object) -> None:
        """A key that a pull uses up is of no use where the peer's table is only remembered."""
        if self._options.remembers_remote_caches and isinstance(key, CacheKey):
            raise LLMParamError(
                "with enable_remote_cache_accessible a row is named by CacheKeyByIdAndIndex"
            )


def _model_of(key: BlocksCacheKey | None) -> int | None:
    if key is None:
        return None
    checks.instance("blocks_cache_key", key, BlocksCacheKey)
    return key.model_id
