"""vLLM's placement of a KV cache, read from its configuration and rewritten to the paged layout.

vLLM places a set of equal layers by `offset + l*layer_stride + b*block_stride` in one allocation.
Groups of layers overlay each other: a block id belongs to one group at a time, so all groups share
one pool and one budget. Three forms of that occur::

    layers   each layer's blocks side by side: buffer i begins at i * num_blocks * block_bytes
             | A: blk 0 | blk 1 | ...        | B: blk 0 | blk 1 | ...        |      group 0
             | C: blk 0 | blk 1 | ...        | D: blk 0 | blk 1 | ...        |      group 1
    blocks   all layers of a block side by side; one buffer, whose block is all of them
             | blk 0 [ A | B | pad ] | blk 1 [ A | B | pad ] | ...                  group 0
             | blk 0 [ C |    D    ] | blk 1 [ C |    D    ] | ...                  group 1
    mixed    as `layers`, but of layers whose blocks differ in size: there is no id span that
             would suit both sizes, so it is made into `blocks`

Only ids and strides change, never what is inside a block. All ranks get one layout, the largest of
theirs: ids must mean the same in each, so a pipeline stage with fewer layers leaves the rest of its
pages unused.

Pure values: imports neither vLLM nor torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from kvelastic.errors import LayoutError, UnsupportedEngineError
from kvelastic.layout import PageLayout

_ALIGNMENT_BYTES = 64
"""Where layers begin inside a block that `mixed` packs: a cache line, and any element's size."""


@dataclass(frozen=True)
class CacheShape:
    """What a page layout has to hold: blocks of `block_bytes` in each of `buffers`."""

    form: Literal["layers", "blocks", "mixed"]
    block_bytes: int
    buffers: int

    def joined(self, other: CacheShape) -> CacheShape:
        """The least that holds both. Raises `UnsupportedEngineError` if nothing does."""
        if self.form != other.form or (
            self.form == "layers" and self.block_bytes != other.block_bytes
        ):
            raise UnsupportedEngineError(
                "the ranks of this model lay their KV cache out differently "
                f"({self} and {other}), so that block ids cannot mean the same in all of them. "
                "Unset ENABLE_KVELASTIC to run this without kvelastic."
            )
        return CacheShape(
            self.form,
            max(self.block_bytes, other.block_bytes),
            max(self.buffers, other.buffers),
        )


def shape_of(config: Any) -> CacheShape:
    """Read a worker's `KVCacheConfig` as vLLM made it.

    Raises `UnsupportedEngineError` for any other placement.
    """
    tensors = config.kv_cache_tensors
    if all(tensor.layer_stride < tensor.block_stride for tensor in tensors):
        strides = {tensor.block_stride for tensor in tensors}
        if len(strides) == 1:
            return CacheShape("blocks", strides.pop(), 1)
    if any(tensor.layer_stride != tensor.block_stride * config.num_blocks for tensor in tensors):
        raise UnsupportedEngineError(
            f"kvelastic does not know the KV cache layout {config.kv_cache_layout} with "
            f"{_strides(tensors)}: neither the blocks of a layer nor the layers of a block lie "
            "side by side. Set VLLM_KV_CACHE_LAYOUT=LBHNC, or unset ENABLE_KVELASTIC to run this "
            "without kvelastic."
        )
    sizes = {tensor.block_stride for tensor in tensors}
    if len(sizes) == 1:
        block_bytes = sizes.pop()
        last = max(_first_buffer(config, tensor) + len(tensor.layers) for tensor in tensors)
        return CacheShape("layers", block_bytes, last)
    if len(config.kv_cache_groups) > 1:
        raise UnsupportedEngineError(
            f"kvelastic does not know {len(config.kv_cache_groups)} overlaid KV cache groups with "
            f"blocks of different sizes, layer by layer ({_strides(tensors)}). Set "
            "VLLM_KV_CACHE_LAYOUT=BLHNC, or unset ENABLE_KVELASTIC to run this without kvelastic."
        )
    packed = sum(_aligned(tensor.block_stride * len(tensor.layers)) for tensor in tensors)
    return CacheShape("mixed", packed, 1)


def rewrite(config: Any, shape: CacheShape, layout: PageLayout, pages: int) -> None:
    """Place a worker's `KVCacheConfig` in the paged layout: as many ids as the range has.

    `shape` is what `layout` was made for. The scheduler keeps its own copy, with the number of
    blocks that there really are.
    """
    placement = place_layers(layout, shape.buffers, pages)
    packed_bytes = 0
    for tensor in config.kv_cache_tensors:
        if shape.form == "layers":
            first = _first_buffer(config, tensor)
            tensor.offset = placement.offset + first * placement.layer_stride
            tensor.layer_stride = placement.layer_stride
        elif shape.form == "mixed":
            tensor.offset, tensor.layer_stride = packed_bytes, tensor.block_stride
            packed_bytes += _aligned(tensor.block_stride * len(tensor.layers))
        tensor.block_stride = placement.block_stride
        tensor.size = placement.size
    config.num_blocks = placement.num_blocks


def _first_buffer(config: Any, tensor: Any) -> int:
    buffer: int = tensor.offset // (tensor.block_stride * config.num_blocks)
    return buffer


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _strides(tensors: Sequence[Any]) -> str:
    kinds = {(tensor.layer_stride, tensor.block_stride) for tensor in tensors}
    return "strides of " + ", ".join(
        f"{layer} bytes a layer and {block} bytes a block" for layer, block in sorted(kinds)
    )


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
