"""All requests wait for memory: when to ask the engine's scheduler again.

A loop that runs on and on while requests wait keeps its core busy with empty steps. Where a step
found no block and nothing else to do, the engine naps until blocks have come instead::

    look | the step finds no block | has_looked | nap until something has come | the next step
         ^ what comes from here on, also in the midst of the step, ends the nap

What has come is read *before* the step. Figures that are read after it hold already what came while
the step was looking; they never change again, and the engine sleeps beside memory that is there.

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

from kvelastic.scheduling.blocks import SchedulerBlocks

NAP_S = 0.01
"""How long a nap keeps an engine from its input and from a shutdown, at most."""
_LONGEST_PAUSE_S = 10.0
"""The scheduler is asked again after a pause all the same, which doubles up to this.

Not for memory, which ends the nap at once, but for what requests may wait for besides: a grammar
that is compiled, say, which sends no event. Each time a worker may get an empty step, and poll for
seconds for the next one: once a second would keep its core busy.
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
    """Of one engine; see the module.

    `read_requests` answers what changes whenever a request comes, goes, or may go on for another
    reason than memory. Only the thread that naps here changes any of it, between steps: so no
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
                    "A request could run, and nothing had said that there are blocks for it: it"
                    " may have waited up to ten seconds too long. Please report this, with what was"
                    " changed at that time (limits, sleep, other models)."
                )
            else:
                _log.debug("Blocks have come: requests run.")
