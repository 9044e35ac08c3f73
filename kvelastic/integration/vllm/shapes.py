"""How vLLM describes a KV cache: K and V first, per block, or a single latent tensor.

`(2, 2, tokens, heads, dim)` is ambiguous and read as K and V first.
"""

from __future__ import annotations

from typing import Final

from kvelastic.pool.tensor_views import BlocksOfShape

HYBRID: Final = "HYBRID_LINEAR"
"""Full attention beside linear attention: K and V of a layer share a buffer, as states do."""
ATTENTION_TYPES: Final = ("MHA", "GQA", "MLA", HYBRID)
BLOCK_SIZE: Final = "block_size"
HYBRID_ADVICE: Final = ""


def accepted(attention_type: str) -> str:
    """Return the accepted shapes as text."""
    if attention_type == "MLA":
        return "(blocks, tokens, dim)"
    return "(2, blocks, tokens, heads, dim) or (blocks, 2, tokens, heads, dim)"


def read(shape: tuple[int, ...], attention_type: str, block_size: int) -> BlocksOfShape | None:
    """Implements `kvelastic.pool.tensor_views.EngineShapes.read`."""
    if attention_type == "MLA":
        return BlocksOfShape("latent", shape[0], shape[1:], shape[1]) if len(shape) == 3 else None
    if len(shape) != 5 or 2 not in shape[:2]:
        return None
    if shape[0] != 2:
        return BlocksOfShape("fused", shape[0], shape[1:], shape[2])
    if attention_type == HYBRID:
        return BlocksOfShape("halves", shape[1], (2, *shape[2:]), shape[2])
    return BlocksOfShape("split", shape[1], shape[2:], shape[2])
