"""A transfer in progress: its graph, the state of each item, and its completion callbacks.

The executor owns runs and changes them only with its lock held. All other code uses the public
properties, `wait`, `cancel` and `on_complete`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from kvelastic.errors import InvalidArgumentError
from kvelastic.tiers.base import KEY_BYTES, keys_at
from kvelastic.tiers.graph import Graph, Kind, Operation, State, States

if TYPE_CHECKING:
    from kvelastic.tiers.executor import Executor

_log = logging.getLogger("kvelastic")


class Priority(IntEnum):
    """Order in which operations get a thread or staging slots. The lowest value goes first."""

    RECLAIM = 0
    """An allocation waits for memory, for milliseconds."""
    LOAD = 1
    """A request waits."""
    BACKGROUND = 2
    """No caller waits."""


@dataclass(frozen=True)
class Transfer:
    """The data to move. Item i has the i-th key and the i-th block."""

    graph: Graph
    keys: bytes
    ids: Sequence[int]
    """One block per item. Ignored for items that the graph does not copy."""
    parents: Sequence[bytes] | None = None
    """The key that each key continues (NO_KEY: it begins a prompt). None: unknown."""
    confirm: Callable[[], Sequence[bool]] | None = None
    """Called after each copy out. Returns for each block whether it is unchanged since the transfer
    began. Other records may be torn and are not stored. Must be short."""
    ended: Callable[[int, Run], None] | None = None
    """Called with the index of each operation that ends, with the executor's lock held. It must be
    short, must not raise and must not call the executor or its runs."""

    def key(self, item: int) -> bytes:
        """Return the key of one item."""
        return keys_at(self.keys, item)

    def keys_of(self, items: Sequence[int]) -> bytes:
        """Return the keys of some items, concatenated."""
        return b"".join(map(self.key, items))

    def check(self) -> None:
        """Raises `InvalidArgumentError` unless there is one key, id and parent per item."""
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
    """Items whose staging slots are taken and released together."""

    items: tuple[int, ...]
    open: int
    """Number of operations in the batch that use slots and have not ended."""
    calls: int = 0
    """Number of calls that use the slots now, including calls that timed out."""
    slots: dict[int, int] = field(default_factory=dict)
    """Staging slot of each item. Empty before the first operation and after the last."""


class Run:
    """A transfer that an executor runs. Made by `Executor.submit`."""

    def __init__(
        self,
        executor: Executor,
        transfer: Transfer,
        priority: Priority,
        changed: threading.Condition,
    ) -> None:
        self.transfer = transfer
        self.priority = priority
        self.states = States(transfer.graph)
        items = transfer.graph.items
        self.staged = [False] * items
        """For each item, whether its record is complete in its staging slot."""
        self.loaded = [False] * items
        """For each item, whether its record was copied into its block."""
        self.stored: list[set[int]] = [set() for _ in range(items)]
        """For each item, the tiers that have stored its record."""
        self.given_up: set[int] = set()
        """Tiers of which operations were given up, because their store hung."""
        self.is_cancelled = False
        self.batches = batches_of(transfer.graph)
        self._executor = executor
        self._changed = changed
        self._callbacks: list[Callable[[Run], None]] | None = []
        """None once the callbacks were called."""

    @property
    def is_complete(self) -> bool:
        """Whether all awaited operations have ended.

        Then the results are final and the run no longer accesses blocks.
        """
        self._executor.look()
        with self._changed:
            return self.states.is_complete

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the run is complete, for at most `timeout_s`. Returns whether it is."""
        return self._executor.wait(timeout_s, lambda: self.states.is_complete)

    def cancel(self) -> None:
        """Cancel pending operations and abandon running calls to stores. Never blocks. Idempotent.

        Stored records stay, since they are valid for their keys. A running copy of the pool
        continues, and may write to blocks until `wait` returns true.
        """
        self._executor.cancel(self)

    def on_complete(self, callback: Callable[[Run], None]) -> None:
        """Call `callback` once when the run is complete, or immediately if it is already.

        It may be called from any thread. Exceptions that it raises are logged.
        """
        with self._changed:
            if self._callbacks is not None:
                self._callbacks.append(callback)
                return
        self.call(callback)

    def take_callbacks(self) -> list[Callable[[Run], None]]:
        """Remove and return the callbacks of a complete run. Executor only, with its lock held."""
        callbacks, self._callbacks = self._callbacks or [], None
        return callbacks

    def call(self, callback: Callable[[Run], None]) -> None:
        """Call a callback. Executor only, without its lock."""
        try:
            callback(self)
        except Exception:
            _log.exception("a callback of a transfer between tiers failed; the transfer stands")

    def items_for(self, operation: Operation) -> list[int]:
        """Return the items that the operation still has to process. The lock must be held."""
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
        """Split items into chains in which each key continues the previous one.

        Returns each chain with the key that its first item continues. If the parents are unknown,
        returns all items as one chain, with None.
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
        """Return the indices of operations that have not ended. The lock must be held.

        Linear in the number of operations.
        """
        states = self.states
        return [
            index
            for index in range(len(states.graph.operations))
            if states.of(index) is not State.ENDED
        ]


def batches_of(graph: Graph) -> dict[int, Batch]:
    """Return the batches of a graph by number, with their items in order of appearance."""
    items: dict[int, dict[int, None]] = {}
    open_: dict[int, int] = {}
    for operation in graph.operations:
        items.setdefault(operation.batch, {}).update(dict.fromkeys(operation.items))
        open_[operation.batch] = open_.get(operation.batch, 0) + (operation.kind is not Kind.DROP)
    return {number: Batch(tuple(items[number]), open_[number]) for number in items}
