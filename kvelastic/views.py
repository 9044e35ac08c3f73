"""An engine's tensors over a range: what `kvelastic.layout` means for the shapes engines use.

    cache = plan((2, 8000, 16, 4, 64), engine="vllm", block_size=16, itemsize=2, num_layers=8)
    cache.views(pages=400)[0][3]      # layer 3: offset, shape and strides for torch.as_strided

Pure arithmetic, like the layout itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from operator import index
from typing import Final, Literal, NamedTuple

from kvelastic.errors import InvalidArgumentError, LayoutError, UnsupportedError
from kvelastic.layout import GRANULARITY_BYTES, PageLayout, positive


class TensorView(NamedTuple):
    """A tensor over the range: what `torch.as_strided` and its like want, strides in elements."""

    offset_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @property
    def end_bytes(self) -> int:
        """The byte after the last element."""
        last = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        return self.offset_bytes + (last + 1) * self.itemsize


def block_view(
    layout: PageLayout,
    pages: int,
    buffer: int,
    block_shape: tuple[int, ...],
    itemsize: int,
    ratio: int = 1,
) -> TensorView:
    """One buffer as `(ids * ratio, *block_shape)`: each block is `ratio` of these, dense.

    Raises `LayoutError` if `ratio` of `block_shape` do not have the layout's bytes.
    """
    if prod(block_shape) * itemsize * ratio != layout.block_bytes:
        raise LayoutError(
            f"block shape {block_shape} of {itemsize}-byte elements does not match the layout's"
            f" blocks of {layout.block_bytes} bytes."
        )
    return TensorView(
        offset_bytes=buffer * layout.buffer_stride_bytes(pages),
        shape=(layout.id_span(pages) * ratio, *block_shape),
        strides=(layout.block_bytes // itemsize // ratio, *_dense_strides(block_shape)),
        itemsize=itemsize,
    )


def pair_view(
    layout: PageLayout,
    pages: int,
    buffer: int,
    block_shape: tuple[int, ...],
    itemsize: int,
    ratio: int = 1,
) -> TensorView:
    """Two neighbouring buffers as `(2, ids, *block_shape)`: [0][id] is K of a block, [1][id] V.

    The two halves overlap in addresses and never in blocks::

        [0]   | K of page 0's ids |                   | K of page 1's ids | ...
        [1]                       | V of page 0's ids |                   | V of page 1's ids | ...
              |<- buffer stride ->|
    """
    one = block_view(layout, pages, buffer, block_shape, itemsize, ratio)
    stride = layout.buffer_stride_bytes(pages) // itemsize
    return one._replace(shape=(2, *one.shape), strides=(stride, *one.strides))


def halves_view(
    layout: PageLayout,
    pages: int,
    buffer: int,
    block_shape: tuple[int, ...],
    itemsize: int,
    ratio: int = 1,
) -> TensorView:
    """One buffer whose blocks are `(2, ...)`, as `(2, ids, ...)`: K and V lie block by block."""
    one = block_view(layout, pages, buffer, block_shape, itemsize, ratio)
    return one._replace(
        shape=(2, one.shape[0], *one.shape[2:]),
        strides=(one.strides[1], one.strides[0], *one.strides[2:]),
    )


def token_view(
    layout: PageLayout,
    pages: int,
    buffer: int,
    block_shape: tuple[int, ...],
    itemsize: int,
    ratio: int = 1,
) -> TensorView:
    """One buffer indexed by token: `(ids * tokens, *block_shape[1:])`.

    Token t of block id is row `id * tokens + t`; blocks are dense, so their rows follow on.
    """
    one = block_view(layout, pages, buffer, block_shape, itemsize, ratio)
    return one._replace(
        shape=(one.shape[0] * block_shape[0], *block_shape[1:]), strides=one.strides[1:]
    )


Form = Literal["split", "fused", "latent", "halves", "token_kv", "token_latent"]
"""How K and V of a block lie: in buffers of their own (split), in one (fused; halves, where the
tensor has K and V first), or there is only one (latent). token_*: indexed by token."""


@dataclass(frozen=True)
class CachePlan:
    """What an engine's cache shape becomes: a layout, and the views that the engine gets."""

    layout: PageLayout
    num_blocks: int
    """Blocks the engine asked for; ids go far beyond it (see `PageLayout.id_span`)."""
    num_layers: int
    block_shape: tuple[int, ...]
    itemsize: int
    form: Form
    ratio: int = 1
    """Blocks of `block_shape` that a block of the layout consists of: an engine's kernels may want
    smaller ones than its scheduler counts."""

    def views(self, pages: int) -> tuple[list[TensorView], ...]:
        """One list with a view a layer; two lists (all K, all V) for SGLang's MHA and GQA."""
        step = self.layout.buffers // self.num_layers
        firsts = range(0, self.layout.buffers, step)
        if self.form in ("token_kv", "token_latent"):
            starts = [[first + i for first in firsts] for i in range(step)]
            make = token_view
        else:
            starts = [list(firsts)]
            make = {"split": pair_view, "halves": halves_view}.get(self.form, block_view)
        return tuple(
            [
                make(self.layout, pages, buffer, self.block_shape, self.itemsize, self.ratio)
                for buffer in each
            ]
            for each in starts
        )


HYBRID: Final = "HYBRID_LINEAR"
"""Full attention beside linear attention: K and V of a layer in one buffer, as states are."""
ATTENTION_TYPES: Final = ("MHA", "GQA", "MLA", HYBRID)
KV_LAYOUTS: Final = ("NHD",)
ITEMSIZES: Final = (1, 2, 4, 8)  # powers of two: strides between pages are whole elements
_SHAPES: Final = {
    ("vllm", False): "(2, blocks, tokens, heads, dim) or (blocks, 2, tokens, heads, dim)",
    ("vllm", True): "(blocks, tokens, dim)",
    ("sglang", False): "(tokens, heads, dim)",
    ("sglang", True): "(tokens, dim) or (tokens, 1, dim)",
}


def plan(
    kvcache_shape: Sequence[int],
    *,
    engine: Literal["vllm", "sglang"],
    block_size: int,
    itemsize: int,
    num_layers: int,
    attention_type: str = "MHA",
    kv_layout: str = "NHD",
    granularity_bytes: int = GRANULARITY_BYTES,
    page_size_bytes: int = GRANULARITY_BYTES,
    per_buffer: bool = False,
    kernel_block_size: int | None = None,
) -> CachePlan:
    """Turn an engine's cache shape into a layout and views.

    `block_size` is in tokens (SGLang calls it page_size), `itemsize` in bytes an element, and the
    next three arguments are those of `PageLayout.solve`. With `kernel_block_size` views count
    blocks of so many tokens. `(2, 2, tokens, heads, dim)` is read as K and V first. Raises
    `InvalidArgumentError` for an unknown engine, attention type or kv_layout, `UnsupportedError`
    for hybrid models of SGLang (whose states `alloc_mamba_states` has), and `LayoutError` for a
    shape that does not match.
    """
    _one_of("engine", engine, ("vllm", "sglang"))
    is_hybrid = attention_type == HYBRID
    if attention_type.upper().startswith(("HYBRID", "MAMBA")) and not (
        is_hybrid and engine == "vllm"
    ):
        raise UnsupportedError(
            f"Hybrid models of this kind (attention_type={attention_type!r}) are not supported;"
            f" accepted are {', '.join(ATTENTION_TYPES)}, the last one for vLLM only. For SGLang"
            " use MHA for the attention layers and alloc_mamba_states for the others."
        )
    _one_of("attention_type", attention_type, ATTENTION_TYPES)
    _one_of("kv_layout", kv_layout, KV_LAYOUTS)
    positive("block_size" if engine == "vllm" else "page_size", block_size)
    if itemsize not in ITEMSIZES:
        raise LayoutError(f"itemsize={itemsize!r} is not accepted; it must be one of {ITEMSIZES}.")
    positive("num_layers", num_layers)
    latent = attention_type == "MLA"
    shape = _checked_shape(kvcache_shape, _SHAPES[engine, latent])

    form: Form
    if engine == "sglang":
        good = len(shape) == 3 if not latent else len(shape) == 2 or shape[1:-1] == (1,)
        form = "token_latent" if latent else "token_kv"
        # The last block may be asked for in part; it is given whole.
        num_blocks = -(-shape[0] // block_size)
        block_shape = (block_size, *shape[1:])
    elif latent:
        good = len(shape) == 3
        form, num_blocks, block_shape = "latent", shape[0], shape[1:]
    else:
        good = len(shape) == 5 and 2 in shape[:2]
        form = "split" if shape[0] == 2 else "fused"
        num_blocks = shape[1] if shape[0] == 2 and good else shape[0]
        block_shape = shape[2:] if form == "split" else shape[1:]
        if is_hybrid and form == "split":
            form, block_shape = "halves", (2, *block_shape)
    if not good:
        raise LayoutError(
            f"kvcache_shape={shape} is not accepted for {engine} and {attention_type}; it must be"
            f" {_SHAPES[engine, latent]}."
        )
    has_both = form in ("fused", "halves")
    tokens = block_shape[1] if has_both else block_shape[0]
    if tokens != block_size:
        raise LayoutError(
            f"block_size={block_size} does not match kvcache_shape={shape}, whose blocks have"
            f" {tokens} tokens; give both the same."
        )
    layout = PageLayout.solve(
        prod(block_shape) * itemsize,
        num_layers * (2 if form in ("split", "token_kv") else 1),
        granularity_bytes=granularity_bytes,
        page_size_bytes=page_size_bytes,
        per_buffer=per_buffer,
    )
    ratio = 1
    if kernel_block_size is not None:
        positive("kernel_block_size", kernel_block_size)
        ratio, left = divmod(block_size, kernel_block_size)
        if left:
            raise LayoutError(
                f"block_size={block_size} is no multiple of kernel_block_size={kernel_block_size}"
            )
        at = 1 if has_both else 0
        block_shape = (*block_shape[:at], kernel_block_size, *block_shape[at + 1 :])
    return CachePlan(layout, num_blocks, num_layers, block_shape, itemsize, form, ratio)


def plan_states(
    parts: Sequence[tuple[tuple[int, ...], int]],
    *,
    num_layers: int,
    page_size_bytes: int = GRANULARITY_BYTES,
    per_buffer: bool = False,
) -> tuple[PageLayout, list[int]]:
    """A layout whose blocks hold states of a fixed size, and where in a block each begins.

    `parts` are shapes and bytes an element. Raises `LayoutError` for a shape or a size that is
    not accepted.
    """
    positive("num_layers", num_layers)
    if not parts:
        raise LayoutError("no state is named; give at least one shape")
    offsets, end_bytes = [], 0
    for shape, itemsize in parts:
        if itemsize not in ITEMSIZES:
            raise LayoutError(f"itemsize={itemsize!r} is not accepted; one of {ITEMSIZES} is.")
        _checked_shape(shape, "the shape of one state")
        offsets.append(end_bytes)
        end_bytes += -(-prod(shape) * itemsize // ITEMSIZES[-1]) * ITEMSIZES[-1]
    layout = PageLayout.solve(
        end_bytes, num_layers, page_size_bytes=page_size_bytes, per_buffer=per_buffer
    )
    return layout, offsets


def state_view(
    layout: PageLayout, pages: int, offset_bytes: int, shape: tuple[int, ...], itemsize: int
) -> TensorView:
    """One state of all layers and blocks, as `(layers, ids, *shape)`."""
    return TensorView(
        offset_bytes=offset_bytes,
        shape=(layout.buffers, layout.id_span(pages), *shape),
        strides=(
            layout.buffer_stride_bytes(pages) // itemsize,
            layout.block_bytes // itemsize,
            *_dense_strides(shape),
        ),
        itemsize=itemsize,
    )


def _one_of(name: str, value: str, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise InvalidArgumentError(
            f"{name}={value!r} is not accepted; it must be {' or '.join(accepted)}."
        )


def _checked_shape(shape: Sequence[int], accepted: str) -> tuple[int, ...]:
    try:
        sizes = tuple(index(size) for size in shape)
    except TypeError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise LayoutError(
            f"kvcache_shape={shape!r} is not accepted; it must be {accepted},"
            " each an integer of 1 or more."
        )
    return sizes


def _dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
