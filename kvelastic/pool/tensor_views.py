"""Tensor views of an engine over a range: maps `kvelastic.pool.layout` to the engine's shapes.

    cache = plan((2, 8000, 16, 4, 64), engine="vllm", block_size=16, itemsize=2, num_layers=8)
    cache.views(pages=400)[0][3]      # layer 3: offset, shape and strides for torch.as_strided

Pure arithmetic, like the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from operator import index
from typing import Final, Literal, NamedTuple, Protocol

from kvelastic import engines
from kvelastic.errors import InvalidArgumentError, LayoutError, UnsupportedError
from kvelastic.pool.layout import PageLayout, positive
from kvelastic.units import GRANULARITY_BYTES


class TensorView(NamedTuple):
    """A tensor over the range: the arguments of `torch.as_strided`; strides in elements."""

    offset_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @property
    def end_bytes(self) -> int:
        """Offset of the first byte after the last element."""
        last = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        return self.offset_bytes + (last + 1) * self.itemsize

    def paired(self, stride_bytes: int) -> TensorView:
        """Return K's and V's views of adjacent buffers as one of the shape `(2, ids, ...)`.

        [0][id] is K of a block, [1][id] is V. The halves overlap in addresses but not in blocks::

            [0]   | K of page 0's ids |                   | K of page 1's ids | ...
            [1]                       | V of page 0's ids |                   | V of page 1's ids |
                  |<- buffer stride ->|
        """
        return self._replace(
            shape=(2, *self.shape), strides=(stride_bytes // self.itemsize, *self.strides)
        )

    def halved(self) -> TensorView:
        """Return a view as `(2, ids, ...)` of blocks `(2, ...)`, whose K and V are adjacent."""
        (ids, halves, *row), (step, half, *strides) = self.shape, self.strides
        return self._replace(shape=(halves, ids, *row), strides=(half, step, *strides))

    def by_token(self) -> TensorView:
        """Return a view indexed by token: token t of block id is row `id * tokens + t`.

        Blocks are dense, so their rows are contiguous.
        """
        ids, tokens, *row = self.shape
        return self._replace(shape=(ids * tokens, *row), strides=self.strides[1:])


def block_view(
    layout: PageLayout,
    pages: int,
    buffer: int,
    block_shape: tuple[int, ...],
    itemsize: int,
    ratio: int = 1,
) -> TensorView:
    """Return a view of one buffer as `(ids * ratio, *block_shape)`.

    Each block of the layout is `ratio` dense blocks of `block_shape`. Raises `LayoutError` if their
    size does not match the layout.
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


Form = Literal["split", "fused", "latent", "halves", "token_kv", "token_latent"]
"""Placement of a block's K and V: in separate buffers (split), in one buffer (fused; halves, if K
and V are the tensor's first dimension), or one tensor for both (latent). token_*: indexed by
token."""


@dataclass(frozen=True)
class CachePlan:
    """The layout and the views for an engine's cache shape."""

    layout: PageLayout
    num_blocks: int
    """Blocks that the engine requested; ids are larger (see `PageLayout.id_span`)."""
    num_layers: int
    block_shape: tuple[int, ...]
    itemsize: int
    form: Form
    ratio: int = 1
    """Blocks of `block_shape` per block of the layout: an engine's kernels may use smaller blocks
    than its scheduler."""

    def views(self, pages: int) -> tuple[list[TensorView], ...]:
        """Return a list with one view per layer; two lists (K, V) if the engine separates them."""
        step = self.layout.buffers // self.num_layers
        blocks = [
            block_view(self.layout, pages, buffer, self.block_shape, self.itemsize, self.ratio)
            for buffer in range(self.layout.buffers)
        ]
        if self.form in ("token_kv", "token_latent"):
            return tuple([one.by_token() for one in blocks[at::step]] for at in range(step))
        firsts = blocks[::step]
        if self.form == "split":
            stride_bytes = self.layout.buffer_stride_bytes(pages)
            return ([one.paired(stride_bytes) for one in firsts],)
        return ([one.halved() for one in firsts] if self.form == "halves" else firsts,)


class BlocksOfShape(NamedTuple):
    """The blocks that a cache shape describes."""

    form: Form
    num_blocks: int
    block_shape: tuple[int, ...]
    tokens: int
    """Tokens of a block, by the shape."""


class EngineShapes(Protocol):
    """Interface of `kvelastic/integration/NAME/shapes.py`: how the engine describes a cache."""

    ATTENTION_TYPES: tuple[str, ...]
    BLOCK_SIZE: str
    """The engine's name for the tokens of a block, for messages."""
    HYBRID_ADVICE: str
    """Advice in the error for models that mix attention with states, if they are refused."""

    @staticmethod
    def accepted(attention_type: str) -> str:
        """Return a description of the accepted shapes, for people."""

    @staticmethod
    def read(shape: tuple[int, ...], attention_type: str, block_size: int) -> BlocksOfShape | None:
        """Return the blocks of a shape, or None if the shape is not accepted.

        Every size of the shape is 1 or more.
        """


KV_LAYOUTS: Final = ("NHD",)
ITEMSIZES: Final = (1, 2, 4, 8)  # powers of two: strides between pages are whole elements


def plan(
    kvcache_shape: Sequence[int],
    *,
    engine: str,
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
    """Convert an engine's cache shape to a layout and views.

    `engine` is a name of `kvelastic.engines`; its folder describes the shapes. `block_size` is in
    tokens, `itemsize` in bytes per element. See `PageLayout.solve` for `granularity_bytes`,
    `page_size_bytes` and `per_buffer`. With `kernel_block_size`, views count blocks of that many
    tokens.

    Raises `InvalidArgumentError` for an unknown engine, attention type or kv_layout,
    `UnsupportedError` for hybrid models that the engine's folder does not support, and
    `LayoutError` for a shape that does not match.
    """
    shapes: EngineShapes = engines.find_with_interfaces(engine).shapes()
    accepted = shapes.ATTENTION_TYPES
    if attention_type not in accepted and attention_type.upper().startswith(("HYBRID", "MAMBA")):
        raise UnsupportedError(
            f"Hybrid models of this kind (attention_type={attention_type!r}) are not supported;"
            f" accepted are {', '.join(accepted)}. {shapes.HYBRID_ADVICE}".rstrip()
        )
    _one_of("attention_type", attention_type, accepted)
    _one_of("kv_layout", kv_layout, KV_LAYOUTS)
    positive(shapes.BLOCK_SIZE, block_size)
    if itemsize not in ITEMSIZES:
        raise LayoutError(f"itemsize={itemsize!r} is not accepted; it must be one of {ITEMSIZES}.")
    positive("num_layers", num_layers)
    shape = _checked_shape(kvcache_shape, shapes.accepted(attention_type))
    blocks = shapes.read(shape, attention_type, block_size)
    if blocks is None:
        raise LayoutError(
            f"kvcache_shape={shape} is not accepted for {engine} and {attention_type}; it must be"
            f" {shapes.accepted(attention_type)}."
        )
    form, num_blocks, block_shape, tokens = blocks
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
        at = 1 if form in ("fused", "halves") else 0
        block_shape = (*block_shape[:at], kernel_block_size, *block_shape[at + 1 :])
    return CachePlan(layout, num_blocks, num_layers, block_shape, itemsize, form, ratio)


def plan_states(
    parts: Sequence[tuple[tuple[int, ...], int]],
    *,
    num_layers: int,
    page_size_bytes: int = GRANULARITY_BYTES,
    per_buffer: bool = False,
) -> tuple[PageLayout, list[int]]:
    """Return a layout whose blocks hold fixed-size states, and each state's offset in a block.

    `parts` are shapes and bytes per element. Raises `LayoutError` for an invalid shape or size.
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
    """Return a view of one state in each layer and block, as `(layers, ids, *shape)`."""
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
