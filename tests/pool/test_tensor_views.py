"""Views of engines' tensors: checked byte by byte against the layout's addresses."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import needs
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvelastic.errors import InvalidArgumentError, LayoutError, UnsupportedError
from kvelastic.pool.layout import PageLayout
from kvelastic.pool.tensor_views import CachePlan, TensorView, block_view, plan

GRANULE = 64


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
def test_split_views_match_the_layout(case: Case) -> None:
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
        last = layout.offset_bytes(layout.id_span(pages) - 1, 2 * layer + 1, pages)
        assert view.end_bytes == last + layout.block_bytes
        found = seen(tags, view)
        for block_id in valid_ids(layout, pages):
            for kv in (0, 1):
                want = expected(layout, block_id, 2 * layer + kv, itemsize)
                assert found[kv, block_id].ravel().tolist() == want


@pytest.mark.slow
@given(CASES)
@settings(deadline=None)
def test_fused_latent_and_vllm_views_match_the_layout(case: Case) -> None:
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
        for layer, view in enumerate(views):
            assert view.shape == (layout.id_span(pages), *block_shape)
            found = seen(tags, view)
            for block_id in valid_ids(layout, pages):
                want = expected(layout, block_id, layer, itemsize)
                assert found[block_id].ravel().tolist() == want
                assert tags[layout.offset_bytes(block_id, layer, pages)] == want[0]
        end = layout.offset_bytes(layout.id_span(pages), layers - 1, pages)
        assert end <= layout.range_bytes(pages)


@pytest.mark.slow
@given(CASES)
@settings(deadline=None)
def test_token_views_match_the_layout(case: Case) -> None:
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


@needs.torch
def test_views_work_as_torch_tensors() -> None:
    import torch

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


def test_ambiguous_shape_is_taken_as_k_v_first() -> None:
    made = plan((2, 2, 16, 4, 64), engine="vllm", block_size=16, itemsize=2, num_layers=1)
    assert made.form == "split"
    assert made.num_blocks == 2


def test_block_shape_of_other_size_is_rejected() -> None:
    with pytest.raises(LayoutError, match=r"\(16, 4, 64\) of 2-byte elements.*64 bytes"):
        block_view(PageLayout.solve(64, 2), 1, 0, (16, 4, 64), 2)


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
    ({"attention_type": "HYBRID"}, UnsupportedError, "^Hybrid models .*'HYBRID'"),
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
def test_plan_error_names_value_and_accepted_values(
    change: dict[str, Any], error: type[Exception], match: str
) -> None:
    assert plan(**GOOD).num_blocks == 100
    with pytest.raises(error, match=match):
        plan(**{**GOOD, **change})


def test_plan_accepts_numpy_integers() -> None:
    made = plan(**{**GOOD, "kvcache_shape": np.array([2, 100, 16, 4, 64])})
    assert made.block_shape == (16, 4, 64)
    assert all(type(size) is int for size in made.block_shape)
