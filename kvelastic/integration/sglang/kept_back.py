"""Requests that SGLang's scheduler is not to see for a while."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def kept_back(scheduler: Any, requests: Sequence[Any]) -> Iterator[None]:
    """While it lasts, these requests are not in SGLang's queue; then they are back in their places.

    What SGLang has put into the queue meanwhile stands at its end.
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
