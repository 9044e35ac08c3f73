"""The client: so many streams at once, each token's arrival noted, nothing parsed before the end.

    answers = stream_all(port, requests, at_once=16)

Client and servers share the machine's cores, so while a turn runs this does no more than read a
socket and the clock. A turn's answers are taken apart when the turn is over.
"""

from __future__ import annotations

import asyncio
import bisect
import gc
import itertools
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from engine_server import Request

TURN_DEADLINE_S = 900.0
_EVENT = re.compile(rb"data: (\{.*?\})\r?\n\r?\n")
"""One event of the stream; the server sends each in an HTTP chunk of its own."""


class StreamError(Exception):
    """The server answered, and not with as many tokens as were asked for."""


@dataclass
class Answer:
    """What came back for one request."""

    sent_s: float
    events_s: list[float]
    """When each event came; by one clock for all."""
    tokens: list[int]

    @property
    def first_token_s(self) -> float:
        """From sending it to the first token."""
        return self.events_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Between one event and the next: a token's wait, as its reader sees it."""
        return [later - earlier for earlier, later in itertools.pairwise(self.events_s)]


def stream_all(
    port: int, requests: Sequence[Request], at_once: int, **further: Any
) -> list[Answer]:
    """Send all, `at_once` at any time; raises StreamError, OSError, or TimeoutError.

    `further` are fields of each request.
    """
    gc.collect()
    gc.disable()
    try:
        streams = asyncio.run(_all(port, requests, at_once, further))
    finally:
        gc.enable()
    return [_answer(*pair) for pair in zip(requests, streams, strict=True)]


class _Stream(asyncio.Protocol):
    """One request on a connection of its own, and all that comes back."""

    def __init__(self, message: bytes) -> None:
        self._message = message
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sent_s = 0.0
        self.pieces: list[tuple[float, bytes]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.sent_s = time.perf_counter()
        cast(asyncio.Transport, transport).write(self._message)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.over.done():
            if exc is None:
                self.over.set_result(None)
            else:
                self.over.set_exception(exc)


async def _all(
    port: int, requests: Sequence[Request], at_once: int, further: dict[str, Any]
) -> list[_Stream]:
    messages = enumerate([_message(request, further) for request in requests])
    done: dict[int, _Stream] = {}

    async def client(of_all: Iterator[tuple[int, bytes]]) -> None:
        for index, message in of_all:
            _, done[index] = await asyncio.get_running_loop().create_connection(
                lambda message=message: _Stream(message),  # type: ignore[misc]
                "127.0.0.1",
                port,
            )
            await done[index].over

    everyone = asyncio.gather(*(client(messages) for _ in range(at_once)))
    await asyncio.wait_for(everyone, TURN_DEADLINE_S)
    return [done[index] for index in range(len(requests))]


def _message(request: Request, further: dict[str, Any]) -> bytes:
    body = json.dumps(
        {
            "model": "m",
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            **further,
        }
    ).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _answer(request: Request, stream: _Stream) -> Answer:
    whole = b"".join(piece for _, piece in stream.pieces)
    ends = list(itertools.accumulate(len(piece) for _, piece in stream.pieces))
    answer = Answer(stream.sent_s, [], [])
    for event in _EVENT.finditer(whole):
        for choice in json.loads(event[1]).get("choices", []):
            if choice.get("token_ids"):
                piece = bisect.bisect_left(ends, event.end())
                answer.events_s.append(stream.pieces[piece][0])
                answer.tokens += choice["token_ids"]
    if len(answer.tokens) != request.max_tokens:
        raise StreamError(
            f"{len(answer.tokens)} tokens came instead of {request.max_tokens}: {whole[:500]!r}"
        )
    return answer
