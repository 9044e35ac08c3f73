"""The operations of one transfer and their dependencies, as data.

    graph = Graph((Operation(Kind.GET, items=(0, 1), tier=1),
                   Operation(Kind.COPY_IN, items=(0, 1), after=(0,))))
    states = States(graph)
    for index in states.ready(): ...

A transfer moves *items*. Item i has the i-th key, the i-th block and the i-th record. An operation
does one thing to some items, after some earlier operations. `executor` runs graphs. This module
performs no operation, calls no tier and takes no lock. Tiers are identified by index, nearest
first::

    graph = load_graph(segments, batch=8, promote_to=0)
    graph = demote_graph(24, tiers=[0, 1], batch=8)
    graph = farther_graph(24, source=0, targets=[1], batch=8)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from kvelastic.errors import IntegrityError, InvalidArgumentError
from kvelastic.tiers.lookup import Segment
from kvelastic.tiers.policy import Copies

NO_TIER = -1
"""Tier of an operation that uses no store."""


class Kind(Enum):
    """The action of an operation. The pool does the two copies, a store does the others."""

    COPY_OUT = "copy_out"
    """Copy from the device to staging. Later operations skip blocks evicted during the copy."""
    PUT = "put"
    """Write from staging to a store."""
    GET = "get"
    """Read from a store to staging."""
    COPY_IN = "copy_in"
    """Copy from staging to the device."""
    DROP = "drop"
    """Erase those records from a store that a nearer store has by now."""


POOL_COPIES = (Kind.COPY_OUT, Kind.COPY_IN)
FILLS_STAGING = (Kind.COPY_OUT, Kind.GET)


class State(Enum):
    """The state of an operation. ENDED is final: it was done, failed or was cancelled."""

    PENDING = "pending"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True)
class Operation:
    """One step of a transfer, on some of its items."""

    kind: Kind
    items: tuple[int, ...]
    tier: int = NO_TIER
    """Index of the store's tier; `NO_TIER` for the pool's copies."""
    after: tuple[int, ...] = ()
    """Indices of earlier operations that must have ended before."""
    batch: int = 0
    """Operations of one batch share the staging slots of their items."""
    only_unstored: bool = False
    """For a PUT: skip items that an earlier PUT of the transfer has stored."""
    is_awaited: bool = True
    """Whether the transfer is complete only after this operation has ended."""


class Graph:
    """Operations and their order. Immutable and validated."""

    def __init__(self, operations: Iterable[Operation], items: int) -> None:
        """`items` is the number of items of the transfer.

        Raises `InvalidArgumentError` for a predecessor that is not an earlier operation, an item
        that does not exist, a duplicate item in one operation, a store's operation without a tier,
        and a copy of the pool with one. Linear in operations, predecessors and items.
        """
        self.operations = tuple(operations)
        self.items = items
        self.successors: list[list[int]] = [[] for _ in self.operations]
        for index, operation in enumerate(self.operations):
            self._check(index, operation)
            for before in operation.after:
                self.successors[before].append(index)

    def _check(self, index: int, operation: Operation) -> None:
        if not all(0 <= before < index for before in operation.after):
            raise InvalidArgumentError(
                f"operation {index} comes after {operation.after}; name earlier operations"
            )
        if not all(0 <= item < self.items for item in operation.items):
            raise InvalidArgumentError(
                f"operation {index} names an item beyond {self.items}; name those of the transfer"
            )
        if len(set(operation.items)) != len(operation.items):
            raise InvalidArgumentError(f"operation {index} names an item twice; name it once")
        if (operation.kind in POOL_COPIES) != (operation.tier == NO_TIER):
            raise InvalidArgumentError(
                f"operation {index}, {operation.kind.value}, has tier {operation.tier}; give"
                " stores' operations a tier, and the pool's copies none"
            )


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
            first = len(operations)
            steps = [(Kind.GET, segment.tier), (Kind.COPY_IN, NO_TIER)]
            if NO_TIER < promote_to < segment.tier:
                steps.append((Kind.PUT, promote_to))
                if copies is Copies.FIRST:
                    steps.append((Kind.DROP, segment.tier))
            for at, (kind, tier) in enumerate(steps):
                after = (first + at - 1,) if at else ()
                awaited = kind in (Kind.GET, Kind.COPY_IN)
                operations.append(Operation(kind, items, tier, after, batches, is_awaited=awaited))
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


class States:
    """The states of the operations of one graph. Not thread-safe: the owner holds a lock."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._states = [State.PENDING] * len(graph.operations)
        self._waits_for = [len(operation.after) for operation in graph.operations]
        self._open = len(graph.operations)
        self._awaited = sum(operation.is_awaited for operation in graph.operations)

    def of(self, index: int) -> State:
        """Return the state of one operation."""
        return self._states[index]

    def ready(self) -> list[int]:
        """Return the operations that may start now. Linear, so call it only at the beginning."""
        return [i for i in range(len(self._states)) if self.is_ready(i)]

    def is_ready(self, index: int) -> bool:
        """Return whether an operation is pending and all its predecessors have ended."""
        return self._states[index] is State.PENDING and self._waits_for[index] == 0

    def start(self, index: int) -> None:
        """Mark an operation as running. Raises `IntegrityError` unless it is ready."""
        if not self.is_ready(index):
            raise IntegrityError(
                f"operation {index} was started while {self._states[index].value}, with"
                f" {self._waits_for[index]} before it"
            )
        self._states[index] = State.RUNNING

    def end(self, index: int) -> list[int]:
        """End an operation. Returns the operations that became ready.

        Raises `IntegrityError` if the operation has already ended.
        """
        if self._states[index] is State.ENDED:
            raise IntegrityError(f"operation {index} ended twice")
        self._states[index] = State.ENDED
        self._open -= 1
        self._awaited -= self.graph.operations[index].is_awaited
        freed = []
        for after in self.graph.successors[index]:
            self._waits_for[after] -= 1
            if self.is_ready(after):
                freed.append(after)
        return freed

    @property
    def is_over(self) -> bool:
        """Whether every operation has ended."""
        return self._open == 0

    @property
    def is_complete(self) -> bool:
        """Whether every awaited operation has ended."""
        return self._awaited == 0

    def check_integrity(self) -> None:
        """Recount all counters. Raises `IntegrityError` that names a mismatch. Linear."""
        operations = self.graph.operations
        ended = [state is State.ENDED for state in self._states]
        if self._open != ended.count(False):
            raise IntegrityError(f"{self._open} operations are open, and {ended.count(False)} are")
        awaited = sum(o.is_awaited and not end for o, end in zip(operations, ended, strict=True))
        if self._awaited != awaited:
            raise IntegrityError(f"{self._awaited} operations are awaited, and {awaited} are")
        for index, operation in enumerate(operations):
            before = sum(not ended[other] for other in operation.after)
            if before != self._waits_for[index]:
                raise IntegrityError(
                    f"operation {index} waits for {self._waits_for[index]}, and {before} are open"
                )
            if before and self._states[index] is State.RUNNING:
                raise IntegrityError(f"operation {index} began before one that it comes after")
