"""Calls of `/release_memory_occupation` that came while requests ran.

    release   request a runs, b waits: the call waits for both
    ...       c comes: it is kept back, or a release would wait as long as others keep asking
    round n   a and b have ended: the memory is released, and the call answered
    resume    c runs

A request whose grammar is still being compiled when the call comes is waited for, too; so is one
whose grammar is compiled after it.

Used by the scheduler's thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvelastic.integration.sglang.kept_back import kept_back


class LateReleases:
    """See the module."""

    def __init__(self) -> None:
        self._calls: list[tuple[Any, Callable[[], Any]]] = []
        self._before: set[str] = set()
        """Requests that the first of the calls waits for."""

    def add(self, scheduler: Any, call: Any, release: Callable[[], Any]) -> None:
        """Wait with this call; `release` carries it out and answers what SGLang sends back."""
        if not self._calls:
            self._before = {request.rid for request in _known(scheduler)}
        self._calls.append((call, release))

    def behind(self, scheduler: Any) -> list[Any]:
        """Requests of the queue that came after the first of the calls."""
        if not self._calls:
            return []
        return [one for one in scheduler.waiting_queue if one.rid not in self._before]

    def carry_out(self, scheduler: Any, may_release: Callable[[], bool]) -> None:
        """Do so if nothing runs that came before."""
        if not self._calls:
            return
        with kept_back(scheduler, self.behind(scheduler)):
            while self._calls and may_release():
                call, release = self._calls.pop(0)
                scheduler.send_control_output(release(), call)

    def give_up(self, scheduler: Any, answer: Any) -> None:
        """Answer them without releasing anything."""
        while self._calls:
            scheduler.send_control_output(answer, self._calls.pop(0)[0])


def _known(scheduler: Any) -> list[Any]:
    """Every request that the scheduler has; some of them twice."""
    batches = (scheduler.running_batch, scheduler.last_batch)
    return [
        *scheduler.waiting_queue,
        *scheduler.grammar_manager.grammar_queue,
        *(request for batch in batches if batch is not None for request in batch.reqs),
        *([] if scheduler.chunked_req is None else [scheduler.chunked_req]),
    ]
