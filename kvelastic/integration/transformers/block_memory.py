"""The memory of a paged cache of transformers 5.17: a tensor for K and one for V of each layer.

Layers are in groups by kind of attention, and the groups share the tensors: a block belongs to one
group at a time. So there are two tensors per layer of a group. While transformers makes the
tensors, it fills a block at the end of each, where no memory is mapped yet. So it first gets meta
tensors, and the real tensors after the cache is made.

Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvelastic.integration.transformers.cache_memory import TRASH_BLOCKS, Making
from kvelastic.pool import tensor_views, tensors
from kvelastic.pool.layout import PageLayout


class BlockMaking(Making):
    """Serves the allocation of tensors in which row `id * tokens + t` is token t of block id."""

    _whole_range: torch.Tensor
    _block_shape: tuple[int, int, int] | None = None
    _dtype: torch.dtype
    _span = 0

    def size(
        self,
        block_shape: tuple[int, int, int],
        dtype: torch.dtype,
        layers: int,
        wanted_blocks: int | None,
    ) -> int:
        """Make the pool (see `_open`); return the number of blocks to report to transformers.

        `block_shape` is (tokens, heads, head size). `layers` is the number of layers of a group.
        """
        self._dtype = dtype
        self.expected = 2 * layers
        tokens, heads, head_size = block_shape
        block_bytes = tokens * heads * head_size * dtype.itemsize

        def make_layout(page_size_bytes: int) -> PageLayout:
            return PageLayout.solve(
                block_bytes,
                self.expected,
                page_size_bytes=page_size_bytes,
                per_buffer=not self._settings.contiguous_layout,
            )

        self._span, self._whole_range = self._open(make_layout, tokens, wanted_blocks)
        self._block_shape = block_shape
        return self._span - TRASH_BLOCKS

    def views(self) -> list[torch.Tensor]:
        """Return the real tensors after the cache is made: K, V of layer 0, K, V of layer 1, ..."""
        assert self.memory is not None
        assert self._block_shape is not None
        layout = self.memory.layout
        pages = self.memory.pool.blocks.geometry.pages
        return [
            tensors.view_of(
                self._whole_range,
                tensor_views.block_view(
                    layout, pages, buffer, self._block_shape, self._dtype.itemsize
                ).by_token(),
                self._dtype,
            )
            for buffer in range(layout.buffers)
        ]

    def _answer(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor | None:
        if func is not torch.empty or self._block_shape is None:
            return None
        tokens, *row = self._block_shape
        if args != ((self._span * tokens, *row),) or kwargs.get("dtype") is not self._dtype:
            return None
        return torch.empty(*args, dtype=self._dtype, device="meta")
