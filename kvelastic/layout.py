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

from dataclasses import dataclass
from math import gcd
from typing import Final

from kvelastic.errors import LayoutError
from kvelastic.sizes import GRANULARITY_BYTES

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
            positive(name, getattr(self, name))
        most = _most_blocks(self.block_bytes, self.buffers_per_extent, self.extent_bytes)
        if self.blocks_per_page > most:
            raise LayoutError(
                f"blocks_per_page={self.blocks_per_page} does not fit: an extent of"
                f" {self.extent_bytes} bytes holds at most {most} blocks of {self.block_bytes}"
                f" bytes in {self.buffers_per_extent} buffer(s)."
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
        fewest_blocks: int = TARGET_BLOCKS,
    ) -> PageLayout:
        """Choose the extent size for blocks of `block_bytes` in `buffers` buffers.

        The target is `page_size_bytes` or room for `TARGET_BLOCKS` blocks, whichever is more, in
        whole granules. Of the sizes from there to twice it the smallest that wastes less than
        `PADDING_ACCEPTED` is taken, else the least wasteful. Where neighbours need not lie close
        together, `fewest_blocks` of them are enough, and smaller pages are tried first. With
        `per_buffer` it is the smallest extent of `page_size_bytes` or more that holds a block.
        Raises `LayoutError` if a value is not positive, or if not even one block fits into
        `MAX_PAGE_BYTES`.
        """
        positive("block_bytes", block_bytes)
        positive("buffers", buffers)
        positive("granularity_bytes", granularity_bytes)
        positive("page_size_bytes", page_size_bytes)
        positive("fewest_blocks", fewest_blocks)
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

        # Pages of its own for each buffer: neighbours are close anyway, and a page costs one
        # mapping a buffer, so the smallest is best.
        def room_for(blocks: int) -> int:
            wanted = max(page_size_bytes, (1 if per_buffer else blocks) * share * block_bytes)
            return min(_round_up(wanted, granularity_bytes), largest)

        best: PageLayout | None = None
        most = min(2 * room_for(TARGET_BLOCKS), largest)
        for extent in range(room_for(fewest_blocks), most + 1, granularity_bytes):
            blocks = _most_blocks(block_bytes, share, extent)
            if blocks < 1:
                continue
            layout = cls(block_bytes, buffers, blocks, extent, per_buffer)
            if best is None or layout.padding_fraction < best.padding_fraction:
                best = layout
            if per_buffer or layout.padding_fraction < PADDING_ACCEPTED:
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
    def buffers_per_extent(self) -> int:
        """How many buffers of a block lie side by side in one extent of a page."""
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
        used = self.buffers_per_extent * self.blocks_per_page * self.block_bytes
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


def _most_blocks(block_bytes: int, buffers: int, extent_bytes: int) -> int:
    """B of the module's drawing; 0 or less where not one block fits."""
    skipped = block_bytes - gcd(extent_bytes, block_bytes)
    return (extent_bytes - skipped) // (buffers * block_bytes)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def positive(name: str, value: object) -> None:
    """Raise `LayoutError` unless `value` is an integer of 1 or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise LayoutError(f"{name}={value!r} is not accepted; it must be an integer of 1 or more.")
