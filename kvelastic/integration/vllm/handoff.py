"""The values that the scheduler sends to a worker so that it can attach."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvelastic import _vmm

HANDOFF = "kvelastic"
"""Attribute of a worker's `KVCacheConfig` that holds its `Handoff`; vLLM sends it along with the
configuration."""


@dataclass(frozen=True)
class Handoff:
    """What a worker needs to attach; plain values sent with its `KVCacheConfig`."""

    rank: int
    device: str
    """The device to which the scheduler accounts this worker's pages: `host`, or a GPU's UUID."""
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
    """Bytes of a block over all layers of this worker, by vLLM's own calculation."""

    def geometry(self) -> _vmm.Geometry:
        """Return the layout in its native form."""
        from kvelastic import _vmm  # late: some processes only forward a Handoff

        return _vmm.Geometry(
            pages=self.pages,
            extents_per_page=self.extents_per_page,
            extent_bytes=self.extent_bytes,
            extent_stride_bytes=self.extent_stride_bytes,
            block_bytes=self.block_bytes,
            blocks_per_page=self.blocks_per_page,
            buffers_per_extent=self.buffers_per_extent,
        )
