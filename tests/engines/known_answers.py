"""Requests whose tokens stock has said, and what a server that is tried makes of them.

known = know(stock, make_requests(32, seed=7))
assert ask(server, known[0]).is_right
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

from engine_server import EngineServer, Request


class Known(NamedTuple):
    """A request, and the tokens that the stock engine answers it with."""

    request: Request
    tokens: list[int]


class Answers(Protocol):
    """A server, or what stands before several."""

    def complete(self, request: Request) -> list[int]:
        """The tokens; fewer than asked for where the request was aborted."""


class Answered(NamedTuple):
    known: Known
    tokens: list[int]
    sent_s: float
    ended_s: float

    @property
    def is_full(self) -> bool:
        """Whether the answer was not cut short: no request ends early by itself."""
        return len(self.tokens) == self.known.request.max_tokens

    @property
    def is_right(self) -> bool:
        return self.tokens == self.known.tokens[: len(self.tokens)]


def ask(server: Answers, known: Known) -> Answered:
    sent_s = time.monotonic()
    tokens = server.complete(known.request)
    return Answered(known, tokens, sent_s, time.monotonic())


def know(stock: EngineServer, requests: Sequence[Request]) -> list[Known]:
    """Requests with stock's answers, each as far as nothing but the prompt decides it."""
    with ThreadPoolExecutor(16) as threads:
        ended = list(threads.map(stock.decided, requests))
    decided = [request for request in ended if request.max_tokens > 0]
    assert len(decided) > len(requests) // 2
    answers = stock.complete_all(decided)
    return [Known(*both) for both in zip(decided, answers, strict=True)]


class Times(list[tuple[float, float]]):
    """When something went on: from and to."""

    def overlap(self, sent_s: float, ended_s: float) -> bool:
        """Whether a request was on its way during any of it."""
        return any(begin < ended_s and sent_s < end for begin, end in self)
