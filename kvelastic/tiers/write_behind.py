"""Copies blocks from the nearest tier that has them to the farther ones, in the background.

    behind = WriteBehind(executor, tiers=lambda: [0, 1], capacity=lambda: 5000)
    behind.add(keys, parents, stored, (0, 1))   # returns at once
    behind.wait_for_room(timeout_s)
    behind.close()

The pool can evict a block as soon as one tier has it, so a shrinking pool does not wait for a disk.
The farther tiers get the block from that tier: store -> staging -> stores. There is one transfer at
a time, which uses at most a quarter of the staging slots. Copying continues while the pool sleeps.
If the source tier evicts a block before its turn, the block is not copied. If all tiers that a
block must be copied to are stalled, the block waits.

There is one lock, which is taken before the executor's. All methods are thread-safe.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from itertools import islice
from typing import NamedTuple

from kvelastic.tiers.base import NO_KEY
from kvelastic.tiers.executor import Executor
from kvelastic.tiers.graph import farther_graph
from kvelastic.tiers.transfer_run import Priority, Run, Transfer

_log = logging.getLogger("kvelastic")

_BATCHES = 4
"""Batches of one transfer, so that reads overlap writes."""
_MOST_BATCH = 32
_STALLED_LOOK_S = 0.25
"""Interval at which the thread checks whether a stalled tier works again."""
_PROBATION = 5
"""The eviction policy keeps a fifth of the nearest tier for new records. If more blocks wait, it
evicts the oldest of them."""


class _Copy(NamedTuple):
    """The pending copies of one key."""

    parent: bytes
    source: int
    targets: tuple[int, ...]


class WriteBehind:
    """The copies to farther tiers. Thread-safe. Starts its thread with the first block."""

    def __init__(
        self,
        executor: Executor,
        *,
        tiers: Callable[[], Sequence[int]],
        capacity: Callable[[], int | None],
    ) -> None:
        """`tiers` returns the tiers that accept blocks now, and must not block.

        `capacity` returns how many blocks the nearest tier can hold (None: no limit). It is called
        here and in the thread of this object.
        """
        self._executor = executor
        self._tiers = tiers
        self._capacity = capacity
        self._held = capacity()
        """Last result of `capacity`."""
        slots = executor.slots.count
        self._batch = max(1, min(_MOST_BATCH, slots // (4 * _BATCHES)))
        self._batches = max(1, min(_BATCHES, slots // 4 // self._batch))
        self._changed = threading.Condition()
        self._waiting: dict[bytes, _Copy] = {}
        """Pending copies by key, oldest first, without those of the running transfer."""
        self._open: dict[bytes, _Copy] = {}
        self._run: Run | None = None
        self._is_stalled = False
        self._pauses = 0
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def add(
        self,
        keys: Sequence[bytes],
        parents: Sequence[bytes] | None,
        stored: Sequence[Set[int]],
        tiers: Sequence[int],
    ) -> None:
        """Queue the keys that a tier has stored for copying to the farther ones of `tiers`.

        `stored` holds for each key the tiers that have it. `parents` are the keys that they
        continue. Never waits for a medium.
        """
        with self._changed:
            for at, (key, there) in enumerate(zip(keys, stored, strict=True)):
                if not there:
                    continue
                source = min(there)
                targets = tuple(tier for tier in tiers if tier > source and tier not in there)
                if targets and key not in self._open:
                    parent = NO_KEY if parents is None else parents[at]
                    self._waiting[key] = _Copy(parent, source, targets)
            while self._held is not None and len(self._waiting) > self._held:
                del self._waiting[next(iter(self._waiting))]  # the nearest tier has evicted it
            if self._waiting and self._thread is None and not self._is_closing:
                self._thread = threading.Thread(
                    target=self._work, name="kvelastic-behind", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def waiting(self, tier: int) -> int:
        """Return how many blocks are still to be copied to this tier."""
        with self._changed:
            copies = (*self._waiting.values(), *self._open.values())
            return sum(tier in copy.targets for copy in copies)

    @property
    def is_full(self) -> bool:
        """Whether, with more blocks, the nearest tier would evict some before they are copied."""
        with self._changed:
            return self._is_over_bound()

    def wait_for_room(self, timeout_s: float) -> None:
        """Block while `is_full` is true and copies make progress, for at most `timeout_s`."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    not self._is_over_bound()
                    or self._is_stalled
                    or self._pauses > 0
                    or self._is_closing
                ),
                timeout_s,
            )

    def drain(self, timeout_s: float) -> bool:
        """Block until all copies are done, for at most `timeout_s`. Returns whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._open, timeout_s)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context in which nothing is copied.

        On entry it cancels the running transfer, which is retried later. Blocks until the transfer
        has ended.
        """
        with self._changed:
            self._pauses += 1
            run = self._run
            self._changed.notify_all()
        try:
            if run is not None:
                run.cancel()
            with self._changed:
                self._changed.wait_for(lambda: self._run is None)
            yield
        finally:
            with self._changed:
                self._pauses -= 1
                self._changed.notify_all()

    def close(self, timeout_s: float = 5.0) -> bool:
        """Discard pending copies and stop the thread. Idempotent.

        Waits at most `timeout_s`. Returns whether the thread has ended.
        """
        with self._changed:
            self._is_closing = True
            run, thread = self._run, self._thread
            self._changed.notify_all()
        if run is not None:
            run.cancel()
        if thread is None:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def _is_over_bound(self) -> bool:
        waiting = len(self._waiting) + len(self._open)
        return self._held is not None and waiting * _PROBATION > self._held

    # --- the thread ----------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._is_closing:
            self._try_turn()

    def _try_turn(self) -> None:
        try:
            self._turn()
        except Exception:
            # Keep the thread alive: without it, each sleep would wait for room in vain.
            _log.exception("copies to farther tiers failed; those that wait are tried again")
            with self._changed:
                self._open, self._run = {}, None
                self._changed.wait(_STALLED_LOOK_S)

    def _turn(self) -> None:
        held = self._capacity()
        with self._changed:
            self._held = held
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._is_closing or (bool(self._waiting) and not self._pauses)
            )
            if self._is_closing:
                return
            run = self._begin()
            if run is None:
                self._changed.wait(_STALLED_LOOK_S)
                return
        run.wait()
        taking = set(self._tiers())
        with self._changed:
            self._settle(run, taking)

    def _begin(self) -> Run | None:
        """Start copying the oldest blocks. None if all tiers that the first one needs are stalled.

        The lock must be held.
        """
        taking = set(self._tiers())
        first = next(iter(self._waiting.values()))
        targets = [tier for tier in first.targets if tier in taking]
        self._is_stalled = not targets
        self._changed.notify_all()
        if not targets:
            return None
        keys = []
        for key, copy in islice(self._waiting.items(), self._batch * self._batches):
            if copy[1:] != first[1:]:
                break
            keys.append(key)
        self._open = {key: self._waiting.pop(key) for key in keys}
        graph = farther_graph(len(keys), source=first.source, targets=targets, batch=self._batch)
        parents = [copy.parent for copy in self._open.values()]
        # No operation copies a block of the pool, so the ids are not used.
        transfer = Transfer(graph, b"".join(keys), [-1] * len(keys), parents)
        self._run = self._executor.submit(transfer, Priority.BACKGROUND)
        return self._run

    def _settle(self, run: Run, taking: Set[int]) -> None:
        """Process the ended transfer. Requeue interrupted copies at the front."""
        again = {}
        for (key, copy), stored in zip(self._open.items(), run.stored, strict=True):
            left = tuple(
                tier
                for tier in copy.targets
                if tier not in stored and (run.is_cancelled or tier not in taking)
            )
            if left:
                again[key] = copy._replace(targets=left)
        if again:
            self._waiting = again | self._waiting
        self._open = {}
        self._run = None
        self._changed.notify_all()
