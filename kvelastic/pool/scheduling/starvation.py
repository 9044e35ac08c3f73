"""Backoff while all requests wait for memory.

An engine loop that runs while all requests wait keeps its core busy with empty steps. If a step
found no block and had no other work, the engine backs off until blocks become available::

    look | the step finds no block | has_looked | nap until something has come | the next step
         ^ what comes from here on, also in the midst of the step, ends the nap

The availability epoch is read *before* the step. An epoch read after it would already include
blocks that arrived during the step, and the engine would sleep although memory is available.

    naps.look()
    with blocks.session(): ...
    naps.has_looked(works=...)
    ...
    if naps.starvation is not None and naps.starvation.nap(): continue   # in the place of a step

Used by the one thread of the engine's loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kvelastic.pool.scheduling.blocks import SchedulerBlocks

NAP_S = 0.01
"""How long a nap keeps an engine from its input and from a shutdown, at most."""
_LONGEST_PAUSE_S = 10.0
"""Upper bound of the pause after which the scheduler runs again; pauses double up to it.

Memory ends a pause at once. The bound is for other events that send no notification, such as a
compiled grammar. Each run may give a worker an empty step, after which it polls for seconds; one
run per second would keep its core busy.
"""

_log = logging.getLogger("kvelastic")


class Starvation:
    """Made when a step found no block; `former` is the one before, if nothing has come since.

    `seen` is `SchedulerBlocks.arrivals` as it was before that step. `gave_back`: the step has
    preempted a request, whose blocks another may have, so it is asked again at once. A request that
    does not fit runs in pieces and is preempted, again and again: with a former one it pauses too.
    """

    def __init__(
        self,
        blocks: SchedulerBlocks,
        read_requests: Callable[[], object],
        seen: int,
        former: Starvation | None,
        *,
        gave_back: bool,
    ) -> None:
        self.gave_back = gave_back
        self._blocks = blocks
        self._seen = seen
        self._read_requests = read_requests
        self._requests = read_requests()
        self._pause_s: float = 0.0 if gave_back else NAP_S
        if former is not None:
            self._pause_s = min(max(2 * former._pause_s, NAP_S), _LONGEST_PAUSE_S)
        self._pause_ends_s = time.monotonic() + self._pause_s

    def has_news(self) -> bool:
        """Whether blocks have come, or requests have come or gone."""
        return self._blocks.arrivals != self._seen or self._read_requests() != self._requests

    def nap(self) -> bool:
        """Wait for blocks, `NAP_S` at most; whether to go on without a step."""
        if not self._is_over():
            self._blocks.wait_for_arrival(self._seen, NAP_S)
        return not self._is_over()

    def _is_over(self) -> bool:
        return self.has_news() or time.monotonic() >= self._pause_ends_s


class Naps:
    """The backoff state of one engine.

    `read_requests` returns a value that changes when a request arrives, leaves, or becomes runnable
    for a reason other than memory. Only the engine's thread changes it, between steps, so no
    change is missed.
    """

    def __init__(self, blocks: SchedulerBlocks, read_requests: Callable[[], object]) -> None:
        self.starvation: Starvation | None = None
        """Of the last step; None: it found blocks, or has work."""
        self._blocks = blocks
        self._read_requests = read_requests
        self._last: Starvation | None = None
        """The newest one, also when it is over."""
        self._is_asked_for_nothing = False
        self._seen = 0
        self._given_back = 0

    def look(self) -> None:
        """A step is about to look for blocks: what comes from here on counts as news."""
        now = self.starvation
        self._is_asked_for_nothing = now is not None and not (now.gave_back or now.has_news())
        self._given_back = self._blocks.given_back
        self._seen = self._blocks.arrivals

    def has_looked(self, *, works: bool) -> None:
        """It was scheduled, and has begun; `works`: it has something to do."""
        blocks = self._blocks
        former, self.starvation = self.starvation, None
        if blocks.fell_short and not blocks.is_at_work:
            self.starvation = self._last = Starvation(
                blocks,
                self._read_requests,
                self._seen,
                None if self._last is None or self._last.has_news() else self._last,
                gave_back=blocks.given_back != self._given_back,
            )
            if former is None:
                _log.debug("All requests wait for blocks.")
        elif works and former is not None:
            is_unexplained = self._is_asked_for_nothing and not blocks.fell_short
            if is_unexplained and blocks.arrivals == self._seen:
                _log.warning(
                    "A request became runnable without a wake-up and may have been delayed by up to"
                    " 10 s. Please report this, with what was changed at that time (limits, sleep,"
                    " other models)."
                )
            else:
                _log.debug("Blocks have come: requests run.")
