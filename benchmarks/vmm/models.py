"""The models whose KV the parts speak of, and what a block of each costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvelastic.pool.layout import PageLayout

MIB: Final = 1 << 20
GIB: Final = 1 << 30
BF16_BYTES: Final = 2


@dataclass(frozen=True)
class Model:
    """The shape of a model's KV cache; K and V of a layer are two buffers."""

    name: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    tokens_per_block: int = 16

    @property
    def buffers(self) -> int:
        return 2 * self.layers

    @property
    def block_shape(self) -> tuple[int, int, int]:
        """(tokens, heads, dim) of a block in one buffer."""
        return (self.tokens_per_block, self.kv_heads, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """A block in one buffer."""
        return self.tokens_per_block * self.kv_heads * self.head_dim * BF16_BYTES

    @property
    def block_all_bytes(self) -> int:
        """A block in all buffers."""
        return self.buffers * self.block_bytes

    def blocks_of(self, kv_bytes: int) -> int:
        """Blocks that hold so much KV, the last one perhaps in part."""
        return -(-kv_bytes // self.block_all_bytes)

    def paged(self, page_size_bytes: int = 2 * MIB) -> PageLayout:
        """kvelastic's layout; its page is the default one unless a larger size is asked for."""
        return PageLayout.solve(self.block_bytes, self.buffers, page_size_bytes=page_size_bytes)


LLAMA_3_8B: Final = Model("Llama-3-8B", layers=32, query_heads=32, kv_heads=8, head_dim=128)
QWEN3_4B: Final = Model("Qwen3-4B", layers=36, query_heads=32, kv_heads=8, head_dim=128)
