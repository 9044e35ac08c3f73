"""Copies blocks from the nearest tier that has them to the farther ones, in the background.

    behind = WriteBehind(executor, tiers=lambda: [0, 1], capacity=lambda: 5000)
    behind.add(keys, parents, stored, (0, 1))   # returns at once
    behind.wait_for_room(timeout_s)
    behind.close()

A block may leave the device as soon as one tier has it, so no shrinking pool waits for a disk. The
farther tiers read it from that tier: store -> staging -> stores, one transfer at a time, with a
quarter of the staging slots at most. This goes on while the pool sleeps. A block that its tier
displaces before its turn is not copied. If all tiers that a block waits for are stalled, it waits.

One lock, taken before the executor's. Any thread may call anything.
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
from kvelastic.tiers.plan import farther_graph
from kvelastic.tiers.run import Priority, Run, Transfer

_log = logging.getLogger("kvelastic")

_BATCHES = 4
"""Of a transfer: while one is put the next is read."""
_MOST_BATCH = 32
_STALLED_LOOK_S = 0.25
"""How often it looks whether a stalled tier has returned."""
_PROBATION = 5
"""A fifth of the nearest tier is there for new records: with more, policy displaces the first."""


class _Copy(NamedTuple):
    """What is to be done for one key."""

    parent: bytes
    source: int
    targets: tuple[int, ...]


class WriteBehind:
    """See the module. Starts its thread with the first block."""

    def __init__(
        self,
        executor: Executor,
        *,
        tiers: Callable[[], Sequence[int]],
        capacity: Callable[[], int | None],
    ) -> None:
        """`tiers` returns the tiers that take blocks now, and must not block. `capacity` returns
        how many blocks the nearest tier can hold (None: no bound); it is called here and in the
        thread of this object.
        """
        self._executor = executor
        self._tiers = tiers
        self._capacity = capacity
        self._held = capacity()
        """What `capacity` said last."""
        slots = executor.slots.count
        self._batch = max(1, min(_MOST_BATCH, slots // (4 * _BATCHES)))
        self._batches = max(1, min(_BATCHES, slots // 4 // self._batch))
        self._changed = threading.Condition()
        self._waiting: dict[bytes, _Copy] = {}
        """By key, the oldest first; what the open transfer copies is not in it."""
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
        """Have those of `keys` that some of `tiers` have taken copied to the farther ones of these.

        `stored` says for each key which tiers have it. Never blocks for a medium.
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
                del self._waiting[next(iter(self._waiting))]  # displaced for those behind it
            if self._waiting and self._thread is None and not self._is_closing:
                self._thread = threading.Thread(
                    target=self._work, name="kvelastic-behind", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def waiting(self, tier: int) -> int:
        """How many blocks this tier has still to be given."""
        with self._changed:
            copies = (*self._waiting.values(), *self._open.values())
            return sum(tier in copy.targets for copy in copies)

    @property
    def is_full(self) -> bool:
        """Whether with more blocks the nearest tier would displace some that still wait."""
        with self._changed:
            return self._is_over_bound()

    def wait_for_room(self, timeout_s: float) -> None:
        """Block while it is full and blocks are being copied, `timeout_s` at most."""
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
        """Wait until no block waits, `timeout_s` at most; return whether none does. Blocks."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._open, timeout_s)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is copied inside. A transfer on its way is cancelled first, and done later."""
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
        """End the thread, and give up what waits. Return whether it ended. Idempotent."""
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
            # Without this thread a sleep would wait for room in vain, each time.
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
        """Begin with the oldest; None: the tiers that it waits for are stalled."""
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
        # No operation copies a block of the pool, so the ids are not looked at.
        transfer = Transfer(graph, b"".join(keys), [-1] * len(keys), parents)
        self._run = self._executor.submit(transfer, Priority.BACKGROUND)
        return self._run

    def _settle(self, run: Run, taking: Set[int]) -> None:
        """The transfer is over. What was interrupted waits again, in front."""
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
