"""Copies blocks from the nearest tier that has them to the farther ones, in the background.

    behind = WriteBehind(executor, tiers=lambda: [0, 1], capacity=lambda: 5000)
    behind.add(keys, parents, stored, (0, 1))   # returns at once
    behind.wait_for_room(timeout_s)
    behind.close()

The pool can evict a block as soon as one tier has it, so a shrinking pool does not wait for a disk.
The farther tiers get the block from that tier: store -> staging -> stores. There is one transfer at
a time, which uses at most a quarter of the staging slots. Copying continues while the pool sleeps.
If the source tier evicts a block before its turn, the block is not copied. If all tiers that a
block must be copied to are stalled, the block waits, and later blocks for other tiers go ahead.

There is one lock, which is taken before the executor's. All methods are thread-safe.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from itertools import islice
from typing import NamedTuple

from kvelastic.logs import log_once
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

    source: int
    targets: tuple[int, ...]
    number: int
    """Position of the key in the order of `add`."""
    parent: bytes


_Queue = dict[bytes, _Copy]
"""Pending copies by key, with the same source and targets, oldest first."""


def _oldest(queues: Iterable[_Queue]) -> _Queue:
    """Return the queue with the oldest copy. Some queue must have one."""
    return min(filter(None, queues), key=lambda queue: next(iter(queue.values())).number)


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

        `capacity` returns how many blocks the nearest tier can hold (None: no limit). It must not
        wait for a medium, and is called without the lock.
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
        self._waiting: dict[tuple[int, tuple[int, ...]], _Queue] = {}
        """Pending copies by source and targets, without those of the running transfer."""
        self._numbers = itertools.count()
        self._open: _Queue = {}
        self._run: Run | None = None
        self._taking: Set[int] = frozenset()
        """Last result of `tiers`, or of an `add`."""
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
            self._taking = frozenset(tiers)
            for at, (key, there) in enumerate(zip(keys, stored, strict=True)):
                if not there:
                    continue
                source = min(there)
                targets = tuple(tier for tier in tiers if tier > source and tier not in there)
                if targets and key not in self._open:
                    parent = NO_KEY if parents is None else parents[at]
                    for queue in self._waiting.values():
                        queue.pop(key, None)
                    self._enqueue(key, _Copy(source, targets, next(self._numbers), parent))
            while self._held is not None and self._count() > self._held:
                oldest = _oldest(self._waiting.values())
                del oldest[next(iter(oldest))]  # the nearest tier has evicted it
            if self._count() and self._thread is None and not self._is_closing:
                self._start_thread()
            self._changed.notify_all()

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._work, name="kvelastic-behind", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            log_once(
                logging.WARNING,
                "no thread could be started for copies to farther tiers, so only the nearest tier"
                " gets blocks; raise the limit on threads of this user or container",
            )
        else:
            self._thread = thread

    def waiting(self, tier: int) -> int:
        """Return how many blocks are still to be copied to this tier."""
        with self._changed:
            waiting = sum(
                len(queue) for (_, targets), queue in self._waiting.items() if tier in targets
            )
            return waiting + sum(tier in copy.targets for copy in self._open.values())

    @property
    def is_full(self) -> bool:
        """Whether, with more blocks, the nearest tier would evict some before they are copied.

        Blocks that wait for stalled tiers do not count.
        """
        self._ask_capacity()
        with self._changed:
            return self._is_over_bound()

    def wait_for_room(self, timeout_s: float) -> None:
        """Block while `is_full` is true and copies make progress, for at most `timeout_s`."""
        self._ask_capacity()  # the thread may not have asked since the limit changed
        with self._changed:
            self._changed.wait_for(
                lambda: not self._is_over_bound() or self._pauses > 0 or self._is_closing,
                timeout_s,
            )

    def drain(self, timeout_s: float) -> bool:
        """Block until all copies are done, for at most `timeout_s`. Returns whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._count() and not self._open, timeout_s)

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

    def _ask_capacity(self) -> None:
        held = self._capacity()
        with self._changed:
            self._held = held
            self._changed.notify_all()

    def _is_over_bound(self) -> bool:
        if self._held is None or self._thread is None:
            return False
        waiting = sum(map(len, self._ready())) + len(self._open)
        return waiting * _PROBATION > self._held

    def _count(self) -> int:
        return sum(map(len, self._waiting.values()))

    def _ready(self) -> list[_Queue]:
        """Return the queues that are not empty and have a target that accepts blocks."""
        return [
            queue
            for (_, targets), queue in self._waiting.items()
            if queue and not self._taking.isdisjoint(targets)
        ]

    def _enqueue(self, key: bytes, copy: _Copy) -> None:
        self._waiting.setdefault(copy[:2], {})[key] = copy

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
        self._ask_capacity()
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closing or (self._count() > 0 and not self._pauses)
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
        """Start copying the oldest blocks that can be copied. None if there are none.

        The lock must be held.
        """
        self._taking = frozenset(self._tiers())
        self._changed.notify_all()
        ready = self._ready()
        if not ready:
            return None
        queue = _oldest(ready)
        keys = list(islice(queue, self._batch * self._batches))
        self._open = {key: queue.pop(key) for key in keys}
        first = self._open[keys[0]]
        targets = [tier for tier in first.targets if tier in self._taking]
        graph = farther_graph(len(keys), source=first.source, targets=targets, batch=self._batch)
        parents = [copy.parent for copy in self._open.values()]
        # No operation copies a block of the pool, so the ids are not used.
        transfer = Transfer(graph, b"".join(keys), [-1] * len(keys), parents)
        self._run = self._executor.submit(transfer, Priority.BACKGROUND)
        return self._run

    def _settle(self, run: Run, taking: Set[int]) -> None:
        """Process the ended transfer. Requeue interrupted copies at the front of their queue."""
        again: _Queue = {}
        for (key, copy), stored in zip(self._open.items(), run.stored, strict=True):
            left = tuple(
                tier
                for tier in copy.targets
                if tier not in stored
                and (run.is_cancelled or tier in run.given_up or tier not in taking)
            )
            if left == copy.targets:
                again[key] = copy
            elif left:
                self._enqueue(key, copy._replace(targets=left))
        if again:
            route = next(iter(again.values()))[:2]
            self._waiting[route] = again | self._waiting[route]
        self._open = {}
        self._run = None
        self._changed.notify_all()
