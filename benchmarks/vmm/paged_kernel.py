"""vLLM's own decode attention over blocks, where a vLLM for CUDA is installed.

torch has no attention that reads blocks by a table, so elsewhere blocks are gathered first, which
writes and reads the cache once more than a real kernel does. This is the real kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def missing() -> str:
    """Why it cannot be used here; empty: it can."""
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func  # noqa: F401
    except Exception as error:  # a vLLM for CPU fails in ways of its own
        why = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
        return f"no FlashAttention of vLLM ({why})"
    return ""


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    """One layer for query (B, query heads, 1, dim); every request has all blocks of its row.

    `keys` and `values` are (ids, tokens, heads, dim) with any stride between ids.
    """
    import torch
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    requests, blocks = table.shape
    tokens = blocks * keys.shape[1]
    device = query.device
    return flash_attn_varlen_func(
        q=query.squeeze(2),
        k=keys,
        v=values,
        max_seqlen_q=1,
        cu_seqlens_q=torch.arange(requests + 1, dtype=torch.int32, device=device),
        max_seqlen_k=tokens,
        seqused_k=torch.full((requests,), tokens, dtype=torch.int32, device=device),
        causal=True,
        block_table=table.to(torch.int32),
    )
