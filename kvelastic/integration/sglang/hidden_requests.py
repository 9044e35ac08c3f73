"""Hides requests from SGLang's scheduler for a while."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def hidden_requests(scheduler: Any, requests: Sequence[Any]) -> Iterator[None]:
    """Remove these requests from SGLang's queue in the body; then restore them to their places.

    Requests that SGLang has queued in the body are at the end afterwards.
    """
    if not requests:
        yield
        return
    queue = scheduler.waiting_queue
    back = {id(request) for request in requests}
    scheduler.waiting_queue = [request for request in queue if id(request) not in back]
    try:
        yield
    finally:
        kept = back | {id(request) for request in scheduler.waiting_queue}
        known = {id(request) for request in queue}
        scheduler.waiting_queue = [request for request in queue if id(request) in kept] + [
            request for request in scheduler.waiting_queue if id(request) not in known
        ]
