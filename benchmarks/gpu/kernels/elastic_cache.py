"""A decoder's cache over an elastic pool with its maintenance thread, as in an engine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from benchmarks.vmm.models import BF16_BYTES, MIB, Model

if TYPE_CHECKING:
    import torch

    from kvelastic.device.selection import Device

PAGE_BYTES: Final = 2 * MIB
"""Small, so that many come and go."""
IDLE_TRIM_S: Final = 0.05
BESIDE_BLOCKS: Final = 2
"""The null block, and one that keeps its page mapped: slots with no sequence compute there."""
POISON: Final = 30_000.0
"""Far beyond what a decoder computes; finite, since not every attention skips what it masks."""


class ElasticCache:
    """`layers` are keys and values of each layer; blocks come from `pool.blocks`. `close()` it."""

    def __init__(
        self,
        model: Model,
        device: Device,
        blocks: int,
        dtype: torch.dtype,
        *,
        guard_pages: bool = False,
    ) -> None:
        """Room for `blocks` blocks and `BESIDE_BLOCKS`."""
        import torch

        from kvelastic.config import load
        from kvelastic.pool import tensors
        from kvelastic.pool.pool import local_range, open_pool
        from kvelastic.pool.tensor_views import block_view

        settings = replace(
            load(),
            ipc_name=None,
            limit=None,
            idle_trim_s=IDLE_TRIM_S,
            min_reserved_pages=1,
            max_reserved_pages=2,
        )
        layout = model.paged(PAGE_BYTES)
        pages = layout.pages_for_blocks(blocks + BESIDE_BLOCKS)
        self.page_bytes = layout.page_bytes
        self.range_bytes = layout.range_bytes(pages)
        self.blocks_per_page = layout.blocks_per_page
        self.pool = open_pool(
            settings,
            layout,
            pages,
            num_blocks=pages * layout.blocks_per_page,
            block_tokens=model.tokens_per_block,
            engine="bench",
            devices=[device],
            memory=local_range(device, guard_pages=guard_pages),
        )
        try:
            self.pool.start_maintenance()
            flat = tensors.whole_range(self.pool.memory)  # type: ignore[arg-type]
            views = [
                block_view(layout, pages, buffer, model.block_shape, BF16_BYTES)
                for buffer in range(model.buffers)
            ]
            buffers = [tensors.view_of(flat, view, dtype) for view in views]
            self.layers = list(zip(buffers[::2], buffers[1::2], strict=True))
            if self.pool.blocks.alloc(1) is None:
                raise RuntimeError("the pool has no memory for its first block")
            self._poison = torch.full((), POISON, dtype=dtype, device=flat.device)
        except BaseException:
            self.pool.close(discard=True)
            raise

    def poison(self, ids: torch.Tensor) -> None:
        """`POISON` all over these blocks, as kernels of the current stream."""
        for layer in self.layers:
            for buffer in layer:
                buffer.index_put_((ids,), self._poison)

    def close(self) -> None:
        """Everything back; the tensors must not be touched any more."""
        self.pool.close(discard=True)
