"""`KvCacheManager` and `CacheManager`: the calls in which the generations differ.

    manager = datadist.kv_cache_manager                  # first generation, of a DECODER
    cache = manager.allocate_cache(CacheDesc(80, [1, 2048], DataType.DT_FLOAT16))
    manager.pull_cache(CacheKey(1, req_id=7), cache)
    manager.get_cache_tensors(cache, 0)[0].numpy()

    manager = datadist.cache_manager                     # second generation
    cache = manager.register_blocks_cache(desc, addrs, BlocksCacheKey(1))
    manager.pull_blocks(BlocksCacheKey(2), cache, [0, 1], [4, 5])

In the first generation, a PROMPT fills caches and a DECODER pulls them. If a process has several
devices, a cache has a copy on each, and the n-th local device pulls from the n-th device of a peer.
In the second generation both sides pull and push, and memory can be registered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from kvelastic.datadist import checks
from kvelastic.datadist.byte_copies import copy_to_host
from kvelastic.datadist.cache_layout import TENSORS_PER_LAYER, LayerRanges, Part, row_index
from kvelastic.datadist.cache_table import Entry
from kvelastic.datadist.caches import Cache, KvCache
from kvelastic.datadist.descriptors import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    MemInfo,
)
from kvelastic.datadist.enums import DataType, LLMRole, Placement, numpy_name
from kvelastic.datadist.links import Links
from kvelastic.datadist.local_caches import LocalCaches
from kvelastic.datadist.manager_calls import ManagerCalls, manager_call, model_of
from kvelastic.datadist.options import Options
from kvelastic.datadist.status import LLMParamError, LLMStatusCode, failure

if TYPE_CHECKING:
    import numpy as np


class Tensor:
    """A host copy of a cache's tensor on one device. It shares no memory with the cache."""

    def __init__(self, data: bytearray, shape: Sequence[int], data_type: DataType) -> None:
        self._data = data
        self.shape = tuple(shape)
        self.dtype = data_type

    def numpy(self) -> np.ndarray:
        """Return the contents as an array of `shape`; bfloat16, unknown to numpy, as float32."""
        import numpy as np

        found = np.frombuffer(self._data, dtype=numpy_name(self.dtype)).reshape(self.shape)
        if self.dtype is DataType.DT_BF16:  # bfloat16 is the upper half of a float32
            return (found.astype(np.uint32) << 16).view(np.float32)
        return found


class KvCacheManager(ManagerCalls[KvCache]):
    """The manager of the first generation. Obtain it from `LLMDataDist.kv_cache_manager`."""

    _handle = KvCache

    def __init__(self, caches: LocalCaches, links: Links, options: Options, role: LLMRole) -> None:
        super().__init__(caches, links, options)
        self._role = role

    def is_initialized(self) -> bool:
        """False after `LLMDataDist.finalize`: all other calls fail then."""
        return self._initialized

    def switch_role(self, role: LLMRole) -> None:
        """Set the role. Called by `LLMDataDist.switch_role`."""
        self._role = role

    @manager_call()
    def get_cache_tensors(self, cache: KvCache, tensor_index: int = 0) -> list[Tensor]:
        """Return host copies of one tensor, one for each device. Blocks."""
        checks.instance("cache", cache, KvCache)
        entry, desc = cache.entry, cache.cache_desc
        checks.integer("tensor_index", tensor_index, most=desc.num_tensors - 1)
        found = []
        with self._caches.held(entry):
            for number, addrs in enumerate(entry.addrs):
                data = bytearray(desc.size)
                gpu = self._caches.gpu(number) if desc.placement is Placement.DEVICE else None
                copy_to_host(addrs[tensor_index], memoryview(data), gpu=gpu)
                found.append(Tensor(data, desc.shape, desc.data_type))
        return found

    @manager_call(LLMRole.DECODER)
    def pull_cache(
        self,
        cache_key: CacheKey | CacheKeyByIdAndIndex,
        kv_cache: KvCache,
        batch_index: int = 0,
        size: int = -1,
        **kwargs: object,
    ) -> None:
        """Copy a peer's row into a local row; for a DECODER. Blocks.

        Also takes `src_cache_offset` and `dst_cache_offset` in bytes. Otherwise as
        `CacheManager.pull_cache`.
        """
        names = ("src_cache_offset", "dst_cache_offset")
        given = {name: kwargs.pop(name, None) for name in names}
        theirs, ours = (
            0 if value is None else checks.integer(name, value, most=checks.MAX_INT64)
            for name, value in given.items()
        )
        layers = LayerRanges.only("pull_cache", kwargs)
        checks.instance("cache_key", cache_key, (CacheKey, CacheKeyByIdAndIndex))
        checks.size("size", size)
        entry = self._own_entry("kv_cache", kv_cache, is_blocks=False)
        row = row_index("batch_index", entry.desc, batch_index)
        self._transfer_row(cache_key, entry, layers, Part(row=row, offset=ours), size, theirs)

    @manager_call(LLMRole.DECODER)
    def pull_blocks(
        self,
        prompt_cache_key: BlocksCacheKey,
        decoder_kv_cache: KvCache,
        prompt_blocks: Sequence[int],
        decoder_blocks: Sequence[int],
        **kwargs: object,
    ) -> None:
        """Copy a PROMPT's blocks to local blocks, in order; for a DECODER. Blocks."""
        layers = LayerRanges.only("pull_blocks", kwargs)
        checks.instance("prompt_cache_key", prompt_cache_key, BlocksCacheKey)
        checks.integers("prompt_blocks", prompt_blocks)
        entry = self._own_entry("decoder_kv_cache", decoder_kv_cache, is_blocks=True)
        self._transfer_blocks(prompt_cache_key, entry, layers, decoder_blocks, prompt_blocks)


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
        return self._register(cache_desc, addrs, cache_keys, None, remote_accessible, False)

    @manager_call()
    def register_blocks_cache(
        self,
        cache_desc: CacheDesc,
        addrs: Sequence[int],
        blocks_cache_key: BlocksCacheKey | None = None,
        remote_accessible: bool | None = None,
    ) -> Cache:
        """Register a cache whose rows are blocks. Otherwise as `register_cache`."""
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
        if desc is None or addrs is None:
            raise AttributeError("a cache needs a cache_desc and addrs, and got None")
        checks.instance("cache_desc", desc, CacheDesc)
        places = checks.integers("addrs", addrs, least=1)
        found = checks.instances("cache_keys", keys, CacheKey)
        model_id = model_of(blocks_key)
        if remote_accessible is None:
            is_late = self._links.has_linked
            remote_accessible = desc.placement is Placement.DEVICE and not is_late
        checks.instance("remote_accessible", remote_accessible, bool)
        entry = Entry(
            desc,
            is_blocks,
            addrs=(tuple(places),),
            remote_accessible=remote_accessible,
            model_id=model_id,
        )
        self._caches.register(entry, found)
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
        self._transfer_row(cache_key, entry, layers, Part(row=row), size)

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
        self._transfer_blocks(src_cache_key, entry, layers, dst_blocks, of)

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
        self._transfer_row(dst_cache_key, entry, layers, Part(row=row), is_push=True)

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
        self._transfer_blocks(dst_cache_key, entry, layers, src_blocks, dst_blocks, is_push=True)

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
