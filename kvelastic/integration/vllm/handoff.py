"""What the scheduler tells a worker, so that it can attach."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvelastic import _vmm

HANDOFF = "kvelastic"
"""Attribute of a worker's `KVCacheConfig` that has its `Handoff`; vLLM's own channel carries it
along with the configuration."""


@dataclass(frozen=True)
class Handoff:
    """What a worker needs to attach: plain values that travel with its `KVCacheConfig`."""

    rank: int
    device: str
    """Where the scheduler counts this worker's pages: `host`, or a GPU's UUID."""
    segment_name: str
    segment_uuid: bytes
    pages: int
    extents_per_page: int
    extent_bytes: int
    extent_stride_bytes: int
    block_bytes: int
    blocks_per_page: int
    buffers_per_extent: int
    vllm_block_bytes: int
    """Bytes of a block in all layers of this worker, as vLLM itself counts them."""

    def geometry(self) -> _vmm.Geometry:
        """The native form of the layout."""
        from kvelastic import _vmm  # not in every process that only hands this on

        return _vmm.Geometry(
            pages=self.pages,
            extents_per_page=self.extents_per_page,
            extent_bytes=self.extent_bytes,
            extent_stride_bytes=self.extent_stride_bytes,
            block_bytes=self.block_bytes,
            blocks_per_page=self.blocks_per_page,
            buffers_per_extent=self.buffers_per_extent,
        )
