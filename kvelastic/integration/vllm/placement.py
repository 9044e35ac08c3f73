"""A page layout in the terms by which vLLM places a KV cache. Pure arithmetic, no vLLM."""

from __future__ import annotations

from typing import NamedTuple

from kvelastic.errors import LayoutError
from kvelastic.layout import PageLayout


class Placement(NamedTuple):
    """vLLM's terms: block b of layer l lies at `offset + l*layer_stride + b*block_stride`."""

    offset: int
    layer_stride: int  # bytes
    block_stride: int  # bytes
    size: int  # bytes of the whole allocation
    num_blocks: int  # ids a layer's view has


def place_layers(layout: PageLayout, layers: int, pages: int) -> Placement:
    """The placement of `layers` layers whose block is all of a layer's bytes (K and V together).

    Views of neighbouring layers overlap in addresses and never in blocks: what lies between two
    pages' ids of one layer belongs to the other layers. Raises `LayoutError` unless the layout has
    one buffer a layer.
    """
    if layout.buffers != layers:
        raise LayoutError(
            f"layers={layers} does not match a layout of {layout.buffers} buffers; vLLM's placement"
            " needs one buffer a layer, K and V in one block."
        )
    return Placement(
        offset=0,
        layer_stride=layout.buffer_stride_bytes(pages),
        block_stride=layout.block_bytes,
        size=layout.range_bytes(pages),
        num_blocks=layout.id_span(pages),
    )
