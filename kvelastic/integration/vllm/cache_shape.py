"""Reads vLLM's KV cache placement from its configuration and rewrites it to the paged layout.

vLLM places a set of equal layers at `offset + l*layer_stride + b*block_stride` in one allocation.
Groups of layers overlay each other: a block id belongs to one group at a time, so all groups share
one pool and one budget. vLLM uses three forms::

    layers   each layer's blocks are contiguous: buffer i begins at i * num_blocks * block_bytes
             | A: blk 0 | blk 1 | ...        | B: blk 0 | blk 1 | ...        |      group 0
             | C: blk 0 | blk 1 | ...        | D: blk 0 | blk 1 | ...        |      group 1
    blocks   all layers of a block are contiguous; one buffer, its block holds all of them
             | blk 0 [ A | B | pad ] | blk 1 [ A | B | pad ] | ...                  group 0
             | blk 0 [ C |    D    ] | blk 1 [ C |    D    ] | ...                  group 1
    mixed    as `layers`, but block sizes differ between layers. No single id span fits both
             sizes, so it is converted to `blocks`

Only ids and strides change, never the contents of a block. All ranks use one layout, the largest
of theirs, because an id must mean the same in each rank. A pipeline stage with fewer layers leaves
part of its pages unused.

Pure functions; imports neither vLLM nor torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvelastic.errors import UnsupportedEngineError
from kvelastic.pool.layout import PageLayout

_ALIGNMENT_BYTES = 64
"""Alignment of layers inside a packed `mixed` block: a cache line, a multiple of element sizes."""


@dataclass(frozen=True)
class CacheShape:
    """What a page layout must hold: blocks of `block_bytes` in each of `buffers`."""

    form: Literal["layers", "blocks", "mixed"]
    block_bytes: int
    buffers: int

    def joined(self, other: CacheShape) -> CacheShape:
        """Return the smallest shape that holds both. Raises `UnsupportedEngineError` if none."""
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
    """Read the shape of a worker's `KVCacheConfig` as vLLM created it.

    Raises `UnsupportedEngineError` for an unknown placement.
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
    """Rewrite a worker's `KVCacheConfig` to the paged layout, with all ids of the range.

    `layout` must have been made for `shape`. The scheduler keeps its own copy with the real number
    of blocks.
    """
    layer_stride_bytes = layout.buffer_stride_bytes(pages)
    packed_bytes = 0
    for tensor in config.kv_cache_tensors:
        if shape.form == "layers":
            tensor.offset = _first_buffer(config, tensor) * layer_stride_bytes
            tensor.layer_stride = layer_stride_bytes
        elif shape.form == "mixed":
            tensor.offset, tensor.layer_stride = packed_bytes, tensor.block_stride
            packed_bytes += _aligned(tensor.block_stride * len(tensor.layers))
        tensor.block_stride = layout.block_bytes
        tensor.size = layout.range_bytes(pages)
    config.num_blocks = layout.id_span(pages)


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
