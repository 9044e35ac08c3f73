"""All requests wait for memory: when to ask vLLM's scheduler again.

vLLM's loop runs on and on while requests wait, and keeps its worker's core busy with empty steps.
Where a step found no block and nothing else to do, the engine naps until blocks have come instead::

    seen = arrivals | the step finds no block | nap until arrivals != seen | the next step
                    ^ what comes from here on, also in the midst of the step, ends the nap

The count is read *before* the step. Figures that are read after it hold already what came while the
step was looking; they never change again, and the engine sleeps beside memory that is there.
"""

from __future__ import annotations

import time
from typing import Any

NAP_S = 0.01
"""How long a nap keeps vLLM from its input and from a shutdown, at most."""
_LONGEST_PAUSE_S = 10.0
"""The scheduler is asked again after a pause all the same, which doubles up to this.

Not for memory, which ends the nap at once, but for what requests may wait for besides (a grammar
that is compiled, say) and for a driver that was out of memory: neither tells anybody. Each time
vLLM's worker gets an empty step, and polls for seconds for the next one: once a second would keep
its core busy.
"""


class Starvation:
    """Made when a step found no block; `former` is the one before, if nothing has come since.

    `seen` is `ElasticBlockPool.arrivals` as it was before that step. `gave_back`: the step has
    preempted a request, whose blocks another may have, so it is asked again at once. A request that
    does not fit runs in pieces and is preempted, again and again: with a former one it pauses too.
    """

    def __init__(
        self, scheduler: Any, seen: int, former: Starvation | None, *, gave_back: bool
    ) -> None:
        self.gave_back = gave_back
        self._scheduler = scheduler
        self._pool = scheduler.kv_cache_manager.block_pool
        self._seen = seen
        self._requests = self._read_requests()
        self._pause_s: float = 0.0 if gave_back else NAP_S
        if former is not None:
            self._pause_s = min(max(2 * former._pause_s, NAP_S), _LONGEST_PAUSE_S)
        self._pause_ends_s = time.monotonic() + self._pause_s

    def has_news(self) -> bool:
        """Whether blocks have come, or requests have come or gone."""
        return self._pool.arrivals != self._seen or self._read_requests() != self._requests

    def nap(self) -> bool:
        """Wait for blocks, `NAP_S` at most; whether to go on without a step."""
        if not self._is_over():
            self._pool.wait_for_arrival(self._seen, NAP_S)
        return not self._is_over()

    def _is_over(self) -> bool:
        return self.has_news() or time.monotonic() >= self._pause_ends_s

    def _read_requests(self) -> tuple[object, ...]:
        """Only the thread that naps here changes any of it, between steps: no change is missed."""
        scheduler = self._scheduler
        return (len(scheduler.requests), len(scheduler.finished_req_ids), scheduler.pause_state)
