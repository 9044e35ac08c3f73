"""`KvCacheManager`: the calls in which the first generation differs from the second.

    manager = datadist.kv_cache_manager                  # of a DECODER
    cache = manager.allocate_cache(CacheDesc(80, [1, 2048], DataType.DT_FLOAT16))
    manager.pull_cache(CacheKey(1, req_id=7), cache)
    manager.get_cache_tensors(cache, 0)[0].numpy()

A PROMPT fills caches and a DECODER pulls them. If a process has several devices, a cache has a copy
on each, and the n-th local device pulls from the n-th device of a peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvelastic.datadist import checks
from kvelastic.datadist.byte_copies import copy_to_host
from kvelastic.datadist.cache_layout import LayerRanges, Part, row_index
from kvelastic.datadist.caches import KvCache
from kvelastic.datadist.descriptors import (
    BlocksCacheKey,
    CacheKey,
    CacheKeyByIdAndIndex,
    numpy_name,
)
from kvelastic.datadist.enums import DataType, LLMRole, Placement
from kvelastic.datadist.links import Links
from kvelastic.datadist.local_caches import LocalCaches
from kvelastic.datadist.managers import ManagerCalls, manager_call
from kvelastic.datadist.options import Options
from kvelastic.datadist.peer import Transfer

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
        part = Part(row=row, offset=ours)
        self._transfer(Transfer.of_row(cache_key, entry, layers, part, size, theirs))

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
        self._transfer(
            Transfer.of_blocks(prompt_cache_key, entry, layers, decoder_blocks, prompt_blocks)
        )
