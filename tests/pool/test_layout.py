"""Block ids, pages and addresses, by brute force."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvelastic.errors import LayoutError
from kvelastic.pool.layout import (
    GRANULARITY_BYTES,
    MAX_PAGE_BYTES,
    PADDING_ACCEPTED,
    TARGET_BLOCKS,
    PageLayout,
)

# Small numbers, so that brute force can look at every byte; the arithmetic knows no scale.
GRANULE = 64


@st.composite
def layouts(draw: st.DrawFn) -> PageLayout:
    per_buffer = draw(st.booleans())
    if draw(st.booleans()):
        return PageLayout.solve(
            draw(st.integers(1, 200)),
            draw(st.integers(1, 6)),
            granularity_bytes=GRANULE,
            page_size_bytes=draw(st.integers(1, 4 * GRANULE)),
            per_buffer=per_buffer,
        )
    # Any B that fits, not only the one that solve would choose.
    block_bytes, buffers = draw(st.integers(1, 100)), draw(st.integers(1, 5))
    extent = GRANULE * draw(st.integers(1, 20))
    share = 1 if per_buffer else buffers
    most = most_blocks(block_bytes, share, extent)
    assume(most >= 1)
    return PageLayout(block_bytes, buffers, draw(st.integers(1, most)), extent, per_buffer)


def most_blocks(block_bytes: int, buffers: int, extent: int) -> int:
    """The largest B for which every page of a long range keeps its blocks inside, by trying."""
    blocks = 0
    while all(
        (-(-page * extent // block_bytes) + buffers * (blocks + 1)) * block_bytes
        <= (page + 1) * extent
        for page in range(block_bytes)  # skipped bytes repeat after at most block_bytes pages
    ):
        blocks += 1
    return blocks


def address_ranges(layout: PageLayout, pages: int) -> list[tuple[int, int, int]]:
    """(begin, end, page) of every block in every buffer, sorted."""
    found = []
    for page in range(pages):
        for block_id in layout.ids(page):
            for buffer in range(layout.buffers):
                begin = layout.offset_bytes(block_id, buffer, pages)
                found.append((begin, begin + layout.block_bytes, page))
    return sorted(found)


PAGES = st.integers(1, 5)


@given(layouts(), PAGES)
@settings(deadline=None)
def test_blocks_do_not_overlap(layout: PageLayout, pages: int) -> None:
    ranges = address_ranges(layout, pages)
    assert len(ranges) == pages * layout.blocks_per_page * layout.buffers
    for (_, end, _), (begin, _, _) in pairwise(ranges):
        assert end <= begin


@given(layouts(), PAGES)
@settings(deadline=None)
def test_each_block_lies_in_one_extent(layout: PageLayout, pages: int) -> None:
    for begin, end, page in address_ranges(layout, pages):
        assert any(
            offset <= begin and end <= offset + size for offset, size in layout.extents(page, pages)
        )


@given(layouts(), PAGES)
@settings(deadline=None)
def test_extents_tile_the_range(layout: PageLayout, pages: int) -> None:
    extents = sorted(extent for page in range(pages) for extent in layout.extents(page, pages))
    assert len(extents) == pages * layout.extents_per_page
    position = 0
    for offset, size in extents:
        assert offset == position
        assert size == layout.extent_bytes
        assert offset % GRANULE == 0
        position += size
    assert position == layout.range_bytes(pages) == pages * layout.page_bytes
    offsets = [offset for offset, _ in layout.extents(0, pages)]
    assert offsets == [i * layout.extent_stride_bytes(pages) for i in range(len(offsets))]


@given(layouts(), PAGES)
@settings(deadline=None)
def test_every_buffer_is_dense(layout: PageLayout, pages: int) -> None:
    for buffer in range(layout.buffers):
        start = layout.offset_bytes(0, buffer, pages)
        for page in range(pages):
            for block_id in layout.ids(page):
                found = layout.offset_bytes(block_id, buffer, pages)
                assert found - start == block_id * layout.block_bytes


@given(layouts(), PAGES)
@settings(deadline=None)
def test_block_ids_match_brute_force(layout: PageLayout, pages: int) -> None:
    owner = {block_id: page for page in range(pages) for block_id in layout.ids(page)}
    assert len(owner) == pages * layout.blocks_per_page
    assert owner[0] == 0  # the null block
    span = layout.id_span(pages)
    for block_id in range(-3, span + 3):
        inside = block_id in owner
        assert layout.is_valid(block_id, pages) is inside
        if inside:
            assert layout.is_valid(block_id)
            assert layout.page_of(block_id) == owner[block_id]
    for page in range(pages):
        ids = layout.ids(page)
        assert ids[0] == layout.first_id(page)
        # The lowest id whose bytes in buffer 0 do not begin before the page.
        assert ids[0] * layout.block_bytes >= page * layout.extent_bytes
        assert (ids[0] - 1) * layout.block_bytes < page * layout.extent_bytes


@given(layouts(), PAGES)
@settings(deadline=None)
def test_id_span_covers_every_id_within_the_range(layout: PageLayout, pages: int) -> None:
    span = layout.id_span(pages)
    assert max(max(layout.ids(page)) for page in range(pages)) == span - 1
    end = layout.offset_bytes(span - 1, layout.buffers - 1, pages) + layout.block_bytes
    assert end <= layout.range_bytes(pages)


def test_zero_pages_have_no_id_span() -> None:
    assert PageLayout.solve(64, 2).id_span(0) == 0


@given(layouts(), st.integers(0, 500))
@settings(deadline=None)
def test_pages_for_blocks_is_minimal(layout: PageLayout, blocks: int) -> None:
    pages = layout.pages_for_blocks(blocks)
    assert pages * layout.blocks_per_page >= blocks
    assert pages == 0 or (pages - 1) * layout.blocks_per_page < blocks


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 12))
@settings(deadline=None, max_examples=60)
def test_page_layout_accepts_only_blocks_that_fit(
    block_bytes: int, buffers: int, granules: int
) -> None:
    extent = granules * GRANULE
    most = most_blocks(block_bytes, buffers, extent)
    assume(most >= 1)
    PageLayout(block_bytes, buffers, most, extent)
    with pytest.raises(LayoutError, match=f"blocks_per_page={most + 1} does not fit"):
        PageLayout(block_bytes, buffers, most + 1, extent)


@pytest.mark.slow
@given(st.integers(1, 400), st.integers(1, 8), st.integers(1, 6 * GRANULE), st.booleans())
@settings(deadline=None)
def test_solve_minimizes_padding(
    block_bytes: int, buffers: int, page_size: int, per_buffer: bool
) -> None:
    layout = PageLayout.solve(
        block_bytes,
        buffers,
        granularity_bytes=GRANULE,
        page_size_bytes=page_size,
        per_buffer=per_buffer,
    )
    share = 1 if per_buffer else buffers
    wanted = max(page_size, block_bytes if per_buffer else TARGET_BLOCKS * share * block_bytes)
    target = -(-wanted // GRANULE) * GRANULE
    waste = {}
    for extent in range(target, 2 * target + 1, GRANULE):
        if (blocks := most_blocks(block_bytes, share, extent)) >= 1:
            waste[extent] = 1 - share * blocks * block_bytes / extent
    good = [extent for extent in waste if per_buffer or waste[extent] < PADDING_ACCEPTED]
    expected = good[0] if good else min(waste, key=lambda extent: (waste[extent], extent))
    assert layout.extent_bytes == expected
    assert layout.blocks_per_page == most_blocks(block_bytes, share, expected)
    assert layout.padding_fraction == pytest.approx(waste[expected])


def test_design_document_example() -> None:
    layout = PageLayout.solve(24 << 10, 30)
    assert layout.page_bytes == 12 << 20
    assert layout.blocks_per_page == 17
    assert layout.padding_fraction == pytest.approx(2 / 512)
    assert layout.first_id(1) == 512
    six = PageLayout(24 << 10, 30, 8, 6 << 20)
    assert six.padding_fraction == pytest.approx(16 / 256)


@given(st.integers(1, 4 << 20), st.integers(1, 200))
@settings(deadline=None)
def test_real_block_sizes_are_solved(block_bytes: int, buffers: int) -> None:
    try:
        layout = PageLayout.solve(block_bytes, buffers)
    except LayoutError:
        assert block_bytes * buffers * 2 > MAX_PAGE_BYTES
        return
    assert layout.extent_bytes % GRANULARITY_BYTES == 0
    assert layout.page_bytes <= MAX_PAGE_BYTES
    pages = 1000
    end = layout.offset_bytes(layout.id_span(pages) - 1, buffers - 1, pages) + block_bytes
    assert end <= layout.range_bytes(pages)


def test_block_larger_than_a_page_is_rejected() -> None:
    with pytest.raises(LayoutError, match=f"a block of {1 << 29} bytes in 3") as caught:
        PageLayout.solve(1 << 29, 3)
    assert str(MAX_PAGE_BYTES) in str(caught.value)
    assert PageLayout.solve(1 << 29, 3, per_buffer=True).blocks_per_page >= 1
    assert PageLayout.solve(1 << 29, 2).blocks_per_page == 1
    with pytest.raises(LayoutError, match="does not fit"):
        PageLayout.solve(MAX_PAGE_BYTES + 1, 1, per_buffer=True)


@pytest.mark.parametrize("value", [0, -1, 1.5, "8", None, True])
@pytest.mark.parametrize("name", ["block_bytes", "buffers", "granularity_bytes", "page_size_bytes"])
def test_solve_rejects_non_positive_arguments(name: str, value: Any) -> None:
    arguments: dict[str, Any] = {"block_bytes": 64, "buffers": 2, name: value}
    with pytest.raises(LayoutError, match=f"{name}={value!r} is not accepted"):
        PageLayout.solve(**arguments)


@pytest.mark.parametrize("name", ["granularity_bytes", "page_size_bytes"])
def test_solve_rejects_sizes_above_the_largest_page(name: str) -> None:
    arguments: dict[str, Any] = {name: MAX_PAGE_BYTES + 1}
    with pytest.raises(LayoutError, match=f"{name}={MAX_PAGE_BYTES + 1}"):
        PageLayout.solve(64, 2, **arguments)


def test_page_for_one_block_is_minimal() -> None:
    """Blocks of which all layers lie side by side: nothing is gained by neighbours in a page."""
    mib = 1 << 20
    small = PageLayout.solve(32 << 10, 1, fewest_blocks=1)
    assert (small.extent_bytes, small.blocks_per_page) == (2 * mib, 64)
    large = PageLayout.solve(32 * mib, 1, fewest_blocks=1)
    assert (large.extent_bytes, large.blocks_per_page) == (32 * mib, 1)
    # One that divides no page would waste two thirds of the smallest.
    odd = PageLayout.solve(720 << 10, 1, fewest_blocks=1)
    assert odd.padding_fraction < 0.07
    assert odd.extent_bytes <= 2 * 8 * (720 << 10) + 2 * mib
    assert PageLayout.solve(720 << 10, 1, fewest_blocks=8) == PageLayout.solve(720 << 10, 1)
    with pytest.raises(LayoutError, match="fewest_blocks=0"):
        PageLayout.solve(32 << 10, 1, fewest_blocks=0)
