"""`KvCacheManager`, the first generation: a PROMPT fills caches, a DECODER pulls them.

    manager = datadist.kv_cache_manager                                  # of a DECODER
    cache = manager.allocate_cache(CacheDesc(80, [1, 2048], DataType.DT_FLOAT16))
    manager.pull_cache(CacheKey(1, req_id=7), cache)
    manager.get_cache_tensors(cache, 0)[0].numpy()

A process may have several devices: a cache has a copy on each then, and the n-th device of a peer
is pulled from by our n-th. Every call may be made from any thread; they raise as those of
`CacheManager`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvelastic.datadist import checks
from kvelastic.datadist.byte_copies import copy_to_host
from kvelastic.datadist.caches import KvCache
from kvelastic.datadist.descriptors import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
)
from kvelastic.datadist.enums import DataType, LLMRole, Placement, numpy_name
from kvelastic.datadist.layer_pushes import Config
from kvelastic.datadist.layers import CacheTask, LayerSynchronizer
from kvelastic.datadist.local_caches import LocalCaches
from kvelastic.datadist.manager_calls import ManagerCalls, only_layers
from kvelastic.datadist.options import Options
from kvelastic.datadist.remote import Remote
from kvelastic.datadist.status import LLMParamError, as_llm_exceptions

if TYPE_CHECKING:
    import numpy as np


class Tensor:
    """A host copy of a cache's tensor on one device; it shares no memory with the cache."""

    def __init__(self, data: bytearray, shape: Sequence[int], data_type: DataType) -> None:
        self._data = data
        self.shape = tuple(shape)
        self.dtype = data_type

    def numpy(self) -> np.ndarray:
        """The contents as an array of `shape`; bfloat16, which numpy does not have, as float32."""
        import numpy as np

        found = np.frombuffer(self._data, dtype=numpy_name(self.dtype)).reshape(self.shape)
        if self.dtype is DataType.DT_BF16:  # the upper half of a float32
            return (found.astype(np.uint32) << 16).view(np.float32)
        return found


class KvCacheManager(ManagerCalls):
    """See the module; `LLMDataDist.kv_cache_manager` is the only one of its kind."""

    def __init__(
        self, caches: LocalCaches, remote: Remote, options: Options, role: LLMRole
    ) -> None:
        super().__init__(caches, remote, options)
        self._role = role

    def is_initialized(self) -> bool:
        """False after `LLMDataDist.finalize`: no other call may be made then."""
        return self._initialized

    def switch_role(self, role: LLMRole) -> None:
        """For `LLMDataDist.switch_role`."""
        self._role = role

    # --- caches ----------------------------------------------------------------------------------

    def allocate_cache(self, cache_desc: CacheDesc, cache_keys: Sequence[CacheKey] = ()) -> KvCache:
        """A device cache, of a PROMPT with a key for each row.

        As `CacheManager.allocate_cache`, but for `LLM_DEVICE_OUT_OF_MEMORY`. The id's reference
        also goes with the handle.
        """
        self._refuse_finalized()
        checks.instance("cache_desc", cache_desc, CacheDesc)
        keys = checks.instances("cache_keys", cache_keys, CacheKey)
        self._refuse_host(cache_desc)
        if keys and self._role is not LLMRole.PROMPT:
            raise LLMParamError(f"cache_keys are of a PROMPT, and this is a {self._role.name}")
        with as_llm_exceptions("allocate_cache"):
            entry = self._caches.allocate(cache_desc, keys=keys)
        handle = KvCache(entry.cache_id, cache_desc, entry.addrs)
        return handle.free_on_delete(self._caches.delete_later)

    def allocate_blocks_cache(
        self, cache_desc: CacheDesc, blocks_cache_key: BlocksCacheKey | None = None
    ) -> KvCache:
        """A device cache whose rows are blocks; a key is of a PROMPT."""
        self._refuse_finalized()
        checks.instance("cache_desc", cache_desc, CacheDesc)
        self._refuse_host(cache_desc)
        model_id = None
        if blocks_cache_key is not None:
            model_id = checks.instance(
                "blocks_cache_key", blocks_cache_key, BlocksCacheKey
            ).model_id
            if self._role is LLMRole.DECODER:
                raise LLMParamError("blocks_cache_key is of a PROMPT, and this is a DECODER")
        with as_llm_exceptions("allocate_blocks_cache"):
            entry = self._caches.allocate(cache_desc, model_id=model_id, is_blocks=True)
        handle = KvCache(entry.cache_id, cache_desc, entry.addrs, is_blocks_cache=True)
        return handle.free_on_delete(self._caches.delete_later)

    def deallocate_cache(self, cache: KvCache) -> None:
        """Drop the id's reference, of a blocks cache too; twice is no error."""
        self._refuse_finalized()
        checks.instance("cache", cache, KvCache)
        if cache.is_cpu_cache:
            raise LLMParamError("a CPU cache is its maker's; there is nothing to deallocate")
        with as_llm_exceptions("deallocate_cache"):
            self._caches.deallocate(cache.cache_id)
        cache.invalidate()

    def remove_cache_key(self, cache_key: CacheKey) -> None:
        """Drop a key's reference; twice is no error. Of a PROMPT."""
        self._refuse_finalized()
        self._refuse_role("remove_cache_key", LLMRole.PROMPT)
        checks.instance("cache_key", cache_key, CacheKey)
        with as_llm_exceptions("remove_cache_key"):
            self._caches.remove_key(cache_key.index)

    def get_cache_tensors(self, cache: KvCache, tensor_index: int = 0) -> list[Tensor]:
        """Host copies of one tensor, one for each device."""
        self._refuse_finalized()
        checks.instance("cache", cache, KvCache)
        desc = cache.cache_desc
        checks.integer("tensor_index", tensor_index, most=desc.num_tensors - 1)
        found = []
        with as_llm_exceptions("get_cache_tensors"), self._caches.held_handle("cache", cache) as at:
            for number, addrs in enumerate(at):
                data = bytearray(desc.size)
                gpu = self._caches.gpu(number) if desc.placement is Placement.DEVICE else None
                copy_to_host(addrs[tensor_index], memoryview(data), gpu=gpu)
                found.append(Tensor(data, desc.shape, desc.data_type))
        return found

    # --- copies in this process ------------------------------------------------------------------

    def copy_cache(
        self,
        dst: KvCache,
        src: KvCache,
        dst_batch_index: int = 0,
        src_batch_index: int = 0,
        offset: int = 0,
        size: int = -1,
        req_id: int | None = None,
    ) -> None:
        """As `CacheManager.copy_cache`; of device caches."""
        for name, cache in (("dst", dst), ("src", src)):
            checks.instance(name, cache, KvCache)
            if cache.is_cpu_cache:
                raise LLMParamError(f"{name} is a CPU cache; copy_cache is for device caches")
        self._copy_cache(dst, src, dst_batch_index, src_batch_index, offset, size, req_id)

    def copy_blocks(self, cache: KvCache, copy_block_info: dict[int, list[int]]) -> None:
        """Copy each block to its list of blocks, in all tensors."""
        self._copy_blocks(checks.instance("cache", cache, KvCache), copy_block_info)

    def swap_blocks(
        self, src_cache: KvCache, dst_cache: KvCache, src_to_dst: dict[int, int]
    ) -> None:
        """As `CacheManager.swap_blocks`, on each device."""
        if src_cache is None or dst_cache is None or src_to_dst is None:
            raise AttributeError("swap_blocks() needs two caches and a dict, and got None")
        self._swap_blocks(
            checks.instance("src_cache", src_cache, KvCache),
            checks.instance("dst_cache", dst_cache, KvCache),
            src_to_dst,
        )

    # --- transfers -------------------------------------------------------------------------------

    def pull_cache(
        self,
        cache_key: CacheKey | CacheKeyByIdAndIndex,
        kv_cache: KvCache,
        batch_index: int = 0,
        size: int = -1,
        **kwargs: object,
    ) -> None:
        """As `CacheManager.pull_cache`, with `src_cache_offset` and `dst_cache_offset` in bytes.

        Of a DECODER.
        """
        self._refuse_finalized()
        self._refuse_role("pull_cache", LLMRole.DECODER)
        offsets = _offsets(kwargs)
        layers = only_layers("pull_cache", kwargs)
        checks.instance("cache_key", cache_key, (CacheKey, CacheKeyByIdAndIndex))
        checks.instance("kv_cache", kv_cache, KvCache)
        checks.size("size", size)
        with as_llm_exceptions("pull_cache"):
            self._pull_row(cache_key, kv_cache, batch_index, size, layers, offsets)

    def pull_blocks(
        self,
        prompt_cache_key: BlocksCacheKey,
        decoder_kv_cache: KvCache,
        prompt_blocks: Sequence[int],
        decoder_blocks: Sequence[int],
        **kwargs: object,
    ) -> None:
        """Copy a PROMPT's blocks to blocks of ours, in order. Of a DECODER."""
        self._refuse_finalized()
        self._refuse_role("pull_blocks", LLMRole.DECODER)
        layers = only_layers("pull_blocks", kwargs)
        checks.instance("prompt_cache_key", prompt_cache_key, BlocksCacheKey)
        checks.instance("decoder_kv_cache", decoder_kv_cache, KvCache)
        checks.integers("prompt_blocks", prompt_blocks)
        with as_llm_exceptions("pull_blocks"):
            self._pull_blocks(
                prompt_cache_key, decoder_kv_cache, prompt_blocks, decoder_blocks, layers
            )

    def transfer_cache_async(
        self,
        src_cache: KvCache,
        layer_synchronizer: LayerSynchronizer,
        transfer_configs: Sequence[Config],
        src_block_indices: Sequence[int] | None = None,
        dst_block_indices: Sequence[int] | None = None,
        dst_block_memory_size: int | None = None,
    ) -> CacheTask:
        """As `CacheManager.transfer_cache_async`, by `TransferConfig`. Of a PROMPT."""
        self._refuse_finalized()
        self._refuse_role("transfer_cache_async", LLMRole.PROMPT)
        return self._transfer_cache_async(
            checks.instance("src_cache", src_cache, KvCache),
            layer_synchronizer,
            transfer_configs,
            src_block_indices,
            dst_block_indices,
            dst_block_memory_size,
        )

    def _refuse_role(self, call: str, role: LLMRole) -> None:
        if self._role is not role:
            raise LLMParamError(f"{call} is of a {role.name}, and this is a {self._role.name}")

    @staticmethod
    def _refuse_host(desc: CacheDesc) -> None:
        if desc.placement is not Placement.DEVICE:
            raise LLMParamError("only device caches are allocated; use KvCache.create_cpu_cache")


def _offsets(kwargs: dict[str, object]) -> tuple[int, int]:
    found = []
    for name in ("src_cache_offset", "dst_cache_offset"):
        value = kwargs.pop(name, None)
        found.append(0 if value is None else checks.integer(name, value, most=(1 << 63) - 1))
    return found[0], found[1]
