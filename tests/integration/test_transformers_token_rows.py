"""Rows of tokens: no two elements share an address, and none lies outside what the tokens need."""

from __future__ import annotations

from itertools import product

import pytest

from kvelastic.integration.transformers.token_rows import LARGE_ROW_BYTES, TokenRows

UNUSED_BYTES, LANE_STRIDE_BYTES = 32 << 10, 1 << 20


def rows_of(batch: int, key: tuple[int, int], itemsize: int, *, is_one_lane: bool) -> TokenRows:
    return TokenRows(
        layers=2,
        batch=batch,
        key=key,
        value=(3, 5),
        itemsize=itemsize,
        lane_stride_bytes=LANE_STRIDE_BYTES,
        unused_bytes=UNUSED_BYTES,
        is_one_lane=is_one_lane,
    )


@pytest.mark.parametrize("is_one_lane", [True, False])
@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("key", [(1, 1), (3, 5), (2, 64), (16, 64)])
def test_elements_have_distinct_addresses_within_the_needed_bytes(
    key: tuple[int, int], itemsize: int, is_one_lane: bool
) -> None:
    for batch, tokens in ((1, 1), (1, 7), (3, 4)):
        rows = rows_of(batch, key, itemsize, is_one_lane=is_one_lane)
        seen: set[int] = set()
        elements = 0
        for part in range(2 * rows.layers):
            view = rows.view(part, 0, tokens)
            start = rows.lane_of(part) * LANE_STRIDE_BYTES
            assert view.offset * itemsize % 64 == 0
            for place in product(*map(range, view.shape)):
                address = itemsize * (
                    view.offset
                    + sum(i * stride for i, stride in zip(place, view.strides, strict=True))
                )
                assert start + UNUSED_BYTES <= address
                assert address + itemsize <= start + rows.needed_bytes(tokens)
                seen.add(address)
                elements += 1
        assert len(seen) == elements


@pytest.mark.parametrize("is_one_lane", [True, False])
def test_view_from_a_later_token_continues_the_whole(is_one_lane: bool) -> None:
    rows = rows_of(2, (2, 64), 2, is_one_lane=is_one_lane)
    for part in range(4):
        whole, rest = rows.view(part, 0, 9), rows.view(part, 4, 9)
        assert rest.strides == whole.strides
        assert rest.shape[2] == 5
        assert rest.offset == whole.offset + 4 * whole.strides[2]


def test_large_row_stride_is_no_power_of_two() -> None:
    for heads in (8, 16, 17, 32):
        rows = rows_of(1, (heads, 128), 4, is_one_lane=True)
        assert rows.row_bytes(0) >= LARGE_ROW_BYTES
        assert rows.row_bytes(0) // 64 % 2 == 1
    assert rows_of(1, (1, 1), 4, is_one_lane=True).row_bytes(0) == 4 * 64


def test_zero_tokens_need_no_memory() -> None:
    assert rows_of(1, (1, 1), 4, is_one_lane=True).needed_bytes(0) == 0
