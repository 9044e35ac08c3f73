"""Parallel calls that may hang, in daemon threads, which do not delay the end of the process.

    calls = ParallelCalls("kvelastic-folder", 8)
    answers = calls.map(function, arguments)
    calls.close()

The interpreter joins the threads of `concurrent.futures` before it exits. So one call to a server
that hangs would prevent an engine from exiting.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

_A = TypeVar("_A")
_T = TypeVar("_T")


class _Batch(Generic[_A, _T]):
    """The calls of one `map` and their results."""

    def __init__(self, call: Callable[[_A], _T], each: Sequence[_A]) -> None:
        self._call = call
        self._each = each
        self._answers: dict[int, _T] = {}
        self._errors: dict[int, BaseException] = {}
        self._lock = threading.Lock()
        self._left = len(each)
        self._ended = threading.Event()

    def carry_out(self, at: int) -> None:
        try:
            self._answers[at] = self._call(self._each[at])
        except BaseException as error:
            self._errors[at] = error
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self._ended.set()

    def wait(self) -> list[_T]:
        self._ended.wait()
        if self._errors:
            raise self._errors[min(self._errors)]
        return [self._answers[at] for at in range(len(self._each))]


class ParallelCalls:
    """A pool of at most `threads` threads. Thread-safe.

    A forked child starts with an empty pool.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._name = name
        self._most = threads
        self._lock = threading.Lock()
        self._pid = -1
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._pid = os.getpid()
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def map(self, call: Callable[[_A], _T], each: Sequence[_A]) -> list[_T]:
        """Return the results of `call` for each argument, in order.

        Blocks until all calls have ended. Then, if calls failed, raises the error of the first one
        in order. After `close`, or without any thread, makes the calls one by one in this thread.
        """
        if not each:
            return []
        batch = _Batch(call, each)
        with self._lock:
            if self._pid != os.getpid():
                self._begin_anew()
            alone = self._closed or not self._have_threads(len(each))
            if not alone:
                for at in range(len(each)):
                    self._queue.put(lambda at=at: batch.carry_out(at))  # type: ignore[misc]
        if alone:
            for at in range(len(each)):
                batch.carry_out(at)
        return batch.wait()

    def close(self) -> None:
        """Stop the threads after all queued calls have ended. Blocks. Idempotent."""
        with self._lock:
            threads = self._threads if self._pid == os.getpid() else []
            self._threads = []
            self._closed = True
            for _ in threads:
                self._queue.put(None)
        for thread in threads:
            thread.join()

    def _have_threads(self, wanted: int) -> bool:
        """Start threads for `wanted` calls. Returns False if there is no thread at all.

        The lock must be held.
        """
        while len(self._threads) < min(wanted, self._most):
            thread = threading.Thread(target=self._work, args=(self._queue,), daemon=True)
            thread.name = self._name
            try:
                thread.start()
            except RuntimeError:  # the system has no thread left; continue with fewer or none
                break
            self._threads.append(thread)
        return bool(self._threads)

    @staticmethod
    def _work(waiting: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while (job := waiting.get()) is not None:
            job()
