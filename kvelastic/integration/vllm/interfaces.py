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
    """Make this process ready; call it before anything else. Calling it again changes nothing.

    `device` is "cpu" (or "host") for the machine's memory, None for KVELASTIC_DEVICE. `world_size`
    is another name for `tp_size`. `is_worker` and `async_sched` are accepted for kvcached's callers
    and change nothing: there is one process, and pages are only unmapped when no block of them is
    in use. Raises `UnsupportedError` for more than one rank or a CUDA device, `ConfigError` for a
    bad variable.
    """
    embedded.init(
        "vllm",
        tp_rank=tp_rank,
        world_size=tp_size if world_size is None else world_size,
        pp_rank=pp_rank,
        device=device,
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
) -> list[torch.Tensor]:
    """Make the cache tensors, one a layer, without memory: that comes with the manager's `alloc`.

    `kvcache_shape` is (2, blocks, tokens, heads, dim), (blocks, 2, tokens, heads, dim), or for MLA
    (blocks, tokens, dim); `block_size` its tokens. In the tensors the blocks dimension is longer
    than asked for, since block ids are sparse: index it with ids from `alloc` only, for other
    addresses fault when touched. Raises `RuntimeError` before init, `LayoutError` and
    `InvalidArgumentError` (both `ValueError`) naming the value and what is accepted.
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
    )
    return tensors


# The names that kvcached's callers know.
init_kvcached = init_kvelastic
shutdown_kvcached = shutdown_kvelastic
