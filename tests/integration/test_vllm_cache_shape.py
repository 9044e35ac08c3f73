"""vLLM's placements rewritten to the paged layout: every byte of every block has one place."""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvelastic.errors import UnsupportedEngineError
from kvelastic.integration.vllm import cache_shape
from kvelastic.integration.vllm.cache_shape import CacheShape
from kvelastic.pool.layout import PageLayout

PAGES = 5
NUM_BLOCKS = 40


def tensor(layers: int, layer_stride: int, block_stride: int, offset: int = 0, size: int = 0):
    return SimpleNamespace(
        layers=[f"layer {i}" for i in range(layers)],
        layer_stride=layer_stride,
        block_stride=block_stride,
        offset=offset,
        size=size,
    )


def config(*tensors, groups: int = 1, layout: str = "LBHNC", num_blocks: int = NUM_BLOCKS):
    return SimpleNamespace(
        kv_cache_tensors=list(tensors),
        kv_cache_groups=[None] * groups,
        kv_cache_layout=layout,
        num_blocks=num_blocks,
    )


def by_layers(block_bytes: int, *groups: int, num_blocks: int = NUM_BLOCKS):
    """Layer by layer; each group of so many layers overlays the others."""
    stride = block_bytes * num_blocks
    tensors = [tensor(layers, stride, block_bytes) for layers in groups]
    return config(*tensors, groups=len(groups), num_blocks=num_blocks)


def rewritten(before, shape: CacheShape):
    layout = PageLayout.solve(shape.block_bytes, shape.buffers)
    after = copy.deepcopy(before)
    cache_shape.rewrite(after, shape, layout, PAGES)
    return after, layout


def places(after, block_id: int, page_bytes_of) -> list[range]:
    """Where the layers of one group have their part of a block."""
    return [
        range(start, start + page_bytes_of(one))
        for one in after.kv_cache_tensors
        for layer in range(len(one.layers))
        for start in [one.offset + layer * one.layer_stride + block_id * one.block_stride]
    ]


def check_one_group(before, page_bytes_of) -> None:
    """No two blocks of any layers share a byte, and all of a block lies in its page."""
    shape = cache_shape.shape_of(before)
    after, layout = rewritten(before, shape)
    assert after.num_blocks == layout.id_span(PAGES)
    taken: dict[int, object] = {}
    for page in range(PAGES):
        inside = range(page * layout.page_bytes, (page + 1) * layout.page_bytes)
        for block_id in layout.ids(page):
            for place in places(after, block_id, page_bytes_of):
                assert place[0] in inside
                assert place[-1] in inside
                for at in (place[0], place[-1]):
                    assert at not in taken
                    taken[at] = block_id
    assert all(one.size == layout.range_bytes(PAGES) for one in after.kv_cache_tensors)
    ends = sorted((place[0], place[-1]) for page in range(PAGES) for block_id in layout.ids(page)
                  for place in places(after, block_id, page_bytes_of))  # fmt: skip
    assert all(left[1] < right[0] for left, right in itertools.pairwise(ends))


@pytest.mark.slow
@given(layers=st.integers(1, 12), block_bytes=st.integers(1, 200).map(lambda n: n * 512))
def test_one_group_is_placed_layer_by_layer(layers: int, block_bytes: int) -> None:
    before = by_layers(block_bytes, layers)
    assert cache_shape.shape_of(before) == CacheShape("layers", block_bytes, layers)
    check_one_group(before, lambda one: block_bytes)


def test_overlaid_groups_share_buffers_and_ids() -> None:
    before = by_layers(4096, 3, 5, 2)
    shape = cache_shape.shape_of(before)
    assert shape == CacheShape("layers", 4096, 5), "as many buffers as the largest group"
    after, layout = rewritten(before, shape)
    for one in after.kv_cache_tensors:
        assert (one.offset, one.block_stride) == (0, 4096)
        assert one.layer_stride == layout.buffer_stride_bytes(PAGES)


def test_several_tensors_of_one_group_keep_their_buffers() -> None:
    block_bytes = 8192
    region = block_bytes * NUM_BLOCKS
    before = config(
        tensor(3, region, block_bytes), tensor(2, region, block_bytes, offset=3 * region)
    )
    assert cache_shape.shape_of(before) == CacheShape("layers", block_bytes, 5)
    check_one_group(before, lambda one: block_bytes)


def test_packed_layers_keep_their_offsets_in_the_block() -> None:
    packed = 100 << 10
    before = config(
        tensor(4, 16 << 10, packed), tensor(2, 18 << 10, packed, offset=64 << 10), layout="BLHNC"
    )
    assert cache_shape.shape_of(before) == CacheShape("blocks", packed, 1)
    after, _ = rewritten(before, CacheShape("blocks", packed, 1))
    assert [one.layer_stride for one in after.kv_cache_tensors] == [16 << 10, 18 << 10]
    assert [one.offset for one in after.kv_cache_tensors] == [0, 64 << 10]
    check_one_group(before, lambda one: one.layer_stride)


@pytest.mark.slow
@given(
    small=st.integers(1, 40).map(lambda n: n * 96),
    large=st.integers(41, 90).map(lambda n: n * 96),
    counts=st.tuples(st.integers(1, 5), st.integers(1, 5)),
)
def test_layers_of_different_sizes_are_packed_into_blocks(small, large, counts) -> None:
    sizes = (small, large)
    offset, tensors = 0, []
    for size, layers in zip(sizes, counts, strict=True):
        tensors.append(tensor(layers, size * NUM_BLOCKS, size, offset))
        offset += layers * size * NUM_BLOCKS
    before = config(*tensors)
    shape = cache_shape.shape_of(before)
    assert shape.form == "mixed"
    assert shape.buffers == 1
    after, _ = rewritten(before, shape)
    assert {one.block_stride for one in after.kv_cache_tensors} == {shape.block_bytes}
    assert all(one.offset % 64 == 0 for one in after.kv_cache_tensors)
    check_one_group(before, lambda one: one.layer_stride)


def test_pipeline_stages_share_one_layout() -> None:
    stages = [by_layers(4096, 8), by_layers(4096, 7), by_layers(4096, 8)]
    shape = cache_shape.shape_of(stages[0])
    for stage in stages[1:]:
        shape = shape.joined(cache_shape.shape_of(stage))
    assert shape == CacheShape("layers", 4096, 8)
    first, _ = rewritten(stages[0], shape)
    second, _ = rewritten(stages[1], shape)
    assert first.num_blocks == second.num_blocks, "an id means the same block in all of them"
    assert first.kv_cache_tensors[0].layer_stride == second.kv_cache_tensors[0].layer_stride


def test_packed_stages_take_the_larger_block() -> None:
    one = CacheShape("blocks", 100 << 10, 1)
    other = CacheShape("blocks", 120 << 10, 1)
    assert one.joined(other) == other.joined(one) == other


@pytest.mark.parametrize(
    "other", [CacheShape("layers", 8192, 8), CacheShape("blocks", 4096, 1)], ids=["size", "form"]
)
def test_ranks_that_cannot_share_ids_are_rejected(other: CacheShape) -> None:
    with pytest.raises(UnsupportedEngineError, match="cannot mean the same"):
        CacheShape("layers", 4096, 8).joined(other)


def test_unsupported_placement_is_rejected_with_the_remedy() -> None:
    heads_outside = tensor(2, 4 * 2048 * NUM_BLOCKS, 2048)
    with pytest.raises(UnsupportedEngineError, match=r"LHBNC.*VLLM_KV_CACHE_LAYOUT=LBHNC"):
        cache_shape.shape_of(config(heads_outside, layout="LHBNC"))


def test_overlaid_groups_of_different_sizes_are_rejected() -> None:
    region = 4096 * NUM_BLOCKS
    before = config(tensor(2, region, 4096), tensor(2, 2 * region, 8192), groups=2)
    with pytest.raises(UnsupportedEngineError, match="VLLM_KV_CACHE_LAYOUT=BLHNC"):
        cache_shape.shape_of(before)
