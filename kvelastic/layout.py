"""The arithmetic between block ids, pages and buffer addresses; there is no memory in it.

Words: a *buffer* is what one layer's K, or V, or fused cache looks like to a kernel; n is their
number. A *block* has `block_bytes` (b) in each buffer. A *page* is what a driver maps at once: one
*extent* of `extent_bytes` (E) in the paged layout, n of them in the per-buffer layout. B is
`blocks_per_page`.

Paged layout (the default), here n = 3, B = 2 and E = 8 b, so that two slots of a page are padding::

    slot (= address / b)   0    1    2    3    4    5    6    7  |  8    9   10   11  ...
                        [ buffer 0 ][ buffer 1 ][ buffer 2 ]  pad | [ buffer 0 ][ buffer 1 ]
    holds block id         0    1    0    1    0    1    -    -  |  8    9    8    9  ...

    address(id, i) = base + (i*B + id) * b       so buffer i is one dense tensor that starts at
                                                 slot i*B, and ids 2..7 are never handed out

When b does not divide E, page p begins inside a slot, and its first id is the next whole one::

    p*E            first_id(p)*b                                                   (p+1)*E
     |<- < b: skipped ->|[ buffer 0: B blocks ] ... [ buffer n-1: B blocks ]| rest |

    first_id(p) = ceil(p*E / b)      skipped <= b - gcd(E, b)      so B is the largest integer with
                                                       (b - gcd(E, b)) + n*B*b <= E

The per-buffer layout gives every buffer pages of its own: page p is n extents, extent i at
`i * extent_stride + p*E`, and address(id, i) = base + i * extent_stride + id*b; everything above
holds with n = 1 in each of the n parts of the range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod
from operator import index
from typing import Final, Literal, NamedTuple

from kvelastic.errors import InvalidArgumentError, LayoutError, UnsupportedError

GRANULARITY_BYTES: Final = 2 << 20
"""What drivers map at least, and what addresses of pages are multiples of."""

MAX_PAGE_BYTES: Final = 1 << 30
"""The largest extent that `PageLayout.solve` chooses: beyond it a pool is no longer elastic."""

TARGET_BLOCKS: Final = 8
"""A page has room for about this many blocks, so that attention reads neighbours close together."""

PADDING_ACCEPTED: Final = 0.01
"""A page that wastes less than this is good enough to stop looking for a better size."""


@dataclass(frozen=True)
class PageLayout:
    """Where each block lives. Immutable, and every method is pure and thread-safe.

        layout = PageLayout.solve(24 << 10, 30)      # 12 MiB pages of 17 blocks
        layout.offset_bytes(layout.first_id(3), buffer=29, pages=100)

    `pages` is the number of pages of the range. Ids, pages and buffers count from 0; block id 0 is
    the null block. Methods do not check that an id lies within the range: `is_valid` does.
    """

    block_bytes: int
    buffers: int
    blocks_per_page: int
    extent_bytes: int
    per_buffer: bool = False

    def __post_init__(self) -> None:
        for name in ("block_bytes", "buffers", "blocks_per_page", "extent_bytes"):
            _positive(name, getattr(self, name))
        most = _most_blocks(self.block_bytes, self._buffers_per_extent, self.extent_bytes)
        if self.blocks_per_page > most:
            raise LayoutError(
                f"blocks_per_page={self.blocks_per_page} does not fit: an extent of"
                f" {self.extent_bytes} bytes holds at most {most} blocks of {self.block_bytes}"
                f" bytes in {self._buffers_per_extent} buffer(s)."
            )

    @classmethod
    def solve(
        cls,
        block_bytes: int,
        buffers: int,
        *,
        granularity_bytes: int = GRANULARITY_BYTES,
        page_size_bytes: int = GRANULARITY_BYTES,
        per_buffer: bool = False,
    ) -> PageLayout:
        """Choose the extent size for blocks of `block_bytes` in `buffers` buffers.

        The target is `page_size_bytes` or room for `TARGET_BLOCKS` blocks, whichever is more, in
        whole granules. Of the sizes from there to twice it the smallest that wastes less than
        `PADDING_ACCEPTED` is taken, else the least wasteful. Raises `LayoutError` if a value is
        not positive, or if not even one block fits into `MAX_PAGE_BYTES`.
        """
        _positive("block_bytes", block_bytes)
        _positive("buffers", buffers)
        _positive("granularity_bytes", granularity_bytes)
        _positive("page_size_bytes", page_size_bytes)
        largest = MAX_PAGE_BYTES // granularity_bytes * granularity_bytes
        for name, value in (
            ("granularity_bytes", granularity_bytes),
            ("page_size_bytes", page_size_bytes),
        ):
            if value > largest:
                raise LayoutError(
                    f"{name}={value} is more than the largest page, {MAX_PAGE_BYTES} bytes;"
                    " choose a smaller one."
                )
        share = 1 if per_buffer else buffers
        wanted = max(page_size_bytes, TARGET_BLOCKS * share * block_bytes)
        target = min(_round_up(wanted, granularity_bytes), largest)
        best: PageLayout | None = None
        for extent in range(target, min(2 * target, largest) + 1, granularity_bytes):
            blocks = _most_blocks(block_bytes, share, extent)
            if blocks < 1:
                continue
            layout = cls(block_bytes, buffers, blocks, extent, per_buffer)
            if best is None or layout.padding_fraction < best.padding_fraction:
                best = layout
            if layout.padding_fraction < PADDING_ACCEPTED:
                break
        if best is None:
            raise LayoutError(
                f"a block of {block_bytes} bytes in {share} buffer(s) of one extent does not fit"
                f" the largest page, {MAX_PAGE_BYTES} bytes; use fewer tokens a block"
                + ("." if per_buffer else ", or set KVELASTIC_CONTIGUOUS_LAYOUT=false.")
            )
        return best

    # Pages and their memory

    @property
    def _buffers_per_extent(self) -> int:
        return 1 if self.per_buffer else self.buffers

    @property
    def extents_per_page(self) -> int:
        """Driver mappings a page consists of."""
        return self.buffers if self.per_buffer else 1

    @property
    def page_bytes(self) -> int:
        """Bytes of memory that one page costs."""
        return self.extent_bytes * self.extents_per_page

    @property
    def padding_fraction(self) -> float:
        """The part of a page that no block can use, 0 <= f < 1."""
        used = self._buffers_per_extent * self.blocks_per_page * self.block_bytes
        return 1 - used / self.extent_bytes

    def range_bytes(self, pages: int) -> int:
        """Bytes of addresses for `pages` pages."""
        return pages * self.page_bytes

    def extent_stride_bytes(self, pages: int) -> int:
        """Bytes from one extent of a page to its next one (the whole range if there is one)."""
        return pages * self.extent_bytes

    def extents(self, page: int, pages: int) -> list[tuple[int, int]]:
        """`(offset, bytes)` of each extent of `page`, in the order of the buffers."""
        stride = self.extent_stride_bytes(pages)
        first = page * self.extent_bytes
        return [(i * stride + first, self.extent_bytes) for i in range(self.extents_per_page)]

    # Block ids

    def first_id(self, page: int) -> int:
        """The lowest block id of `page`."""
        return -(-page * self.extent_bytes // self.block_bytes)

    def ids(self, page: int) -> range:
        """All block ids of `page`; the ids up to the next page's are never handed out."""
        first = self.first_id(page)
        return range(first, first + self.blocks_per_page)

    def page_of(self, block_id: int) -> int:
        """The page that a valid id belongs to; without meaning for an invalid one."""
        return block_id * self.block_bytes // self.extent_bytes

    def is_valid(self, block_id: int, pages: int | None = None) -> bool:
        """Whether a block has this id: in any page, or in the first `pages` ones."""
        if block_id < 0:
            return False
        page = self.page_of(block_id)
        if pages is not None and page >= pages:
            return False
        return block_id - self.first_id(page) < self.blocks_per_page

    def pages_for_blocks(self, blocks: int) -> int:
        """How many pages have `blocks` blocks, the null block counted."""
        return -(-blocks // self.blocks_per_page)

    def id_span(self, pages: int) -> int:
        """How many ids a tensor of one buffer has: the highest valid id and one more.

        The range ends soon after the last block of the last buffer, so a longer tensor of that
        buffer would leave the range::

            buffer 0     [ span ids                       ]
            buffer n-1             [ span ids                       ]
            range       |......................................... pages*E|
        """
        return self.first_id(pages - 1) + self.blocks_per_page if pages > 0 else 0

    # Addresses

    def buffer_stride_bytes(self, pages: int) -> int:
        """Bytes from a block in one buffer to the same block in the next buffer."""
        if self.per_buffer:
            return self.extent_stride_bytes(pages)
        return self.blocks_per_page * self.block_bytes

    def offset_bytes(self, block_id: int, buffer: int, pages: int) -> int:
        """Where a block begins in a buffer, from the base of the range."""
        return buffer * self.buffer_stride_bytes(pages) + block_id * self.block_bytes


class VllmPlacement(NamedTuple):
    """vLLM's own terms: block b of layer l lies at `offset + l*layer_stride + b*block_stride`."""

    offset: int
    layer_stride: int  # bytes
    block_stride: int  # bytes
    size: int  # bytes of the whole allocation
    num_blocks: int  # ids a layer's view has


def vllm_placement(layout: PageLayout, layers: int, pages: int) -> VllmPlacement:
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
    return VllmPlacement(
        offset=0,
        layer_stride=layout.buffer_stride_bytes(pages),
        block_stride=layout.block_bytes,
        size=layout.range_bytes(pages),
        num_blocks=layout.id_span(pages),
    )


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
    layout: PageLayout, pages: int, buffer: int, block_shape: tuple[int, ...], itemsize: int
) -> TensorView:
    """One buffer as `(ids, *block_shape)`: element [id] is that block, dense in itself.

    Raises `LayoutError` if `block_shape` does not have the layout's bytes.
    """
    if prod(block_shape) * itemsize != layout.block_bytes:
        raise LayoutError(
            f"block shape {block_shape} of {itemsize}-byte elements does not match the layout's"
            f" blocks of {layout.block_bytes} bytes."
        )
    return TensorView(
        offset_bytes=buffer * layout.buffer_stride_bytes(pages),
        shape=(layout.id_span(pages), *block_shape),
        strides=(layout.block_bytes // itemsize, *_dense_strides(block_shape)),
        itemsize=itemsize,
    )


def pair_view(
    layout: PageLayout, pages: int, buffer: int, block_shape: tuple[int, ...], itemsize: int
) -> TensorView:
    """Two neighbouring buffers as `(2, ids, *block_shape)`: [0][id] is K of a block, [1][id] V.

    The two halves overlap in addresses and never in blocks::

        [0]   | K of page 0's ids |                   | K of page 1's ids | ...
        [1]                       | V of page 0's ids |                   | V of page 1's ids | ...
              |<- buffer stride ->|
    """
    one = block_view(layout, pages, buffer, block_shape, itemsize)
    stride = layout.buffer_stride_bytes(pages) // itemsize
    return one._replace(shape=(2, *one.shape), strides=(stride, *one.strides))


def token_view(
    layout: PageLayout, pages: int, buffer: int, block_shape: tuple[int, ...], itemsize: int
) -> TensorView:
    """One buffer indexed by token: `(ids * tokens, *block_shape[1:])`.

    Token t of block id is row `id * tokens + t`; blocks are dense, so their rows follow on.
    """
    one = block_view(layout, pages, buffer, block_shape, itemsize)
    return one._replace(
        shape=(one.shape[0] * block_shape[0], *block_shape[1:]), strides=one.strides[1:]
    )


@dataclass(frozen=True)
class CachePlan:
    """What an engine's cache shape becomes: a layout, and the views that the engine gets."""

    layout: PageLayout
    num_blocks: int
    """Blocks the engine asked for; ids go far beyond it (see `PageLayout.id_span`)."""
    num_layers: int
    block_shape: tuple[int, ...]
    itemsize: int
    form: Literal["split", "fused", "latent", "token_kv", "token_latent"]

    def views(self, pages: int) -> tuple[list[TensorView], ...]:
        """One list with a view a layer; two lists (all K, all V) for SGLang's MHA and GQA."""
        step = self.layout.buffers // self.num_layers
        firsts = range(0, self.layout.buffers, step)
        if self.form in ("token_kv", "token_latent"):
            starts = [[first + i for first in firsts] for i in range(step)]
            make = token_view
        else:
            starts = [list(firsts)]
            make = pair_view if self.form == "split" else block_view
        return tuple(
            [make(self.layout, pages, buffer, self.block_shape, self.itemsize) for buffer in each]
            for each in starts
        )


ATTENTION_TYPES: Final = ("MHA", "GQA", "MLA")
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
) -> CachePlan:
    """Turn an engine's cache shape into a layout and views.

    `block_size` is in tokens (SGLang calls it page_size), `itemsize` in bytes an element, and the
    last three arguments are those of `PageLayout.solve`. `(2, 2, tokens, heads, dim)` is read as K
    and V first. Raises `InvalidArgumentError` for an unknown engine, attention type or kv_layout,
    `UnsupportedError` for hybrid models, and `LayoutError` for a shape that does not match.
    """
    _one_of("engine", engine, ("vllm", "sglang"))
    if attention_type.upper().startswith(("HYBRID", "MAMBA")):
        raise UnsupportedError(
            f"Hybrid models (attention_type={attention_type!r}) are not supported yet; accepted"
            f" are {', '.join(ATTENTION_TYPES)}. Serve this model with ENABLE_KVELASTIC=false."
        )
    _one_of("attention_type", attention_type, ATTENTION_TYPES)
    _one_of("kv_layout", kv_layout, KV_LAYOUTS)
    _positive("block_size" if engine == "vllm" else "page_size", block_size)
    if itemsize not in ITEMSIZES:
        raise LayoutError(f"itemsize={itemsize!r} is not accepted; it must be one of {ITEMSIZES}.")
    _positive("num_layers", num_layers)
    latent = attention_type == "MLA"
    shape = _checked_shape(kvcache_shape, _SHAPES[engine, latent])

    form: Literal["split", "fused", "latent", "token_kv", "token_latent"]
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
    if not good:
        raise LayoutError(
            f"kvcache_shape={shape} is not accepted for {engine} and {attention_type}; it must be"
            f" {_SHAPES[engine, latent]}."
        )
    tokens = block_shape[1] if form == "fused" else block_shape[0]
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
    return CachePlan(layout, num_blocks, num_layers, block_shape, itemsize, form)


def _most_blocks(block_bytes: int, buffers: int, extent_bytes: int) -> int:
    """B of the module's drawing; 0 or less where not one block fits."""
    skipped = block_bytes - gcd(extent_bytes, block_bytes)
    return (extent_bytes - skipped) // (buffers * block_bytes)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise LayoutError(f"{name}={value!r} is not accepted; it must be an integer of 1 or more.")


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
