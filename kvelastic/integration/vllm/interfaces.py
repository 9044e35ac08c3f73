"""kvcached's functions for vLLM, and for integrations written by hand.

    from kvelastic.integration.vllm import interfaces as kvi

    kvi.init_kvelastic(device="cpu")
    tensors = kvi.alloc_kv_cache((2, 8000, 16, 4, 64), 16, torch.bfloat16, "cpu", num_layers=8)
    manager = kvi.get_kv_cache_manager(8000, 16, cell_size=4 * 64 * 2, num_layers=8)
    ids = manager.alloc(4)           # tensors[layer][0][ids[0]] is K of that block, [1] its V
    kvi.shutdown_kvelastic()

`vllm serve` needs none of this: set ENABLE_KVELASTIC=true (see docs/vllm.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvelastic.errors import InvalidArgumentError
from kvelastic.integration.vllm.shapes import HYBRID
from kvelastic.kvcached import embedded
from kvelastic.kvcached.embedded import get_kv_cache_manager, shutdown_kvelastic
from kvelastic.kvcached.engine_calls import EngineCalls
from kvelastic.kvcached.snapshots import get_capabilities
from kvelastic.pool.tensor_views import plan
from kvelastic.pool.tensors import itemsize_of

if TYPE_CHECKING:
    import torch

__all__ = [
    "alloc_kv_cache", "build_kv_views", "get_capabilities", "get_kv_cache_manager",
    "init_kvcached", "init_kvelastic", "kv_cache_pool_snapshot_dicts", "kv_cache_pool_snapshots",
    "observability_snapshot", "observability_snapshot_dict", "shutdown_kvcached",
    "shutdown_kvelastic",
]  # fmt: skip


_calls = EngineCalls("vllm")
init_kvelastic = init_kvcached = _calls.init_kvelastic
shutdown_kvcached = shutdown_kvelastic
observability_snapshot = _calls.observability_snapshot
observability_snapshot_dict = _calls.observability_snapshot_dict
kv_cache_pool_snapshots = _calls.kv_cache_pool_snapshots
kv_cache_pool_snapshot_dicts = _calls.kv_cache_pool_snapshot_dicts


def alloc_kv_cache(
    kvcache_shape: Sequence[int],
    block_size: int,
    dtype: torch.dtype,
    device: Any,
    num_layers: int,
    attention_type: str = "MHA",
    kv_layout: str = "NHD",
    group_id: int = 0,
    kernel_block_size: int | None = None,
    return_meta: bool = False,
) -> Any:
    """Create the cache tensors, one per layer, without memory; the manager's `alloc` maps it.

    `kvcache_shape` is (2, blocks, tokens, heads, dim), (blocks, 2, tokens, heads, dim), or for MLA
    (blocks, tokens, dim). `block_size` is its `tokens`. The blocks dimension of the tensors is
    longer than requested, because block ids are sparse. Index it only with ids from `alloc`: other
    addresses fault. With `kernel_block_size`, the dimension counts kernel blocks of that many
    tokens; each id has block_size / kernel_block_size consecutive ones.

    With `HYBRID_LINEAR`, K and V of a block are adjacent, and the function returns
    `(tensors, info)`: `buffers` (flat int8, one per layer), `num_blocks` (ids per buffer),
    `page_size_bytes` and `block_stride_bytes` (of a block in one buffer), `num_pools`,
    `is_contiguous`. `return_meta` appends a dictionary for `build_kv_views`.

    Raises `RuntimeError` before init, `LayoutError` and `InvalidArgumentError` (both `ValueError`)
    with the value and the accepted ones.
    """
    (tensors,) = embedded.alloc_kv_cache(
        kvcache_shape,
        block_size=block_size,
        dtype=dtype,
        device=device,
        num_layers=num_layers,
        attention_type=attention_type,
        kv_layout=kv_layout,
        group_id=group_id,
        kernel_block_size=kernel_block_size,
    )
    is_hybrid = attention_type == HYBRID
    if not (is_hybrid or return_meta):
        return tensors
    raw = embedded.raw_cache(group_id)
    answer: list[Any] = [tensors]
    if is_hybrid:
        answer.append(
            {
                "buffers": raw.buffers,
                "num_blocks": raw.ids,
                "page_size_bytes": raw.block_bytes,
                "block_stride_bytes": raw.block_bytes,
                "num_pools": num_layers,
                "is_contiguous": False,
            }
        )
    if return_meta:
        answer.append(
            {
                "raw_kv_tensors": [raw.flat],
                "num_blocks_per_layer": raw.ids,
                "gpu_mem_bytes_per_layer_k_or_v": raw.flat.numel() // len(raw.buffers),
                "num_layers": num_layers,
                "dtype": dtype,
            }
        )
    return tuple(answer)


def build_kv_views(
    raw_kv_tensors: Sequence[torch.Tensor],
    kvcache_shape: Sequence[int],
    block_size: int,
    dtype: torch.dtype,
    attention_type: str,
    num_blocks_per_layer: int,
    gpu_mem_bytes_per_layer_k_or_v: int,
    num_layers: int,
    kernel_block_size: int | None = None,
) -> tuple[list[torch.Tensor], int]:
    """Create further views of a cache for layer groups of other shapes on the same blocks.

    `raw_kv_tensors` are those of `alloc_kv_cache(..., return_meta=True)`. The two counts are
    accepted for compatibility and not used. Returns the views and the bytes of one layer's block.
    Raises `LayoutError` if blocks of that shape have another size in a buffer than the cache's,
    `InvalidArgumentError` for other tensors.
    """
    if not raw_kv_tensors:
        raise InvalidArgumentError("raw_kv_tensors is empty; give those of alloc_kv_cache")
    cache = plan(
        kvcache_shape,
        engine="vllm",
        block_size=block_size,
        itemsize=itemsize_of(dtype),
        num_layers=num_layers,
        attention_type=attention_type,
        kernel_block_size=kernel_block_size,
    )
    views = embedded.views_of(raw_kv_tensors[0], cache, dtype)
    return views, cache.layout.block_bytes * cache.layout.buffers // num_layers
