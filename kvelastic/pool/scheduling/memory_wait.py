"""Backoff while all requests wait for memory.

An engine loop that runs while all requests wait keeps its core busy with empty steps. If a step
found no block and had no other work, the engine backs off until blocks become available::

    look | the step finds no block | has_looked | pause until blocks arrive | the next step
         ^ blocks that arrive from here on, also during the step, end the pause

The availability epoch is read *before* the step. An epoch read after it would already include
blocks that arrived during the step, and the engine would sleep although memory is available.

    backoff.look()
    with blocks.session(): ...
    backoff.has_looked(works=...)
    ...
    if backoff.memory_wait is not None and backoff.memory_wait.pause(): continue   # no step

Used by the one thread of the engine's loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kvelastic.pool.scheduling.blocks import SchedulerBlocks

PAUSE_S = 0.01
"""Longest time that a pause keeps an engine from its input and from a shutdown."""
_LONGEST_PAUSE_S = 10.0
"""Upper bound of the pause after which the scheduler runs again; pauses double up to it.

Memory ends a pause at once. The bound is for other events that send no notification, such as a
compiled grammar. Each run may give a worker an empty step, after which it polls for seconds; one
run per second would keep its core busy.
"""

_log = logging.getLogger("kvelastic")


class MemoryWait:
    """A wait for memory, created when a step found no block.

    `seen` and `given_back` are `availability_epoch` and `given_back` of `SchedulerBlocks` before
    that step. `former` is the previous wait, if no block has become available since. If the step
    preempted a request, its blocks may be enough for another request once the step has ended, so
    the next step follows without a pause. A request that does not fit runs in pieces and is
    preempted again and again; with a `former` wait it pauses too.
    """

    def __init__(
        self,
        blocks: SchedulerBlocks,
        read_requests: Callable[[], object],
        seen: int,
        given_back: int,
        former: MemoryWait | None,
    ) -> None:
        self._blocks = blocks
        self._seen = seen
        self._given_back = given_back
        self._read_requests = read_requests
        self._requests = read_requests()
        self._is_first = former is None
        self._longest_s = PAUSE_S
        if former is not None:
            self._longest_s = min(max(2 * former._pause_s, PAUSE_S), _LONGEST_PAUSE_S)
        self._began_s = time.monotonic()

    @property
    def gave_back(self) -> bool:
        """True if the engine has given blocks back since the step began."""
        return self._blocks.given_back != self._given_back

    def has_news(self) -> bool:
        """Return whether blocks have arrived, or requests have arrived or left."""
        return (
            self._blocks.availability_epoch != self._seen or self._read_requests() != self._requests
        )

    def pause(self) -> bool:
        """Wait up to `PAUSE_S` for blocks. Return True if the engine can skip the step."""
        if not self._is_over():
            self._blocks.wait_for_epoch(self._seen, PAUSE_S)
        return not self._is_over()

    def _is_over(self) -> bool:
        return self.has_news() or time.monotonic() >= self._began_s + self._pause_s

    @property
    def _pause_s(self) -> float:
        return 0.0 if self._is_first and self.gave_back else self._longest_s


class Backoff:
    """The backoff state of one engine.

    `read_requests` returns a value that changes when a request arrives, leaves, or becomes runnable
    for a reason other than memory. Only the engine's thread changes it, between steps, so no
    change is missed.
    """

    def __init__(self, blocks: SchedulerBlocks, read_requests: Callable[[], object]) -> None:
        self.memory_wait: MemoryWait | None = None
        """Wait of the last step; None if the step found blocks or has work."""
        self._blocks = blocks
        self._read_requests = read_requests
        self._last: MemoryWait | None = None
        """The newest wait, even if it has ended."""
        self._is_asked_for_nothing = False
        self._seen = 0
        self._given_back = 0

    def look(self) -> None:
        """Call before a step looks for blocks: blocks that arrive from now on end its wait."""
        now = self.memory_wait
        self._is_asked_for_nothing = now is not None and not (now.gave_back or now.has_news())
        self._given_back = self._blocks.given_back
        self._seen = self._blocks.availability_epoch

    def has_looked(self, *, works: bool) -> None:
        """Call when the step is scheduled. `works`: the step has work."""
        blocks = self._blocks
        former, self.memory_wait = self.memory_wait, None
        if blocks.fell_short and not blocks.is_at_work:
            self.memory_wait = self._last = MemoryWait(
                blocks,
                self._read_requests,
                self._seen,
                self._given_back,
                None if self._last is None or self._last.has_news() else self._last,
            )
            if former is None:
                _log.debug("All requests wait for blocks.")
        elif works and former is not None:
            is_unexplained = self._is_asked_for_nothing and not blocks.fell_short
            if is_unexplained and blocks.availability_epoch == self._seen:
                _log.warning(
                    "A request became runnable without a wake-up and may have been delayed by up to"
                    " 10 s. Please report this, with what was changed at that time (limits, sleep,"
                    " other models)."
                )
            else:
                _log.debug("Blocks have come: requests run.")
