"""Builds transfer graphs. Pure functions, which neither query tiers nor move data.

    segments = nearest([[True, True, False], [True, True, True]])   # two of tier 0, one of tier 1
    graph = load_graph(segments, batch=8, promote_to=0)
    graph = demote_graph(24, tiers=[0, 1], batch=8)
    graph = farther_graph(24, source=0, targets=[1], batch=8)

Tiers are identified by index, nearest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvelastic.errors import InvalidArgumentError
from kvelastic.tiers.graph import NO_TIER, Graph, Kind, Operation
from kvelastic.tiers.policy import Copies


@dataclass(frozen=True)
class Segment:
    """Consecutive keys that one tier has."""

    tier: int
    first: int
    count: int


def nearest(found: Sequence[Sequence[bool]]) -> list[Segment]:
    """Return the leading keys that are in any tier, each in the nearest tier that has it.

    `found[tier][key]` is whether a tier has a key. All rows have the same length. Linear.
    """
    if not found:
        return []
    segments: list[Segment] = []
    count = len(found[0])
    # The next True in each row, from `at` on. `list.index` skips long runs without a step of
    # Python for each key.
    next_true = [_next(row, True, 0) for row in found]
    at = 0
    while at < count:
        tier = next((tier for tier, there in enumerate(next_true) if there == at), NO_TIER)
        if tier == NO_TIER:
            break
        end = min([_next(found[tier], False, at), *next_true[:tier]])
        segments.append(Segment(tier, at, end - at))
        at = end
        for other, row in enumerate(found):
            if next_true[other] < at:
                next_true[other] = _next(row, True, at)
    return segments


def _next(row: Sequence[bool], value: bool, at: int) -> int:
    """Return the first index from `at` on with `value`, or the length of the row."""
    try:
        return row.index(value, at)
    except ValueError:
        return len(row)


def load_graph(
    segments: Sequence[Segment],
    *,
    batch: int,
    promote_to: int = NO_TIER,
    copies: Copies = Copies.ALL,
) -> Graph:
    """Load the keys of `segments` into blocks, `batch` blocks at a time.

    After the load, records from tiers farther than `promote_to` are also put there, from staging.
    With `Copies.FIRST`, they are then erased from the tier that they came from. Raises
    `InvalidArgumentError` if `batch` is below 1.
    """
    operations: list[Operation] = []
    batches = 0
    for segment in segments:
        for items in _batches(segment.first, segment.count, batch):
            get = len(operations)
            operations.append(Operation(Kind.GET, items, segment.tier, batch=batches))
            operations.append(Operation(Kind.COPY_IN, items, after=(get,), batch=batches))
            if NO_TIER < promote_to < segment.tier:
                operations.append(
                    Operation(
                        Kind.PUT,
                        items,
                        promote_to,
                        after=(get + 1,),
                        batch=batches,
                        is_awaited=False,
                    )
                )
                if copies is Copies.FIRST:
                    operations.append(
                        Operation(
                            Kind.DROP,
                            items,
                            segment.tier,
                            after=(get + 2,),
                            batch=batches,
                            is_awaited=False,
                        )
                    )
            batches += 1
    return Graph(operations, sum(segment.count for segment in segments))


def demote_graph(count: int, *, tiers: Sequence[int], batch: int) -> Graph:
    """Copy each of `count` blocks into the first of `tiers` that accepts it, `batch` at a time.

    Without tiers, the graph is empty. Raises `InvalidArgumentError` if `batch` is below 1.
    """
    operations: list[Operation] = []
    if not tiers:
        return Graph((), count)
    for number, items in enumerate(_batches(0, count, batch)):
        last = len(operations)
        operations.append(Operation(Kind.COPY_OUT, items, batch=number))
        for tier in tiers:
            put = Operation(Kind.PUT, items, tier, after=(last,), batch=number, only_unstored=True)
            last = len(operations)
            operations.append(put)
    return Graph(operations, count)


def farther_graph(count: int, *, source: int, targets: Sequence[int], batch: int) -> Graph:
    """Copy `count` records from the tier `source` to each of `targets`, `batch` at a time.

    Accesses no block of the pool. Raises `InvalidArgumentError` if `batch` is below 1.
    """
    operations: list[Operation] = []
    for number, items in enumerate(_batches(0, count, batch)):
        get = len(operations)
        operations.append(Operation(Kind.GET, items, source, batch=number))
        operations.extend(
            Operation(Kind.PUT, items, tier, after=(get,), batch=number) for tier in targets
        )
    return Graph(operations, count)


def _batches(first: int, count: int, batch: int) -> list[tuple[int, ...]]:
    if batch < 1:
        raise InvalidArgumentError(f"a batch of {batch} moves nothing; give 1 or more")
    end = first + count
    return [tuple(range(at, min(at + batch, end))) for at in range(first, end, batch)]
