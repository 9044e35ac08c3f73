"""Handles `/release_memory_occupation` calls that arrive while requests run.

    release   request a runs, b waits: the call waits for both
    ...       c arrives and is held back; otherwise new requests could delay the release forever
    round n   a and b have ended: the memory is released and the call returns
    resume    c runs

The call also waits for requests whose grammar is still being compiled when it arrives.

Used by the scheduler's thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvelastic.integration.sglang.hidden_requests import hidden_requests


class LateReleases:
    """The pending calls, in order."""

    def __init__(self) -> None:
        self._calls: list[tuple[Any, Callable[[], Any]]] = []
        self._before: set[str] = set()
        """Requests that the first pending call waits for."""

    def add(self, scheduler: Any, call: Any, release: Callable[[], Any]) -> None:
        """Add a pending call; `release` executes it and returns SGLang's reply."""
        if not self._calls:
            self._before = {request.rid for request in _known(scheduler)}
        self._calls.append((call, release))

    def behind(self, scheduler: Any) -> list[Any]:
        """Return queued requests that arrived after the first pending call."""
        if not self._calls:
            return []
        return [one for one in scheduler.waiting_queue if one.rid not in self._before]

    def carry_out(self, scheduler: Any, may_release: Callable[[], bool]) -> None:
        """Execute pending calls if no earlier request runs."""
        if not self._calls:
            return
        with hidden_requests(scheduler, self.behind(scheduler)):
            while self._calls and may_release():
                call, release = self._calls.pop(0)
                scheduler.send_control_output(release(), call)

    def give_up(self, scheduler: Any, answer: Any) -> None:
        """Reply to pending calls without releasing memory."""
        while self._calls:
            scheduler.send_control_output(answer, self._calls.pop(0)[0])


def _known(scheduler: Any) -> list[Any]:
    """Return every request that the scheduler has, possibly with duplicates."""
    batches = (scheduler.running_batch, scheduler.last_batch)
    return [
        *scheduler.waiting_queue,
        *scheduler.grammar_manager.grammar_queue,
        *(request for batch in batches if batch is not None for request in batch.reqs),
        *([] if scheduler.chunked_req is None else [scheduler.chunked_req]),
    ]
