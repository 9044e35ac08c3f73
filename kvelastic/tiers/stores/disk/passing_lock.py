"""A lock to which a thread can pass a job instead of waiting for it.

    lock = PassingLock()
    with lock: ...                       # a condition over a reentrant lock
    lock.soon(lambda: end(ticket))       # now if the lock is free, else by its holder on release

The holder of a store's lock may be waiting for a medium that hangs. An engine that releases a hold
passes the job to the holder and continues.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType


class PassingLock(threading.Condition):
    """A condition over a reentrant lock, which also runs passed jobs. Acquire it only by `with`."""

    def __init__(self) -> None:
        super().__init__(threading.RLock())
        self._jobs: deque[Callable[[], None]] = deque()
        self._own = threading.local()

    def soon(self, job: Callable[[], None]) -> None:
        """Have `job` run once with the lock held. Never waits for the holder of the lock.

        Runs it now if the lock is free. Otherwise the holder runs it after it releases the lock.
        """
        self._jobs.append(job)
        if self._depth == 0:
            self._carry_out()

    def __enter__(self) -> bool:
        entered = super().__enter__()
        self._depth += 1
        return entered

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._depth -= 1
        super().__exit__(exc_type, exc, traceback)
        if self._depth == 0:
            self._carry_out()

    @property
    def _depth(self) -> int:
        """How many times this thread holds the lock."""
        return getattr(self._own, "depth", 0)

    @_depth.setter
    def _depth(self, depth: int) -> None:
        self._own.depth = depth

    def _carry_out(self) -> None:
        # If another thread holds the lock, that thread checks for jobs after its release. So no
        # job is lost.
        while self._jobs and self.acquire(blocking=False):
            self._depth = 1  # a job that takes the lock itself must not run other jobs
            try:
                while self._jobs:
                    self._jobs.popleft()()
            finally:
                self._depth = 0
                self.release()
