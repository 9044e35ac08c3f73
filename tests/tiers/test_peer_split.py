"""Records of engines with different ranks, against a plain model of a divided block."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvelastic.errors import UnsupportedError
from kvelastic.tiers.stores.peer.split import Move, Split, moves, replica_moves


def fits(heads: int, ranks: int) -> bool:
    return not (heads % ranks and ranks % heads)


@st.composite
def two_splits(draw: st.DrawFn) -> tuple[Split, Split]:
    heads = draw(st.integers(1, 12))
    ranks = st.integers(1, 24).filter(lambda ranks: fits(heads, ranks))
    source = Split(draw(ranks), draw(st.integers(1, 5)), heads, draw(st.integers(1, 6)), "m")
    return source, source.over(draw(ranks))


def record_of(split: Split, whole: np.ndarray) -> np.ndarray:
    """Divide (rows, heads, bytes) as an engine does: each rank keeps its heads of every row."""
    parts = []
    for rank in range(split.ranks):
        first = rank * split.heads // split.ranks
        count = max(1, split.heads // split.ranks)
        parts.append(whole[:, first : first + count].ravel())
    return np.concatenate(parts)


def converted(source: Split, target: Split, record: np.ndarray) -> np.ndarray:
    found = np.full(target.record_bytes, -1)
    for move in moves(source, target):
        here = slice(move.target, move.target + move.size_bytes)
        assert (found[here] == -1).all(), "written twice"
        found[here] = record[move.source :][: move.size_bytes]
    for move in replica_moves(target):
        found[move.target :][: move.size_bytes] = found[move.source :][: move.size_bytes]
    return found


@given(two_splits())
def test_converted_record_is_the_other_engine_s(splits: tuple[Split, Split]) -> None:
    source, target = splits
    size = source.rows * source.heads * source.head_bytes
    whole = np.arange(size).reshape(source.rows, source.heads, source.head_bytes)
    record = record_of(source, whole)
    assert len(record) == source.record_bytes
    assert (converted(source, target, record) == record_of(target, whole)).all()


@given(two_splits())
def test_copies_are_as_few_as_possible(splits: tuple[Split, Split]) -> None:
    source, target = splits
    found = moves(source, target)
    size_bytes = source.rows * source.heads * source.head_bytes
    assert sum(move.size_bytes for move in found) == size_bytes
    for one, other in pairwise(found):
        assert (one.source + one.size_bytes, one.target + one.size_bytes) != other[:2]


@pytest.mark.parametrize(
    ("source", "target", "count"),
    [(1, 1, 1), (4, 4, 1), (1, 2, 64), (8, 2, 255), (16, 8, 8), (8, 16, 8)],
)
def test_number_of_copies_of_a_block(source: int, target: int, count: int) -> None:
    split = Split(source, 32, 8, 4096, "m")
    assert len(moves(split, split.over(target))) == count


def test_latent_is_read_once_for_all_ranks() -> None:
    latent = Split(4, 3, 1, 10, "m")
    assert moves(latent, latent.over(1)) == (Move(0, 0, 30),)
    assert moves(latent.over(1), latent) == (Move(0, 0, 30),)
    assert replica_moves(latent) == (Move(0, 30, 30), Move(0, 60, 30), Move(0, 90, 30))


@pytest.mark.parametrize(("heads", "ranks"), [(8, 3), (8, 12), (2, 3), (2, 0), (2, 2048)])
def test_heads_without_equal_parts_are_refused(heads: int, ranks: int) -> None:
    with pytest.raises(UnsupportedError, match=f"no equal parts for {ranks} ranks"):
        Split(1, 1, heads, 16, "m").over(ranks)
