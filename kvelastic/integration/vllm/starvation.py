"""Nothing could be scheduled for want of blocks: when to ask the scheduler again.

vLLM's loop runs on and on while requests wait, and keeps its worker's core busy with empty steps.
"""

from __future__ import annotations

import time
from typing import Any

NAP_S = 0.01
"""How often the engine looks whether memory has come, while all requests wait for some."""
_LONGEST_S = 10.0
"""After this long the scheduler is asked again, whatever the figures say."""


class Starvation:
    """Made when a step found no block; over when any figure that matters has changed."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._figures = self._read()
        self._end_s = time.monotonic() + _LONGEST_S

    def is_over(self) -> bool:
        """Whether to ask the scheduler again."""
        return self._read() != self._figures or time.monotonic() >= self._end_s

    def _read(self) -> tuple[object, ...]:
        scheduler = self._scheduler
        return (
            scheduler.kv_cache_manager.block_pool.available_size(),
            len(scheduler.requests),
            len(scheduler.finished_req_ids),
            scheduler.pause_state,
        )
