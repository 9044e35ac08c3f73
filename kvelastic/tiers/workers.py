"""Calls that may hang, in daemon threads, which do not delay the end of the process.

    workers = Workers("kvelastic-mooncake")
    workers.run(lambda: client.batch_is_exist(names), timeout_s=1.0)     # raises TimeoutError
    answers = Workers("kvelastic-folder", 8).map(function, arguments)
    workers.close(timeout_s=1.0)

A call that has timed out continues in its thread, since it cannot be interrupted. Until it ends,
`run` fails at once. Do not reuse the buffers of such a call before `is_stuck` is False.

The interpreter joins the threads of `concurrent.futures` before it exits. So one call to a server
that hangs would prevent an engine from exiting.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

_A = TypeVar("_A")
_T = TypeVar("_T")


class Call(Generic[_T]):
    """One call and its result. Made by `Workers.submit`."""

    def __init__(self, function: Callable[[], _T]) -> None:
        self._function = function
        self._turn = threading.Lock()
        """Taken by the thread that makes the call, or for ever by `cancel`."""
        self.began = threading.Event()
        self.ended = threading.Event()
        self._value: list[_T] = []
        self._error: BaseException | None = None

    def make(self) -> None:
        """Make the call in this thread, unless it is cancelled."""
        if not self._turn.acquire(blocking=False):
            return
        self.began.set()
        try:
            self._value.append(self._function())
        except BaseException as error:
            self._error = error
        finally:
            self.ended.set()

    def cancel(self) -> bool:
        """Make the call never begin. Returns False if it has begun."""
        return self._turn.acquire(blocking=False)

    def result(self) -> _T:
        """Return the result of a call that has ended, or raise its exception."""
        if self._error is not None:
            raise self._error
        return self._value[0]


class Workers:
    """At most `most` daemon threads, started as calls need them. Thread-safe.

    A forked child starts without threads.
    """

    def __init__(self, name: str, most: int = 1) -> None:
        self._name = name
        self._most = most
        self._lock = threading.Lock()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._pid = os.getpid()
        self._calls: queue.SimpleQueue[Call[Any] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._open = 0
        """Number of calls that wait or run."""
        self._late: list[Call[Any]] = []
        self._closed = False

    @property
    def is_stuck(self) -> bool:
        """Whether a call that was left is still running."""
        return not all(call.ended.is_set() for call in self._late)

    def submit(self, function: Callable[[], _T]) -> Call[_T] | None:
        """Queue a call. Returns None if the workers are closed or the system has no thread left."""
        call = Call(function)
        with self._lock:
            if self._pid != os.getpid():
                self._begin_anew()
            if self._closed or not self._have_threads():
                return None
            self._open += 1
            self._calls.put(call)
        return call

    def leave(self, call: Call[Any]) -> None:
        """Stop waiting for a call. `is_stuck` is True until it has ended."""
        with self._lock:
            self._late = [late for late in self._late if not late.ended.is_set()] + [call]

    def run(self, function: Callable[[], _T], timeout_s: float) -> _T:
        """Make a call and return its result, or raise its exception. Blocks.

        Waits at most `timeout_s` for earlier calls, and again for this call. Raises `TimeoutError`
        if either takes longer; a call that has not begun by then is never made. Raises it at once
        if an earlier call hangs, the workers are closed, or no thread can be started.
        """
        if self.is_stuck:
            raise TimeoutError(f"{self._name}: an earlier call has not ended")
        call = self.submit(function)
        if call is None:
            raise TimeoutError(f"{self._name} is closed, or the system has no thread left")
        if not call.began.wait(timeout_s) and call.cancel():
            raise TimeoutError(f"{self._name}: other calls take longer than {timeout_s:g} s")
        if not call.ended.wait(timeout_s):
            self.leave(call)
            raise TimeoutError(f"{self._name}: no answer within {timeout_s:g} s")
        return call.result()

    def map(self, function: Callable[[_A], _T], each: Sequence[_A]) -> list[_T]:
        """Return the results of `function` for each argument, in order.

        Blocks until all calls have ended. Then, if calls failed, raises the error of the first one
        in order. After `close`, or without any thread, makes the calls one by one in this thread.
        """
        calls: list[Call[_T]] = []
        for one in each:
            call = self.submit(partial(function, one))
            if call is None:
                call = Call(partial(function, one))
                call.make()
            calls.append(call)
        for call in calls:
            call.ended.wait()
        return [call.result() for call in calls]

    def close(self, timeout_s: float | None = None) -> bool:
        """Refuse further calls and wait for the threads, at most `timeout_s`. Idempotent.

        Returns False if a call still runs. Calls that were queued before are made.
        """
        with self._lock:
            if self._pid != os.getpid():
                self._begin_anew()
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._calls.put(None)
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _have_threads(self) -> bool:
        """Start a thread if no thread is idle. Returns False if there is none at all."""
        if self._open >= len(self._threads) < self._most:
            thread = threading.Thread(
                target=self._work, args=(self._calls,), name=self._name, daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # the system has no thread left; continue with fewer or none
                return bool(self._threads)
            self._threads.append(thread)
        return True

    def _work(self, calls: queue.SimpleQueue[Call[Any] | None]) -> None:
        while (call := calls.get()) is not None:
            call.make()
            with self._lock:
                self._open -= 1
