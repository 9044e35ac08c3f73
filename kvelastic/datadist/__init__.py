"""The interface of LLM-DataDist on elastic caches: clusters link and transfer KV between caches.

    from kvelastic.datadist import *                  # or the alias: `kvelastic.datadist_alias`

    config = LLMConfig()
    config.device_id = 0
    config.enable_cache_manager = True
    config.mem_pool_cfg = '{"memory_size": 1073741824}'
    datadist = LLMDataDist(LLMRole.MIX, cluster_id=1)
    datadist.init(config.generate_options())
    cache = datadist.cache_manager.allocate_cache(CacheDesc(2, [4, 1024], DataType.DT_FLOAT16))

This is a thin layer. `kvelastic.transfer` provides links, leases and copies between processes;
`kvelastic.pool` provides memory. `docs/datadist.md` describes the behaviour, the rights of a peer
and the differences from the original. Does not import torch.
"""

from kvelastic.datadist.caches import Cache, KvCache
from kvelastic.datadist.datadist import LLMDataDist
from kvelastic.datadist.descriptors import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    LLMClusterInfo,
    MemInfo,
)
from kvelastic.datadist.enums import DataType, LLMRole, Memtype, Placement, RegisterMemStatus
from kvelastic.datadist.first_generation import KvCacheManager, Tensor
from kvelastic.datadist.layers import (
    CacheTask,
    LayerSynchronizer,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from kvelastic.datadist.managers import CacheManager
from kvelastic.datadist.options import LLMConfig
from kvelastic.datadist.status import LLMException, LLMStatusCode, Status

LlmConfig = LLMConfig
"""Alias for the original's older name."""

__all__ = [
    "BlocksCacheKey", "Cache", "CacheDesc", "CacheKey", "CacheKeyByIdAndIndex", "CacheManager",
    "CacheTask", "DataType", "KvCache", "KvCacheManager", "LLMClusterInfo", "LLMConfig",
    "LLMDataDist", "LLMException", "LLMRole", "LLMStatusCode", "LayerSynchronizer", "LlmConfig",
    "MemInfo", "Memtype", "Placement", "RegisterMemStatus", "Status", "Tensor", "TransferConfig",
    "TransferWithCacheKeyConfig",
]  # fmt: skip
