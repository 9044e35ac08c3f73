"""Arithmetic between block ids, pages and buffer addresses. Allocates no memory.

Terms: a *buffer* is a kernel's view of one layer's K, V or fused cache; n is the number of buffers.
A *block* has `block_bytes` (b) in each buffer. A *page* is the unit that a driver maps: one
*extent* of `extent_bytes` (E) in the paged layout, n extents in the per-buffer layout. B is
`blocks_per_page`.

Paged layout (the default), here n = 3, B = 2 and E = 8 b, so that two slots of a page are padding::

    slot (= address / b)   0    1    2    3    4    5    6    7  |  8    9   10   11  ...
                        [ buffer 0 ][ buffer 1 ][ buffer 2 ]  pad | [ buffer 0 ][ buffer 1 ]
    holds block id         0    1    0    1    0    1    -    -  |  8    9    8    9  ...

    address(id, i) = base + (i*B + id) * b       so buffer i is one dense tensor that starts at
                                                 slot i*B, and ids 2..7 are never allocated

If b does not divide E, page p starts inside a slot. Its first id is that of the next whole slot::

    p*E            first_id(p)*b                                                   (p+1)*E
     |<- < b: skipped ->|[ buffer 0: B blocks ] ... [ buffer n-1: B blocks ]| rest |

    first_id(p) = ceil(p*E / b)      skipped <= b - gcd(E, b)      so B is the largest integer with
                                                       (b - gcd(E, b)) + n*B*b <= E

In the per-buffer layout, each buffer has separate extents. Page p is n extents; extent i is at
`i * extent_stride + p*E`, and address(id, i) = base + i * extent_stride + id*b. In each of the n
parts of the range, the formulas above apply with n = 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Final

from kvelastic.errors import LayoutError
from kvelastic.units import GRANULARITY_BYTES

MAX_PAGE_BYTES: Final = 1 << 30
"""Upper bound of the extents that `PageLayout.solve` chooses. Larger ones would not be elastic."""

TARGET_BLOCKS: Final = 8
"""Blocks per page to aim for, so that attention reads neighbouring blocks from nearby memory."""

PADDING_ACCEPTED: Final = 0.01
"""`PageLayout.solve` stops at the first size that wastes a smaller fraction than this."""


@dataclass(frozen=True)
class PageLayout:
    """Computes where blocks lie. Immutable; every method is pure and thread-safe.

        layout = PageLayout.solve(block_bytes=24 << 10, buffers=30)   # 12 MiB pages of 17 blocks
        layout.offset_bytes(layout.first_id(3), buffer=29, pages=100) # from the range's base

    `pages` is the number of pages of the reserved address range; offsets depend on it in the
    per-buffer layout only. Ids, pages and buffers count from 0; block id 0 is the null block. Only
    `is_valid` checks that an id is within the range.
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

        The target is the larger of `page_size_bytes` and the size of `TARGET_BLOCKS` blocks,
        rounded up to granules. Among sizes up to twice the target, this takes the smallest that
        wastes less than `PADDING_ACCEPTED`, else the least wasteful. If neighbours need not be
        close together, pass a smaller `fewest_blocks`; then smaller pages are tried first. With
        `per_buffer`, it takes the smallest extent of at least `page_size_bytes` that holds a block.

        Raises `LayoutError` if a value is not positive, or if no block fits into `MAX_PAGE_BYTES`.
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

        # With per_buffer, neighbours are close anyway, and a page costs one mapping per buffer. So
        # the smallest size is best.
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
        """Number of buffers of a block in one extent of a page."""
        return 1 if self.per_buffer else self.buffers

    @property
    def extents_per_page(self) -> int:
        """Number of driver mappings per page."""
        return self.buffers if self.per_buffer else 1

    @property
    def page_bytes(self) -> int:
        """Bytes of memory of one page."""
        return self.extent_bytes * self.extents_per_page

    @property
    def padding_fraction(self) -> float:
        """Fraction of a page that no block can use, 0 <= f < 1."""
        used = self.buffers_per_extent * self.blocks_per_page * self.block_bytes
        return 1 - used / self.extent_bytes

    def range_bytes(self, pages: int) -> int:
        """Return the bytes of addresses for `pages` pages."""
        return pages * self.page_bytes

    def extent_stride_bytes(self, pages: int) -> int:
        """Return the bytes from one extent of a page to the next; the whole range if it has one."""
        return pages * self.extent_bytes

    def extents(self, page: int, pages: int) -> list[tuple[int, int]]:
        """Return `(offset, bytes)` of each extent of `page`, in the order of the buffers."""
        stride = self.extent_stride_bytes(pages)
        first = page * self.extent_bytes
        return [(i * stride + first, self.extent_bytes) for i in range(self.extents_per_page)]

    # Block ids

    def first_id(self, page: int) -> int:
        """Return the lowest block id of `page`."""
        return -(-page * self.extent_bytes // self.block_bytes)

    def ids(self, page: int) -> range:
        """Return the block ids of `page`; ids between two pages are never allocated."""
        first = self.first_id(page)
        return range(first, first + self.blocks_per_page)

    def page_of(self, block_id: int) -> int:
        """Return the page of a valid id. For an invalid id, the result has no meaning."""
        return block_id * self.block_bytes // self.extent_bytes

    def is_valid(self, block_id: int, pages: int | None = None) -> bool:
        """Return whether a block has this id, in any page or in the first `pages` pages."""
        if block_id < 0:
            return False
        page = self.page_of(block_id)
        if pages is not None and page >= pages:
            return False
        return block_id - self.first_id(page) < self.blocks_per_page

    def pages_for_blocks(self, blocks: int) -> int:
        """Return the number of pages for `blocks` blocks, including the null block."""
        return -(-blocks // self.blocks_per_page)

    def id_span(self, pages: int) -> int:
        """Return the number of ids of a buffer's tensor: the highest valid id plus one.

        The range ends soon after the last block of the last buffer. So a longer tensor of that
        buffer would exceed the range::

            buffer 0     [ span ids                       ]
            buffer n-1             [ span ids                       ]
            range       |......................................... pages*E|
        """
        return self.first_id(pages - 1) + self.blocks_per_page if pages > 0 else 0

    # Addresses

    def buffer_stride_bytes(self, pages: int) -> int:
        """Return the bytes from a block in one buffer to the same block in the next buffer."""
        if self.per_buffer:
            return self.extent_stride_bytes(pages)
        return self.blocks_per_page * self.block_bytes

    def offset_bytes(self, block_id: int, buffer: int, pages: int) -> int:
        """Return the offset of a block in a buffer, from the base of the range."""
        return buffer * self.buffer_stride_bytes(pages) + block_id * self.block_bytes


def _most_blocks(block_bytes: int, buffers: int, extent_bytes: int) -> int:
    """Return B of the diagram above; 0 or less if no block fits."""
    skipped = block_bytes - gcd(extent_bytes, block_bytes)
    return (extent_bytes - skipped) // (buffers * block_bytes)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def positive(name: str, value: object) -> None:
    """Raise `LayoutError` unless `value` is an integer of 1 or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise LayoutError(f"{name}={value!r} is not accepted; it must be an integer of 1 or more.")
