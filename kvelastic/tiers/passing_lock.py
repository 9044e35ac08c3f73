"""A lock that takes jobs from those who cannot wait for it.

    lock = PassingLock()
    with lock: ...                       # a condition over a lock that a thread may hold twice
    lock.soon(lambda: end(ticket))       # at once where it is free; else by its holder, who lets go

Who holds the lock of a store may be waiting for a medium that hangs. An engine that ends a lease
hands that over and goes on.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType


class PassingLock(threading.Condition):
    """See the module. Take it by `with` only."""

    def __init__(self) -> None:
        super().__init__(threading.RLock())
        self._jobs: deque[Callable[[], None]] = deque()
        self._own = threading.local()

    def soon(self, job: Callable[[], None]) -> None:
        """Have `job` carried out under the lock, once. Never waits for a thread that holds it."""
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
        """How often this thread has entered it."""
        return getattr(self._own, "depth", 0)

    @_depth.setter
    def _depth(self, depth: int) -> None:
        self._own.depth = depth

    def _carry_out(self) -> None:
        # Whoever has the lock now looks after it has let go, so no job is left behind.
        while self._jobs and self.acquire(blocking=False):
            self._depth = 1  # a job that enters it itself begins no others
            try:
                while self._jobs:
                    self._jobs.popleft()()
            finally:
                self._depth = 0
                self.release()
