"""Runs calls that may hang in daemon threads, which do not keep the process from exiting.

    workers = Workers("kvelastic-mooncake")
    workers.run(lambda: client.batch_is_exist(names), timeout_s=1.0)     # raises TimeoutError
    answers = Workers("kvelastic-folder", 8).map(function, arguments)
    workers.close(timeout_s=1.0)

A call that has timed out cannot be interrupted and continues in its thread. Until it ends, `run`
raises `TimeoutError` immediately. Do not reuse the buffers of such a call before `is_stuck` is
False.

`concurrent.futures` is not used: the interpreter joins its threads before it exits. So one hanging
call to a server would keep an engine from exiting.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

_A = TypeVar("_A")
_T = TypeVar("_T")


class _Flag:
    """An event that is set once. It costs one lock, and `threading.Event` a condition."""

    def __init__(self) -> None:
        self._is_set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Set the flag. Call it once."""
        self._is_set = True
        self._lock.release()

    def is_set(self) -> bool:
        """Return whether the flag is set."""
        return self._is_set

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the flag is set, for at most `timeout_s`. Return whether it is."""
        if not self._is_set:
            timeout = -1.0 if timeout_s is None else max(0.0, timeout_s)
            if self._lock.acquire(timeout=timeout):
                self._lock.release()  # for the next waiter
        return self._is_set


class Call(Generic[_T]):
    """One call and its result. `Workers.submit` creates it."""

    def __init__(self, function: Callable[[], _T]) -> None:
        self._function = function
        self._turn = threading.Lock()
        """Acquired by the thread that runs the call, or by `cancel`. Never released."""
        self.began = _Flag()
        self.ended = _Flag()
        self._value: list[_T] = []
        self._error: BaseException | None = None

    def make(self) -> None:
        """Run the call in the current thread, unless it was cancelled. Blocks until it returns."""
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
        """Keep the call from starting. Return False if it has started or was cancelled before."""
        return self._turn.acquire(blocking=False)

    def result(self) -> _T:
        """Return the result of a call, or raise its exception. Valid once `ended` is set."""
        if self._error is not None:
            raise self._error
        return self._value[0]


class Workers:
    """Up to `most` daemon threads named `name`, started on demand. Thread-safe.

    A forked child starts with no threads and no queued calls.
    """

    def __init__(self, name: str, most: int = 1) -> None:
        self._name = name
        self._most = most
        self._begin_anew()
        _all_workers.add(self)

    def _begin_anew(self) -> None:
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[Call[Any] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._open = 0
        """Number of calls that are queued or running."""
        self._late: list[Call[Any]] = []
        self._closed = False

    @property
    def is_stuck(self) -> bool:
        """True while a call that timed out, or was passed to `leave`, is still running."""
        return not all(call.ended.is_set() for call in self._late)

    def submit(self, function: Callable[[], _T]) -> Call[_T] | None:
        """Queue a call. Return None if the workers are closed or no thread can be started."""
        call = Call(function)
        with self._lock:
            if self._closed or not self._have_threads():
                return None
            self._open += 1
            self._calls.put(call)
        return call

    def leave(self, call: Call[Any]) -> None:
        """Record that the caller no longer waits for a call. `is_stuck` is True until it ends."""
        with self._lock:
            self._late = [late for late in self._late if not late.ended.is_set()] + [call]

    def run(self, function: Callable[[], _T], timeout_s: float) -> _T:
        """Run a call in a thread and return its result, or raise its exception. Blocks.

        Waits at most `timeout_s` for earlier calls, and then at most `timeout_s` for this call.
        Raises `TimeoutError` if either takes longer. A call that has not begun by then is never
        run. Raises `TimeoutError` immediately if an earlier call hangs, the workers are closed, or
        no thread can be started.
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

        Blocks until all calls have ended. Then raises the exception of the first failed call in
        that order, if any. After `close`, or if no thread can be started, the calls run one after
        another in the current thread.
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
        """Refuse further calls, and wait up to `timeout_s` for the threads to end. Idempotent.

        Calls that are already queued still run. Without `timeout_s`, waits until all have ended.
        Returns False if a thread is still running.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._calls.put(None)
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _have_threads(self) -> bool:
        """Start a thread if none is idle and fewer than `most` run.

        Returns False if no thread runs and none can be started.
        """
        if self._open >= len(self._threads) < self._most:
            thread = threading.Thread(
                target=self._work, args=(self._calls,), name=self._name, daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # the system cannot start another thread: use the running ones
                return bool(self._threads)
            self._threads.append(thread)
        return True

    def _work(self, calls: queue.SimpleQueue[Call[Any] | None]) -> None:
        while (call := calls.get()) is not None:
            call.make()
            with self._lock:
                self._open -= 1


_all_workers: weakref.WeakSet[Workers] = weakref.WeakSet()


def _begin_anew_in_child() -> None:
    # A new lock, too: another thread of the parent may have held the old one at the fork.
    for workers in list(_all_workers):
        workers._begin_anew()


os.register_at_fork(after_in_child=_begin_anew_in_child)
