"""Graphs are sound or refused; states follow the order of the graph, whatever ends first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvelastic.errors import IntegrityError, InvalidArgumentError
from kvelastic.tiers.graph import Graph, Kind, Operation, States


def get(*after: int, items: tuple[int, ...] = (0,)) -> Operation:
    return Operation(Kind.GET, items, tier=0, after=after)


@pytest.mark.parametrize(
    ("operations", "words"),
    [
        ([get(0)], "earlier"),
        ([get(1), get(0)], "earlier"),
        ([get(7)], "earlier"),
        ([get(-1)], "earlier"),
        ([get(items=(0, 0))], "twice"),
        ([get(items=(-1,))], "beyond"),
        ([Operation(Kind.COPY_IN, (0,), tier=0)], "tier"),
        ([Operation(Kind.PUT, (0,))], "tier"),
    ],
)
def test_invalid_graph_is_rejected(operations, words) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        Graph(operations, items=1)


def test_item_outside_the_transfer_is_rejected() -> None:
    with pytest.raises(InvalidArgumentError, match="beyond 1"):
        Graph([get(items=(1,))], items=1)


@pytest.mark.slow
def test_validation_takes_linear_time() -> None:
    # A chain and a fan: quadratic work would take half an hour.
    count = 100_000
    chain = [get(), *map(get, range(count - 1))]
    assert Graph(chain, items=1).successors[count - 2] == [count - 1]
    fan = [get()] + [get(0) for _ in range(count)]
    assert len(Graph(fan, items=1).successors[0]) == count


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    count = draw(st.integers(0, 12))
    operations = []
    for at in range(count):
        after = draw(st.sets(st.integers(0, at - 1), max_size=3)) if at else set()
        operations.append(
            Operation(
                Kind.GET,
                (draw(st.integers(0, 5)),),
                tier=0,
                after=tuple(sorted(after)),
                is_awaited=draw(st.booleans()),
            )
        )
    return Graph(operations, items=6)


@pytest.mark.slow
@given(graphs(), st.randoms(use_true_random=False))
def test_random_completion_order_respects_dependencies(graph, dice) -> None:
    states = States(graph)
    ready = set(states.ready())
    running: set[int] = set()
    ended: set[int] = set()
    while ready or running:
        states.check_integrity()
        if ready and (not running or dice.random() < 0.5):
            index = dice.choice(sorted(ready))
            ready.remove(index)
            assert set(graph.operations[index].after) <= ended
            if dice.random() < 0.2:
                ready |= set(states.end(index))
                ended.add(index)
            else:
                states.start(index)
                running.add(index)
        else:
            index = dice.choice(sorted(running))
            running.remove(index)
            ended.add(index)
            ready |= set(states.end(index))
        awaited = {at for at, o in enumerate(graph.operations) if o.is_awaited}
        assert states.is_complete == (awaited <= ended)
        assert states.is_over == (len(ended) == len(graph.operations))
    assert len(ended) == len(graph.operations)
    states.check_integrity()


def test_ended_operation_cannot_change() -> None:
    states = States(Graph([get(), get(0)], items=1))
    with pytest.raises(IntegrityError):
        states.start(1)
    states.start(0)
    assert states.end(0) == [1]
    with pytest.raises(IntegrityError):
        states.end(0)
    with pytest.raises(IntegrityError):
        states.start(0)
