"""kvcached's functions for vLLM, and for whoever writes an integration by hand.

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

from kvelastic import embedded
from kvelastic.embedded import get_kv_cache_manager, shutdown_kvelastic
from kvelastic.errors import InvalidArgumentError
from kvelastic.integration.vllm.shapes import HYBRID
from kvelastic.snapshots import KVCachePoolSnapshot, RuntimeSnapshot
from kvelastic.tensors import itemsize_of
from kvelastic.views import plan

if TYPE_CHECKING:
    import torch

__all__ = [
    "alloc_kv_cache",
    "build_kv_views",
    "get_kv_cache_manager",
    "init_kvcached",
    "init_kvelastic",
    "kv_cache_pool_snapshot_dicts",
    "kv_cache_pool_snapshots",
    "observability_snapshot",
    "observability_snapshot_dict",
    "shutdown_kvcached",
    "shutdown_kvelastic",
]


def init_kvelastic(
    tp_rank: int = 0,
    tp_size: int = 1,
    is_worker: bool = False,
    device: str | None = None,
    async_sched: bool = False,
    *,
    world_size: int | None = None,
    pp_rank: int = 0,
) -> None:
    """Make this process ready; call it before anything else. Calling it again changes nothing, and
    is refused for another engine, another device or more ranks.

    `device` is "cpu" (or "host") for the machine's memory, None for KVELASTIC_DEVICE. `world_size`
    is another name for `tp_size`. `is_worker` and `async_sched` are accepted for kvcached's callers
    and change nothing: there is one process, and pages are only unmapped when no block of them is
    in use. Raises `UnsupportedError` for more than one rank (it says what to do), `ConfigError` for
    a bad variable, `DeviceUnavailableError` for a GPU that is not there.
    """
    embedded.init(
        "vllm",
        tp_rank=tp_rank,
        world_size=tp_size if world_size is None else world_size,
        pp_rank=pp_rank,
        device=device,
        is_worker=is_worker,
        async_sched=async_sched,
    )


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
    """Make the cache tensors, one a layer, without memory: that comes with the manager's `alloc`.

    `kvcache_shape` is (2, blocks, tokens, heads, dim), (blocks, 2, tokens, heads, dim), or for MLA
    (blocks, tokens, dim); `block_size` its tokens. In the tensors the blocks dimension is longer
    than asked for, since block ids are sparse: index it with ids from `alloc` only, for other
    addresses fault when touched. With `kernel_block_size` they count blocks of so many tokens, of
    which each id has block_size / kernel_block_size in a row.

    With `HYBRID_LINEAR` K and V of a block lie side by side, and the answer is `(tensors, info)`:
    `buffers` (flat int8, one a layer), `num_blocks` (ids that a buffer has), `page_size_bytes` and
    `block_stride_bytes` (of a block in one buffer), `num_pools`, `is_contiguous`. `return_meta`
    adds a dictionary for `build_kv_views` at the end of the answer.

    Raises `RuntimeError` before init, `LayoutError` and `InvalidArgumentError` (both `ValueError`)
    naming the value and what is accepted.
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
    """More views of a cache that is there, for groups of layers of other shapes on the same blocks.

    `raw_kv_tensors` are those of `alloc_kv_cache(..., return_meta=True)`; how many blocks they have
    they know themselves, so the two counts are accepted and not used. Answers the views and the
    bytes of a block of one layer. Raises `LayoutError` where blocks of that shape have another size
    in a buffer than those that are there, `InvalidArgumentError` for other tensors.
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


def observability_snapshot() -> RuntimeSnapshot:
    """What `init_kvelastic` was told, and the device that came of it; also before it."""
    return embedded.runtime_snapshot("vllm")


def observability_snapshot_dict() -> dict[str, Any]:
    """The same for JSON."""
    return observability_snapshot().to_dict()


def kv_cache_pool_snapshots() -> list[KVCachePoolSnapshot]:
    """Of every group that has a manager."""
    return embedded.pool_snapshots("vllm")


def kv_cache_pool_snapshot_dicts() -> list[dict[str, Any]]:
    """The same for JSON."""
    return [snapshot.to_dict() for snapshot in kv_cache_pool_snapshots()]


# The names that kvcached's callers know.
init_kvcached = init_kvelastic
shutdown_kvcached = shutdown_kvelastic
