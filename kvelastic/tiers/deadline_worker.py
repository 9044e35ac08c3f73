"""Calls to a library that may hang, with a timeout for the caller.

    worker = DeadlineWorker("mooncake")
    worker.run(lambda: client.batch_is_exist(names), timeout_s=1.0)     # raises TimeoutError
    worker.close(timeout_s=1.0)

One call runs at a time. A call that has timed out continues in its thread, since it cannot be
interrupted. Until it ends, further calls fail at once. Do not reuse the buffers of such a call
before `is_stuck` is False.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")


class _Call:
    """One call and its result."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function
        self.ended = threading.Event()
        self.value: object = None
        self.error: BaseException | None = None

    def carry_out(self) -> None:
        try:
            self.value = self.function()
        except BaseException as error:
            self.error = error
        finally:
            self.ended.set()


class DeadlineWorker:
    """A daemon thread that runs calls. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._turn = threading.Lock()
        self._late: _Call | None = None
        self._closed = False

    @property
    def is_stuck(self) -> bool:
        """Whether a call that timed out is still running."""
        late = self._late
        return late is not None and not late.ended.is_set()

    def run(self, function: Callable[[], Value], timeout_s: float) -> Value:
        """Run `function` and return its result, or raise its exception. Blocks.

        Waits at most `timeout_s` for calls of other threads, and again for this call. Raises
        `TimeoutError` if either takes longer. Raises it at once if an earlier call hangs, the
        worker is closed, or no thread can be started.
        """
        if not self._turn.acquire(timeout=timeout_s):
            raise TimeoutError(f"{self._name}: other calls take longer than {timeout_s:g} s")
        try:
            if self.is_stuck or self._closed:
                raise TimeoutError(f"{self._name}: an earlier call has not ended, or it is closed")
            self._late = None
            if self._thread is None:
                thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # the system has no thread left
                    raise TimeoutError(f"{self._name}: {error}") from error
                self._thread = thread
            call = _Call(function)
            self._calls.put(call)
            if not call.ended.wait(timeout_s):
                self._late = call
                raise TimeoutError(f"{self._name}: no answer within {timeout_s:g} s")
        finally:
            self._turn.release()
        if call.error is not None:
            raise call.error
        return call.value  # type: ignore[return-value]  # the result of `function`

    def close(self, timeout_s: float) -> bool:
        """Refuse further calls and wait at most `timeout_s` for the thread. Idempotent.

        Returns False if a call still hangs. May also wait for a `run` of another thread.
        """
        with self._turn:
            thread = self._thread
            if not self._closed:
                self._closed = True
                self._calls.put(None)
        if thread is None:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call.carry_out()
