"""Reports requests that wait for memory, and logs a warning if the limit is too low.

    waiting = WaitingRequests(blocks, "kvelastic_vLLM_4711")
    waiting.report(3, first_blocks=24, first_may_blocks=40)     # after each step
    waiting.report(0)

A request that needs more than the limit allows waits until the limit is raised, and in vLLM all
requests behind it wait, too. Used by the one thread of the engine's loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from kvelastic.pool.scheduling.blocks import SchedulerBlocks
from kvelastic.units import format_size, size_argument

WARN_EVERY_S: Final = 60.0
"""Minimum time between two log lines."""

_log = logging.getLogger("kvelastic")


class ShortRequest(NamedTuple):
    """A request that lacked memory."""

    request_id: str
    count_blocks: Callable[[int], int]
    """Returns the further blocks that it needs for a number of tokens."""


class WaitingRequests:
    """The waiting requests of one engine. `name` is the instance's, for the log line's command."""

    def __init__(self, blocks: SchedulerBlocks, name: str) -> None:
        self._blocks = blocks
        self._name = name
        self._reported: tuple[int, int, int] | None = None
        self._warned: tuple[int, int] | None = None
        """Need and limit, in bytes, that the last log line named."""
        self._next_warning_s = 0.0

    def report(self, requests: int, *, first_blocks: int = 0, first_may_blocks: int = 0) -> None:
        """Publish how many requests wait for memory, and what the first of them needs.

        `first_blocks` is its total need (0: unknown), `first_may_blocks` its need for a response of
        maximum length. Cheap if nothing has changed.
        """
        now = (requests, first_blocks, first_may_blocks)
        is_known = requests > 0 and first_blocks > 0
        if now == self._reported and not is_known:
            return
        self._reported = now
        bytes_ = self._blocks.pool.report_waiting(
            requests, first_blocks=first_blocks, first_may_blocks=first_may_blocks
        )
        if is_known:
            self._warn_if_too_large(requests, *bytes_)
        else:
            self._warned = None

    def _warn_if_too_large(
        self, requests: int, needs_bytes: int, may_need_bytes: int, allowed_bytes: int
    ) -> None:
        """Once for each need and limit; `allowed_bytes` 0: it sleeps, and all requests wait."""
        now_s = time.monotonic()
        if not allowed_bytes or needs_bytes <= allowed_bytes:
            self._warned = None
            return
        if self._warned == (needs_bytes, allowed_bytes) or now_s < self._next_warning_s:
            return
        self._warned = (needs_bytes, allowed_bytes)
        self._next_warning_s = now_s + WARN_EVERY_S
        _log.warning(
            "%s for KV cache memory. The first needs %s, and limit and device allow %s: it waits"
            " until the limit is raised (kvctl limit %s %s; kvctl explain %s says more).",
            "1 request waits" if requests == 1 else f"{requests} requests wait",
            format_size(needs_bytes),
            format_size(allowed_bytes),
            self._name,
            size_argument(max(needs_bytes, may_need_bytes)),
            self._name,
        )
