"""One transfer on its way: its graph, what has become of each item, and who waits for it.

The executor owns runs and holds its lock wherever one is changed; others look at the properties,
`wait` and `cancel`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from kvelastic.errors import InvalidArgumentError
from kvelastic.tiers.base import KEY_BYTES
from kvelastic.tiers.graph import Graph, Kind, Operation, State, States

_log = logging.getLogger("kvelastic")


class RunOwner(Protocol):
    """Who carries a run out: the executor."""

    def look(self) -> None:
        """Give up what hangs."""

    def wait(self, run: Run, timeout_s: float | None, is_reached: Callable[[], bool]) -> bool:
        """Until `is_reached`, `timeout_s` at most; answers what it says."""

    def cancel(self, run: Run) -> None:
        """As `Run.cancel`."""


class Priority(IntEnum):
    """Who goes first where two want the same thread or the same slots."""

    RECLAIM = 0
    """Somebody waits for memory, for milliseconds."""
    LOAD = 1
    """A request waits."""
    BACKGROUND = 2
    """Nobody waits."""


@dataclass(frozen=True)
class Transfer:
    """What to move: item i is the i-th key, the i-th block."""

    graph: Graph
    keys: bytes
    ids: Sequence[int]
    """Of the blocks; what a graph does not copy may have none."""
    parents: Sequence[bytes] | None = None
    """The key that each one continues (NO_KEY: it begins a prompt); None where nobody knows."""
    confirm: Callable[[], Sequence[bool]] | None = None
    """Asked after each copy out: whether each block has stood still until now. What it denies is
    put nowhere, for its record may be torn. Must be short."""
    ended: Callable[[int, Run], None] | None = None
    """Told of each operation that has ended, by its index, with the executor's lock held: it must
    be short, must not raise, and calls nothing of the executor or its runs."""

    def key(self, item: int) -> bytes:
        """The key of one item."""
        return self.keys[item * KEY_BYTES : (item + 1) * KEY_BYTES]

    def keys_of(self, items: Sequence[int]) -> bytes:
        """The keys of some, side by side."""
        return b"".join(map(self.key, items))

    def check(self) -> None:
        """Raises `InvalidArgumentError` where keys, ids or parents are not one for each item."""
        items = self.graph.items
        if len(self.keys) != items * KEY_BYTES or len(self.ids) != items:
            raise InvalidArgumentError(
                f"a graph of {items} items has {len(self.keys)} bytes of keys and {len(self.ids)}"
                f" blocks; give {KEY_BYTES} bytes and one block for each"
            )
        if self.parents is not None and len(self.parents) != items:
            raise InvalidArgumentError(
                f"{len(self.parents)} parents were given for {items} items; give one for each"
            )


@dataclass
class Batch:
    """The staging slots of some items, while operations of the batch need them."""

    items: tuple[int, ...]
    open: int
    """Operations of it that have not ended."""
    calls: int = 0
    """Calls that use its slots now, also for operations that were given up."""
    slots: dict[int, int] = field(default_factory=dict)
    """By item; empty before the first operation and after the last."""


class Run:
    """A transfer that an executor carries out. Made by `Executor.submit`."""

    def __init__(
        self,
        executor: RunOwner,
        transfer: Transfer,
        priority: Priority,
        changed: threading.Condition,
    ) -> None:
        self.transfer = transfer
        self.priority = priority
        self.states = States(transfer.graph)
        items = transfer.graph.items
        self.staged = [False] * items
        """Whose record lies whole in its staging slot."""
        self.loaded = [False] * items
        """Whose block holds it."""
        self.stored: list[set[int]] = [set() for _ in range(items)]
        """Which tiers have taken it."""
        self.is_cancelled = False
        self.batches = batches_of(transfer.graph)
        self._executor = executor
        self._changed = changed
        self._callbacks: list[Callable[[Run], None]] | None = []
        """None: they were called."""

    @property
    def is_complete(self) -> bool:
        """Whether all that is awaited is over: results stand, and no block is touched any more."""
        self._executor.look()
        with self._changed:
            return self.states.is_complete

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is left, also behind it."""
        self._executor.look()
        with self._changed:
            return self.states.is_over

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until it is complete, or `timeout_s` has passed; answers whether it is. Blocks."""
        return self._executor.wait(self, timeout_s, lambda: self.states.is_complete)

    def cancel(self) -> None:
        """Begin nothing more of it, and give up what stores are doing for it.

        What was put stays: it is a true record of its key. A copy of the pool that runs is waited
        for by `wait`; until then blocks may still be written to. Never blocks. Repeatable.
        """
        self._executor.cancel(self)

    def on_complete(self, callback: Callable[[Run], None]) -> None:
        """Call `callback` once, when it is complete (now, if it is), from any thread.

        What it raises is logged.
        """
        with self._changed:
            if self._callbacks is not None:
                self._callbacks.append(callback)
                return
        self._call(callback)

    def take_callbacks(self) -> list[Callable[[Run], None]]:
        """For the executor, once it is complete. The lock is held."""
        callbacks, self._callbacks = self._callbacks or [], None
        return callbacks

    def call(self, callbacks: Sequence[Callable[[Run], None]]) -> None:
        """For the executor, without the lock."""
        for callback in callbacks:
            self._call(callback)

    def _call(self, callback: Callable[[Run], None]) -> None:
        try:
            callback(self)
        except Exception:
            _log.exception("a callback of a transfer between tiers failed; the transfer stands")

    def items_for(self, operation: Operation) -> list[int]:
        """What of its items is left to do. The lock is held."""
        items: list[int] = []
        for item in operation.items:
            stored = self.stored[item]
            if operation.kind is Kind.PUT:
                is_wanted = (
                    self.staged[item]
                    and operation.tier not in stored
                    and not (operation.only_unstored and stored)
                )
            elif operation.kind is Kind.COPY_IN:
                is_wanted = self.staged[item]
            elif operation.kind is Kind.DROP:
                is_wanted = any(tier < operation.tier for tier in stored)
            else:
                is_wanted = True
            if is_wanted:
                items.append(item)
        return items

    def chains(self, items: Sequence[int]) -> list[tuple[list[int], bytes | None]]:
        """Items in runs of which each continues the one before it, with what the first continues.

        One run, and None, where nobody knows the parents.
        """
        transfer = self.transfer
        if transfer.parents is None:
            return [(list(items), None)]
        chains: list[tuple[list[int], bytes | None]] = []
        end: bytes | None = None
        for item in items:
            parent = transfer.parents[item]
            if chains and parent == end:
                chains[-1][0].append(item)
            else:
                chains.append(([item], parent))
            end = transfer.key(item)
        return chains

    def open_operations(self) -> list[int]:
        """Those that have not ended. The lock is held. Linear."""
        states = self.states
        return [
            index
            for index in range(len(states.graph.operations))
            if states.of(index) in (State.PENDING, State.RUNNING)
        ]


def batches_of(graph: Graph) -> dict[int, Batch]:
    """The batches of a graph by number, with their items in order of appearance."""
    items: dict[int, dict[int, None]] = {}
    open_: dict[int, int] = {}
    for operation in graph.operations:
        items.setdefault(operation.batch, {}).update(dict.fromkeys(operation.items))
        open_[operation.batch] = open_.get(operation.batch, 0) + (operation.kind is not Kind.DROP)
    return {number: Batch(tuple(items[number]), open_[number]) for number in items}
