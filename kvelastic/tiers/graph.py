"""What has to be done for one transfer, as data: operations, and which must be over before which.

    graph = Graph((Operation(Kind.GET, items=(0, 1), tier=1),
                   Operation(Kind.COPY_IN, items=(0, 1), after=(0,))))
    states = States(graph)
    for index in states.ready(): ...

A transfer moves *items*: item i is the i-th key of it, the i-th block and the i-th record. An
operation does one thing to some of them. `plan` makes graphs, `executor` runs them; nothing here
does anything, knows a tier or takes a lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from kvelastic.errors import IntegrityError, InvalidArgumentError

NO_TIER = -1


class Kind(Enum):
    """What an operation does. The two copies are the pool's, the others are a store's."""

    COPY_OUT = "copy_out"
    """Device to staging. What was evicted while it was read is left out from here on."""
    PUT = "put"
    """Staging to a store."""
    GET = "get"
    """A store to staging."""
    COPY_IN = "copy_in"
    """Staging to device."""
    DROP = "drop"
    """Forget records in a store: those that lie in a nearer one by now."""


POOL_COPIES = (Kind.COPY_OUT, Kind.COPY_IN)
FILLS_STAGING = (Kind.COPY_OUT, Kind.GET)


class State(Enum):
    """Where an operation is. The last three are ends: nothing follows them."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDS = frozenset((State.DONE, State.FAILED, State.CANCELLED))


@dataclass(frozen=True)
class Operation:
    """One step of a transfer, on some of its items."""

    kind: Kind
    items: tuple[int, ...]
    tier: int = NO_TIER
    """Which store, by its place among the tiers; `NO_TIER` for the pool's copies."""
    after: tuple[int, ...] = ()
    """Indices of the operations that must be over, however they ended."""
    batch: int = 0
    """Operations of one batch share the staging slots of their items."""
    only_unstored: bool = False
    """Of a PUT: leave out what an earlier PUT of the transfer has stored."""
    is_awaited: bool = True
    """Whether the transfer is complete only after it. What is not may go on behind it."""


class Graph:
    """Operations and their order. Immutable; whoever has one may rely on it being sound."""

    def __init__(self, operations: Iterable[Operation], items: int | None = None) -> None:
        """Takes the operations of `items` items (by default as many as they name).

        Raises `InvalidArgumentError` for a cycle, for a predecessor or an item that is not there,
        for an item twice in one operation, and for a store's operation without a store.
        Linear in operations, predecessors and items.
        """
        self.operations = tuple(operations)
        named = max((max(o.items, default=-1) for o in self.operations), default=-1) + 1
        self.items = named if items is None else items
        self.successors: tuple[tuple[int, ...], ...] = self._successors()
        self._check_operations()
        self.order: tuple[int, ...] = self._order()
        """One order in which every operation comes after its predecessors."""

    def _successors(self) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in self.operations]
        for index, operation in enumerate(self.operations):
            for before in operation.after:
                if not 0 <= before < len(self.operations):
                    raise InvalidArgumentError(
                        f"operation {index} comes after {before}, which is not there; name one of"
                        f" {len(self.operations)}"
                    )
                found[before].append(index)
        return tuple(tuple(indices) for indices in found)

    def _check_operations(self) -> None:
        for index, operation in enumerate(self.operations):
            if not all(0 <= item < self.items for item in operation.items):
                raise InvalidArgumentError(
                    f"operation {index} names an item beyond {self.items}; name those of the"
                    " transfer"
                )
            if len(set(operation.items)) != len(operation.items):
                raise InvalidArgumentError(f"operation {index} names an item twice; name it once")
            if (operation.kind in POOL_COPIES) != (operation.tier == NO_TIER):
                raise InvalidArgumentError(
                    f"operation {index}, {operation.kind.value}, has tier {operation.tier}; give"
                    " stores' operations a tier, and the pool's copies none"
                )

    def _order(self) -> tuple[int, ...]:
        waits_for = [len(operation.after) for operation in self.operations]
        free = deque(index for index, count in enumerate(waits_for) if count == 0)
        order = []
        while free:
            index = free.popleft()
            order.append(index)
            for after in self.successors[index]:
                waits_for[after] -= 1
                if waits_for[after] == 0:
                    free.append(after)
        if len(order) != len(self.operations):
            stuck = [index for index, count in enumerate(waits_for) if count > 0]
            raise InvalidArgumentError(
                f"operations {stuck[:8]} wait for one another; a graph has no cycle"
            )
        return tuple(order)


class States:
    """How far the operations of one graph are. Not thread-safe: its owner holds a lock."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._states = [State.PENDING] * len(graph.operations)
        self._waits_for = [len(operation.after) for operation in graph.operations]
        self._open = len(graph.operations)
        self._awaited = sum(operation.is_awaited for operation in graph.operations)

    def of(self, index: int) -> State:
        """The state of one operation."""
        return self._states[index]

    def ready(self) -> list[int]:
        """What may start now: pending, with every predecessor over. Linear; for the beginning."""
        return [i for i in range(len(self._states)) if self.is_ready(i)]

    def is_ready(self, index: int) -> bool:
        """Whether this one may start now."""
        return self._states[index] is State.PENDING and self._waits_for[index] == 0

    def start(self, index: int) -> None:
        """It runs from now on. Raises `IntegrityError` unless it is ready."""
        if not self.is_ready(index):
            raise IntegrityError(
                f"operation {index} was started while {self._states[index].value}, with"
                f" {self._waits_for[index]} before it"
            )
        self._states[index] = State.RUNNING

    def end(self, index: int, state: State) -> list[int]:
        """It is over; answers those that may start by this. Ends are final: repeating is an error.

        A pending one may only be cancelled. Raises `IntegrityError` for anything else.
        """
        before = self._states[index]
        is_legal = before is State.RUNNING or (before is State.PENDING and state is State.CANCELLED)
        if state not in ENDS or not is_legal:
            raise IntegrityError(f"operation {index} went from {before.value} to {state.value}")
        self._states[index] = state
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
        """Count again; raises `IntegrityError` naming what disagrees. Linear."""
        operations = self.graph.operations
        ended = [state in ENDS for state in self._states]
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
            if before and self._states[index] not in (State.PENDING, State.CANCELLED):
                raise IntegrityError(f"operation {index} began before one that it comes after")
