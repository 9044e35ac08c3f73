"""A circuit breaker for calls to a medium, with exponential backoff."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

FIRST_S: Final = 0.25
MOST_S: Final = 60.0


class CircuitBreaker:
    """The circuit breaker for one kind of call to one medium. Thread-safe.

    After each failure in a row, the backoff doubles, from `FIRST_S` up to `most_s`. So a medium
    that works again is used after at most `most_s`. `clock` must return monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float], most_s: float = MOST_S) -> None:
        self._clock = clock
        self._most_s = most_s
        self._next_s = FIRST_S
        self._until_s = float("-inf")
        self._lock = threading.Lock()
        self.problem = ""
        """The last failure, for an operator; empty after a success."""

    @property
    def allows_calls(self) -> bool:
        """Whether the medium may be called now."""
        return self._clock() >= self._until_s

    def failed(self, problem: str) -> None:
        """Record a failure. Failures of concurrent calls count once."""
        with self._lock:
            self.problem = problem
            if self.allows_calls:
                self._until_s = self._clock() + self._next_s
                self._next_s = min(2 * self._next_s, self._most_s)

    def worked(self) -> None:
        """Record a success, which resets the backoff."""
        with self._lock:
            self.problem = ""
            self._until_s = float("-inf")
            self._next_s = FIRST_S
