"""kvcached's functions for SGLang: token-indexed tensors, K and V apart.

from kvelastic.integration.sglang import interfaces as kvi

kvi.init_kvelastic(device="cpu", async_sched=True)
k, v = kvi.alloc_kv_cache((65536, 4, 64), torch.bfloat16, "cpu", num_layers=8, page_size=32)
manager = kvi.get_kv_cache_manager(65536 // 32, 32, cell_size=4 * 64 * 2, num_layers=8)
block = manager.alloc(1)[0]      # its tokens are k[layer][block * 32 : (block + 1) * 32]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvelastic.kvcached import embedded
from kvelastic.kvcached.embedded import get_kv_cache_manager, shutdown_kvelastic
from kvelastic.kvcached.engine_calls import EngineCalls
from kvelastic.kvcached.snapshots import get_capabilities

if TYPE_CHECKING:
    import torch

__all__ = [
    "alloc_kv_cache", "alloc_mamba_states", "get_capabilities", "get_kv_cache_manager",
    "init_kvcached", "init_kvelastic", "kv_cache_pool_snapshot_dicts", "kv_cache_pool_snapshots",
    "observability_snapshot", "observability_snapshot_dict", "shutdown_kvcached",
    "shutdown_kvelastic",
]  # fmt: skip


_calls = EngineCalls("sglang")
init_kvelastic = init_kvcached = _calls.init_kvelastic
shutdown_kvcached = shutdown_kvelastic
observability_snapshot = _calls.observability_snapshot
observability_snapshot_dict = _calls.observability_snapshot_dict
kv_cache_pool_snapshots = _calls.kv_cache_pool_snapshots
kv_cache_pool_snapshot_dicts = _calls.kv_cache_pool_snapshot_dicts


def alloc_kv_cache(
    kvcache_shape: Sequence[int],
    dtype: torch.dtype,
    device: Any,
    num_layers: int,
    page_size: int = 1,
    attention_type: str = "MHA",
    kv_layout: str = "NHD",
    group_id: int = 0,
) -> tuple[list[torch.Tensor], list[torch.Tensor]] | list[torch.Tensor]:
    """Create the cache tensors without memory: `(k_tensors, v_tensors)`, or one list for MLA.

    `kvcache_shape` is (tokens, heads, dim), for MLA (tokens, dim) or (tokens, 1, dim). `page_size`
    is SGLang's term for the tokens of one block: token t of block id is row `id * page_size + t`.
    Raises `RuntimeError` before init, `LayoutError` and `InvalidArgumentError` (both `ValueError`)
    with the value and the accepted ones.
    """
    lists = embedded.alloc_kv_cache(
        kvcache_shape,
        block_size=page_size,
        dtype=dtype,
        device=device,
        num_layers=num_layers,
        attention_type=attention_type,
        kv_layout=kv_layout,
        group_id=group_id,
    )
    return (lists[0], lists[1]) if len(lists) > 1 else lists[0]


def alloc_mamba_states(
    *, num_slots: int, num_mamba_layers: int, cache_params: Any, device: Any, group_id: int = 0
) -> tuple[list[torch.Tensor], torch.Tensor, dict[str, Any]]:
    """Create the tensors of a Mamba model's states without memory: `(conv, temporal, info)`.

    `cache_params` has `shape.conv` (a list of shapes), `shape.temporal`, `dtype.conv` and
    `dtype.temporal`, as SGLang's. Each tensor is `(layers, slots, *shape)`, with more slots than
    requested: index it only with ids from the manager of `group_id`. That manager is
    `get_kv_cache_manager(num_slots, 1, info["cell_size"], num_mamba_layers, num_kv_buffers=1,
    group_id=group_id)`. Raises like `alloc_kv_cache`.
    """
    shape, dtype = cache_params.shape, cache_params.dtype
    states = [*((conv, dtype.conv) for conv in shape.conv), (shape.temporal, dtype.temporal)]
    tensors, cell_size = embedded.alloc_states(
        states, num_slots=num_slots, num_layers=num_mamba_layers, device=device, group_id=group_id
    )
    info = {
        "is_contiguous": True,
        "cell_size": cell_size,
        "num_slots": tensors[-1].shape[1],
        "num_layers": num_mamba_layers,
    }
    return tensors[:-1], tensors[-1], info
