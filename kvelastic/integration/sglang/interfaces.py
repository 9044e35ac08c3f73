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

from kvelastic import embedded
from kvelastic.embedded import get_kv_cache_manager, shutdown_kvelastic

if TYPE_CHECKING:
    import torch

__all__ = [
    "alloc_kv_cache",
    "get_kv_cache_manager",
    "init_kvcached",
    "init_kvelastic",
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
    """Make this process ready; see `kvelastic.integration.vllm.interfaces.init_kvelastic`."""
    embedded.init(
        "sglang",
        tp_rank=tp_rank,
        world_size=tp_size if world_size is None else world_size,
        pp_rank=pp_rank,
        device=device,
    )


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
    """Make the cache tensors, without memory: `(k_tensors, v_tensors)`, or one list for MLA.

    `kvcache_shape` is (tokens, heads, dim), for MLA (tokens, dim) or (tokens, 1, dim). `page_size`
    is SGLang's word for the tokens of one block: token t of block id is row `id * page_size + t`.
    Raises `RuntimeError` before init, `LayoutError` and `InvalidArgumentError` (both `ValueError`)
    naming the value and what is accepted.
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


# The names that kvcached's callers know.
init_kvcached = init_kvelastic
shutdown_kvcached = shutdown_kvelastic
