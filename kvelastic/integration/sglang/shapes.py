"""How SGLang describes a KV cache: by tokens, with separate K and V or one latent tensor."""

from __future__ import annotations

from typing import Final

from kvelastic.pool.tensor_views import BlocksOfShape, Form

ATTENTION_TYPES: Final = ("MHA", "GQA", "MLA")
BLOCK_SIZE: Final = "page_size"
HYBRID_ADVICE: Final = "Use MHA for the attention layers and alloc_mamba_states for the others."


def accepted(attention_type: str) -> str:
    """Return the accepted shapes as text."""
    if attention_type == "MLA":
        return "(tokens, dim) or (tokens, 1, dim)"
    return "(tokens, heads, dim)"


def read(shape: tuple[int, ...], attention_type: str, block_size: int) -> BlocksOfShape | None:
    """Implements `tensor_views.EngineShapes.read`. A partial last block counts as whole."""
    is_latent = attention_type == "MLA"
    is_good = len(shape) == 2 or shape[1:-1] == (1,) if is_latent else len(shape) == 3
    if not is_good:
        return None
    num_blocks = -(-shape[0] // block_size)
    form: Form = "token_latent" if is_latent else "token_kv"
    return BlocksOfShape(form, num_blocks, (block_size, *shape[1:]), block_size)
