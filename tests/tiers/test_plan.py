"""Plans of loads and demotions: pure functions, compared with what they have to be."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvelastic.errors import InvalidArgumentError
from kvelastic.tiers.graph import FILLS_STAGING, Kind, demote_graph, farther_graph, load_graph
from kvelastic.tiers.lookup import Segment, nearest
from kvelastic.tiers.policy import Copies

Y, N = True, False


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([], []),
        ([[], []], []),
        ([[N, Y]], []),
        ([[Y, Y]], [Segment(0, 0, 2)]),
        ([[Y, N, Y], [Y, Y, Y]], [Segment(0, 0, 1), Segment(1, 1, 1), Segment(0, 2, 1)]),
        ([[Y, N, N], [N, Y, N]], [Segment(0, 0, 1), Segment(1, 1, 1)]),
        ([[N, N, Y], [Y, N, Y]], [Segment(1, 0, 1)]),
    ],
)
def test_leading_keys_come_from_the_nearest_tier(found, expected) -> None:
    assert nearest(found) == expected


@pytest.mark.slow
@given(
    st.integers(0, 20).flatmap(
        lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=1, max_size=4)
    )
)
def test_segments_cover_exactly_the_leading_keys(found) -> None:
    segments = nearest(found)
    at = 0
    for segment in segments:
        assert segment.first == at
        assert segment.count > 0
        for key in range(at, at + segment.count):
            assert found[segment.tier][key]
            assert not any(found[tier][key] for tier in range(segment.tier))
        at += segment.count
    assert at == len(found[0]) or not any(row[at] for row in found)
    assert all(a.tier != b.tier for a, b in pairwise(segments))


def kinds(graph):
    return [(o.kind, o.tier, o.items, o.after, o.is_awaited) for o in graph.operations]


def test_load_reads_and_copies_in_batches() -> None:
    graph = load_graph([Segment(0, 0, 3), Segment(1, 3, 1)], batch=2)
    assert kinds(graph) == [
        (Kind.GET, 0, (0, 1), (), Y),
        (Kind.COPY_IN, -1, (0, 1), (0,), Y),
        (Kind.GET, 0, (2,), (), Y),
        (Kind.COPY_IN, -1, (2,), (2,), Y),
        (Kind.GET, 1, (3,), (), Y),
        (Kind.COPY_IN, -1, (3,), (4,), Y),
    ]


@pytest.mark.parametrize("copies", Copies)
def test_load_from_a_farther_tier_is_promoted_afterwards(copies) -> None:
    graph = load_graph([Segment(0, 0, 1), Segment(2, 1, 1)], batch=2, promote_to=0, copies=copies)
    expected = [
        (Kind.GET, 0, (0,), (), Y),
        (Kind.COPY_IN, -1, (0,), (0,), Y),
        (Kind.GET, 2, (1,), (), Y),
        (Kind.COPY_IN, -1, (1,), (2,), Y),
        (Kind.PUT, 0, (1,), (3,), N),
    ]
    if copies is Copies.FIRST:
        expected.append((Kind.DROP, 2, (1,), (4,), N))
    assert kinds(graph) == expected


def test_demotion_stores_in_each_tier_in_order() -> None:
    graph = demote_graph(1, tiers=[0, 2], batch=1)
    assert kinds(graph) == [
        (Kind.COPY_OUT, -1, (0,), (), Y),
        (Kind.PUT, 0, (0,), (0,), Y),
        (Kind.PUT, 2, (0,), (1,), Y),
    ]
    assert [o.only_unstored for o in graph.operations] == [N, Y, Y]


def test_farther_tiers_receive_copies_from_the_source() -> None:
    graph = farther_graph(3, source=0, targets=[1, 2], batch=2)
    assert kinds(graph) == [
        (Kind.GET, 0, (0, 1), (), Y),
        (Kind.PUT, 1, (0, 1), (0,), Y),
        (Kind.PUT, 2, (0, 1), (0,), Y),
        (Kind.GET, 0, (2,), (), Y),
        (Kind.PUT, 1, (2,), (3,), Y),
        (Kind.PUT, 2, (2,), (3,), Y),
    ]
    assert [o.batch for o in graph.operations] == [0, 0, 0, 1, 1, 1]


def test_without_tiers_nothing_is_read() -> None:
    assert demote_graph(5, tiers=[], batch=2).operations == ()


@pytest.mark.parametrize("batch", [0, -1])
def test_empty_batch_is_rejected(batch) -> None:
    with pytest.raises(InvalidArgumentError, match="batch"):
        load_graph([Segment(0, 0, 1)], batch=batch)
    with pytest.raises(InvalidArgumentError, match="batch"):
        demote_graph(1, tiers=[0], batch=batch)


@given(
    st.integers(0, 40),
    st.lists(st.integers(0, 5), max_size=3, unique=True),
    st.integers(1, 9),
)
def test_each_block_is_read_once_for_all_tiers(count, tiers, batch) -> None:
    graph = demote_graph(count, tiers=tiers, batch=batch)
    read = [item for o in graph.operations if o.kind in FILLS_STAGING for item in o.items]
    assert read == (list(range(count)) if tiers else [])
    for tier in tiers:
        offered = {item for o in graph.operations if o.tier == tier for item in o.items}
        assert offered == set(range(count))
    assert all(len(o.items) <= batch for o in graph.operations)
