"""Block ids, pages and addresses: by brute force, and byte by byte against the views."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvelastic.errors import InvalidArgumentError, LayoutError, UnsupportedError
from kvelastic.layout import (
    GRANULARITY_BYTES,
    MAX_PAGE_BYTES,
    PADDING_ACCEPTED,
    TARGET_BLOCKS,
    CachePlan,
    PageLayout,
    TensorView,
    block_view,
    plan,
    vllm_placement,
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
def test_no_two_blocks_overlap(layout: PageLayout, pages: int) -> None:
    ranges = address_ranges(layout, pages)
    assert len(ranges) == pages * layout.blocks_per_page * layout.buffers
    for (_, end, _), (begin, _, _) in pairwise(ranges):
        assert end <= begin


@given(layouts(), PAGES)
@settings(deadline=None)
def test_every_block_lies_in_one_extent_of_its_page(layout: PageLayout, pages: int) -> None:
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
def test_ids_by_brute_force(layout: PageLayout, pages: int) -> None:
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
def test_span_reaches_every_id_and_no_further_than_the_range(
    layout: PageLayout, pages: int
) -> None:
    span = layout.id_span(pages)
    assert max(max(layout.ids(page)) for page in range(pages)) == span - 1
    end = layout.offset_bytes(span - 1, layout.buffers - 1, pages) + layout.block_bytes
    assert end <= layout.range_bytes(pages)


def test_no_pages_no_span() -> None:
    assert PageLayout.solve(64, 2).id_span(0) == 0


@given(layouts(), st.integers(0, 500))
@settings(deadline=None)
def test_pages_for_blocks(layout: PageLayout, blocks: int) -> None:
    pages = layout.pages_for_blocks(blocks)
    assert pages * layout.blocks_per_page >= blocks
    assert pages == 0 or (pages - 1) * layout.blocks_per_page < blocks


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 12))
@settings(deadline=None, max_examples=60)
def test_the_most_blocks_that_fit_and_not_one_more(
    block_bytes: int, buffers: int, granules: int
) -> None:
    extent = granules * GRANULE
    most = most_blocks(block_bytes, buffers, extent)
    assume(most >= 1)
    PageLayout(block_bytes, buffers, most, extent)
    with pytest.raises(LayoutError, match=f"blocks_per_page={most + 1} does not fit"):
        PageLayout(block_bytes, buffers, most + 1, extent)


@given(st.integers(1, 400), st.integers(1, 8), st.integers(1, 6 * GRANULE), st.booleans())
@settings(deadline=None)
def test_solve_follows_the_rule(
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
    wanted = max(page_size, TARGET_BLOCKS * share * block_bytes)
    target = -(-wanted // GRANULE) * GRANULE
    waste = {}
    for extent in range(target, 2 * target + 1, GRANULE):
        if (blocks := most_blocks(block_bytes, share, extent)) >= 1:
            waste[extent] = 1 - share * blocks * block_bytes / extent
    good = [extent for extent in waste if waste[extent] < PADDING_ACCEPTED]
    expected = good[0] if good else min(waste, key=lambda extent: (waste[extent], extent))
    assert layout.extent_bytes == expected
    assert layout.blocks_per_page == most_blocks(block_bytes, share, expected)
    assert layout.padding_fraction == pytest.approx(waste[expected])


def test_the_example_of_the_design() -> None:
    layout = PageLayout.solve(24 << 10, 30)
    assert layout.page_bytes == 12 << 20
    assert layout.blocks_per_page == 17
    assert layout.padding_fraction == pytest.approx(2 / 512)
    assert layout.first_id(1) == 512
    six = PageLayout(24 << 10, 30, 8, 6 << 20)
    assert six.padding_fraction == pytest.approx(16 / 256)


@given(st.integers(1, 4 << 20), st.integers(1, 200))
@settings(deadline=None)
def test_real_sizes(block_bytes: int, buffers: int) -> None:
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


def test_a_block_that_fits_no_page() -> None:
    with pytest.raises(LayoutError, match=f"a block of {1 << 29} bytes in 3") as caught:
        PageLayout.solve(1 << 29, 3)
    assert str(MAX_PAGE_BYTES) in str(caught.value)
    assert PageLayout.solve(1 << 29, 3, per_buffer=True).blocks_per_page >= 1
    assert PageLayout.solve(1 << 29, 2).blocks_per_page == 1
    with pytest.raises(LayoutError, match="does not fit"):
        PageLayout.solve(MAX_PAGE_BYTES + 1, 1, per_buffer=True)


@pytest.mark.parametrize("value", [0, -1, 1.5, "8", None, True])
@pytest.mark.parametrize("name", ["block_bytes", "buffers", "granularity_bytes", "page_size_bytes"])
def test_solve_refuses_what_is_not_positive(name: str, value: Any) -> None:
    arguments: dict[str, Any] = {"block_bytes": 64, "buffers": 2, name: value}
    with pytest.raises(LayoutError, match=f"{name}={value!r} is not accepted"):
        PageLayout.solve(**arguments)


@pytest.mark.parametrize("name", ["granularity_bytes", "page_size_bytes"])
def test_solve_refuses_more_than_the_largest_page(name: str) -> None:
    arguments: dict[str, Any] = {name: MAX_PAGE_BYTES + 1}
    with pytest.raises(LayoutError, match=f"{name}={MAX_PAGE_BYTES + 1}"):
        PageLayout.solve(64, 2, **arguments)


# Views


def memory(layout: PageLayout, pages: int) -> np.ndarray[Any, Any]:
    """A range in which each byte of each block knows its id, buffer and place; others are -1."""
    tags = np.full(layout.range_bytes(pages), -1, dtype=np.int64)
    b = layout.block_bytes
    for page in range(pages):
        for block_id in layout.ids(page):
            for buffer in range(layout.buffers):
                begin = layout.offset_bytes(block_id, buffer, pages)
                assert (tags[begin : begin + b] == -1).all()
                tags[begin : begin + b] = (block_id * layout.buffers + buffer) * b + np.arange(b)
    return tags


def seen(tags: np.ndarray[Any, Any], view: TensorView) -> np.ndarray[Any, Any]:
    """The tag of the first byte of each element of the view; refuses to leave the range."""
    assert 0 <= view.offset_bytes < view.end_bytes <= len(tags)
    assert view.offset_bytes % view.itemsize == 0
    return np.lib.stride_tricks.as_strided(
        tags[view.offset_bytes :],
        view.shape,
        [stride * view.itemsize * tags.itemsize for stride in view.strides],
        writeable=False,
    )


def expected(layout: PageLayout, block_id: int, buffer: int, itemsize: int) -> list[int]:
    """Tags of the first byte of each element of one block, in order."""
    b = layout.block_bytes
    return [(block_id * layout.buffers + buffer) * b + at for at in range(0, b, itemsize)]


class Case(NamedTuple):
    blocks: int
    tokens: int
    heads: int
    dim: int
    layers: int
    itemsize: int
    per_buffer: bool
    pages: int


CASES = st.builds(
    Case,
    blocks=st.integers(1, 40),
    tokens=st.integers(1, 4),
    heads=st.integers(1, 3),
    dim=st.integers(1, 4),
    layers=st.integers(1, 4),
    itemsize=st.sampled_from([1, 2, 4, 8]),
    per_buffer=st.booleans(),
    pages=st.integers(1, 3),
)


def small_plan(shape: tuple[int, ...], tokens: int, engine: Any, **arguments: Any) -> CachePlan:
    return plan(
        shape,
        engine=engine,
        block_size=tokens,
        granularity_bytes=GRANULE,
        page_size_bytes=GRANULE,
        **arguments,
    )


def valid_ids(layout: PageLayout, pages: int) -> list[int]:
    return [block_id for page in range(pages) for block_id in layout.ids(page)]


@given(CASES)
@settings(deadline=None)
def test_split_views(case: Case) -> None:
    blocks, tokens, heads, dim, layers, itemsize, per_buffer, pages = case
    made = small_plan(
        (2, blocks, tokens, heads, dim),
        tokens,
        "vllm",
        itemsize=itemsize,
        num_layers=layers,
        per_buffer=per_buffer,
    )
    layout = made.layout
    assert made.num_blocks == blocks
    assert layout.buffers == 2 * layers
    assert layout.block_bytes == tokens * heads * dim * itemsize
    tags = memory(layout, pages)
    (views,) = made.views(pages)
    assert len(views) == layers
    for layer, view in enumerate(views):
        assert view.shape == (2, layout.id_span(pages), tokens, heads, dim)
        stride = (
            layout.extent_stride_bytes(pages)
            if per_buffer
            else (layout.blocks_per_page * layout.block_bytes)
        )
        assert view.strides[0] * itemsize == stride
        found = seen(tags, view)
        for block_id in valid_ids(layout, pages):
            for kv in (0, 1):
                want = expected(layout, block_id, 2 * layer + kv, itemsize)
                assert found[kv, block_id].ravel().tolist() == want


@given(CASES)
@settings(deadline=None)
def test_fused_and_latent_views_and_vllms_own_placement(case: Case) -> None:
    blocks, tokens, heads, dim, layers, itemsize, per_buffer, pages = case
    assume(blocks != 2)  # (2, 2, ...) is K and V first
    arguments: dict[str, Any] = {
        "itemsize": itemsize,
        "num_layers": layers,
        "per_buffer": per_buffer,
    }
    fused = small_plan((blocks, 2, tokens, heads, dim), tokens, "vllm", **arguments)
    latent = small_plan((blocks, tokens, dim), tokens, "vllm", attention_type="MLA", **arguments)
    for made, block_shape in ((fused, (2, tokens, heads, dim)), (latent, (tokens, dim))):
        layout = made.layout
        assert made.num_blocks == blocks
        assert layout.buffers == layers
        assert layout.block_bytes == prod(block_shape) * itemsize
        tags = memory(layout, pages)
        (views,) = made.views(pages)
        placement = vllm_placement(layout, layers, pages)
        assert placement.size == layout.range_bytes(pages)
        assert placement.num_blocks == layout.id_span(pages)
        for layer, view in enumerate(views):
            assert view.shape == (layout.id_span(pages), *block_shape)
            found = seen(tags, view)
            for block_id in valid_ids(layout, pages):
                want = expected(layout, block_id, layer, itemsize)
                assert found[block_id].ravel().tolist() == want
                begin = (
                    placement.offset
                    + layer * placement.layer_stride
                    + block_id * placement.block_stride
                )
                assert tags[begin] == want[0]
        last = placement.offset + (layers - 1) * placement.layer_stride
        assert last + placement.num_blocks * placement.block_stride <= placement.size


@given(CASES)
@settings(deadline=None)
def test_token_views(case: Case) -> None:
    blocks, tokens, heads, dim, layers, itemsize, per_buffer, pages = case
    num_tokens = blocks * tokens - (tokens - 1)  # the last block in part
    arguments: dict[str, Any] = {
        "itemsize": itemsize,
        "num_layers": layers,
        "per_buffer": per_buffer,
    }
    cases = [
        ((num_tokens, heads, dim), "GQA", 2),
        ((num_tokens, 1, dim), "MLA", 1),
        ((num_tokens, dim), "MLA", 1),
    ]
    for shape, attention_type, kinds in cases:
        made = small_plan(shape, tokens, "sglang", attention_type=attention_type, **arguments)
        layout = made.layout
        assert made.num_blocks == blocks
        assert layout.buffers == kinds * layers
        tags = memory(layout, pages)
        lists = made.views(pages)
        assert [len(views) for views in lists] == [layers] * kinds
        for kind, views in enumerate(lists):
            for layer, view in enumerate(views):
                assert view.shape == (layout.id_span(pages) * tokens, *shape[1:])
                found = seen(tags, view)
                for block_id in valid_ids(layout, pages):
                    rows = found[block_id * tokens : (block_id + 1) * tokens]
                    want = expected(layout, block_id, layer * kinds + kind, itemsize)
                    assert rows.ravel().tolist() == want


def test_views_work_as_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    made = plan((2, 64, 16, 4, 64), engine="vllm", block_size=16, itemsize=2, num_layers=3)
    pages = 2
    raw = torch.zeros(made.layout.range_bytes(pages), dtype=torch.int8)
    flat = raw.view(torch.bfloat16)
    (views,) = made.views(pages)
    tensors = [torch.as_strided(flat, v.shape, v.strides, v.offset_bytes // 2) for v in views]
    ids = valid_ids(made.layout, pages)
    for at, block_id in enumerate(ids):
        for layer, tensor in enumerate(tensors):
            tensor[0][block_id] = (at + layer) % 251
            tensor[1][block_id] = (at + layer + 101) % 251
    for at, block_id in enumerate(ids):
        for layer, tensor in enumerate(tensors):
            assert (tensor[0][block_id] == (at + layer) % 251).all()
            assert (tensor[1][block_id] == (at + layer + 101) % 251).all()


def test_two_blocks_of_k_and_v_are_read_as_k_and_v_first() -> None:
    made = plan((2, 2, 16, 4, 64), engine="vllm", block_size=16, itemsize=2, num_layers=1)
    assert made.form == "split"
    assert made.num_blocks == 2


def test_a_block_shape_of_other_bytes_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"\(16, 4, 64\) of 2-byte elements.*64 bytes"):
        block_view(PageLayout.solve(64, 2), 1, 0, (16, 4, 64), 2)


def test_vllms_placement_needs_one_buffer_a_layer() -> None:
    with pytest.raises(LayoutError, match="layers=2 does not match a layout of 4 buffers"):
        vllm_placement(PageLayout.solve(64, 4), 2, 1)


GOOD: dict[str, Any] = {
    "kvcache_shape": (2, 100, 16, 4, 64),
    "engine": "vllm",
    "block_size": 16,
    "itemsize": 2,
    "num_layers": 8,
}
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"engine": "tgi"}, InvalidArgumentError, "engine='tgi' .* vllm or sglang"),
    ({"attention_type": "SSM"}, InvalidArgumentError, "attention_type='SSM' .* MHA or GQA or MLA"),
    ({"attention_type": "HYBRID_LINEAR"}, UnsupportedError, "^Hybrid models .*'HYBRID_LINEAR'"),
    ({"attention_type": "mamba"}, UnsupportedError, "^Hybrid models .*'mamba'"),
    ({"kv_layout": "HND"}, InvalidArgumentError, "kv_layout='HND' .* NHD"),
    ({"block_size": 32}, LayoutError, "block_size=32 .* 16 tokens"),
    ({"block_size": 0}, LayoutError, "block_size=0"),
    ({"itemsize": 0}, LayoutError, "itemsize=0"),
    ({"itemsize": 3}, LayoutError, "itemsize=3"),
    ({"num_layers": 0}, LayoutError, "num_layers=0"),
    ({"kvcache_shape": (2, 100, 16, 4)}, LayoutError, r"\(2, 100, 16, 4\) .* vllm and MHA"),
    ({"kvcache_shape": (3, 100, 16, 4, 64)}, LayoutError, r"\(2, blocks, tokens, heads, dim\)"),
    ({"kvcache_shape": (2,)}, LayoutError, r"\(2,\)"),
    ({"kvcache_shape": ()}, LayoutError, r"\(\)"),
    ({"kvcache_shape": (2, 100, 16, 0, 64)}, LayoutError, "0, 64.*1 or more"),
    ({"kvcache_shape": (2, 100, 16, 4.5, 64)}, LayoutError, "4.5, 64.*1 or more"),
    ({"attention_type": "MLA"}, LayoutError, r"vllm and MLA; .* \(blocks, tokens, dim\)"),
    ({"engine": "sglang"}, LayoutError, r"sglang and MHA; .* \(tokens, heads, dim\)"),
    (
        {"engine": "sglang", "kvcache_shape": (9, 2, 64), "attention_type": "MLA"},
        LayoutError,
        r"\(tokens, dim\) or \(tokens, 1, dim\)",
    ),
    ({"engine": "sglang", "kvcache_shape": (9,), "attention_type": "MLA"}, LayoutError, r"\(9,\)"),
    (
        {"engine": "sglang", "kvcache_shape": (9, 2, 64), "block_size": -1},
        LayoutError,
        "page_size=-1",
    ),
    ({"kvcache_shape": (2, 9, 1 << 20, 64, 64), "block_size": 1 << 20}, LayoutError, "a block of"),
]


@pytest.mark.parametrize(("change", "error", "match"), REFUSED)
def test_plan_refuses_with_value_and_accepted_ones(
    change: dict[str, Any], error: type[Exception], match: str
) -> None:
    assert plan(**GOOD).num_blocks == 100
    with pytest.raises(error, match=match):
        plan(**{**GOOD, **change})


def test_plan_takes_numpy_integers() -> None:
    made = plan(**{**GOOD, "kvcache_shape": np.array([2, 100, 16, 4, 64])})
    assert made.block_shape == (16, 4, 64)
    assert all(type(size) is int for size in made.block_shape)
