"""Has a request served by some replica: tries again until one has begun to answer.

    answer = await dispatch(send, request, retry_for_s=120)       # raises Refusal
    answer.head.status, answer.head.headers
    async for piece in answer.pieces(): ...                       # raises ReplicaLostError

`send` gives the request to the replica that the router chooses. What the router knows of sleep may
be half a second old, so a replica wakes only for a request that knows of its sleep: a sleeper says
`ASLEEP` first, and the request goes to one that is awake, or comes back.

An answer that is not a stream of events has begun only when all of it is here, so a replica that
dies before costs time and nothing else. A stream that breaks off ends with an event that says so.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from kvelastic.controller.refusal import Refusal
from kvelastic.errors import ReplicaLostError
from kvelastic.integration.ray.messages import ASLEEP, Cut, EngineRequest, Head, Unserved

_log = logging.getLogger("kvelastic.ray")

FIRST_PAUSE_S: Final = 0.05
LAST_PAUSE_S: Final = 1.0
MOST_WHOLE_BYTES: Final = 8 << 20
"""A larger answer goes on before its end has come, and cannot be tried again."""


class ReplicaStream(Protocol):
    """A replica's answer as it comes. Its `__anext__` raises `ReplicaLostError`."""

    def __aiter__(self) -> AsyncIterator[Head | bytes | Unserved | Cut]:
        """The parts of `messages`."""

    def cancel(self) -> None:
        """Nobody wants the rest."""


Send = Callable[[EngineRequest], ReplicaStream]


@dataclass
class Answer:
    """An answer that has begun."""

    head: Head
    tried: int
    """Attempts that failed before."""
    _parts: AsyncIterator[Head | bytes | Unserved | Cut]
    _stream: ReplicaStream
    _here: list[bytes] = field(default_factory=list)
    """Pieces that have come already."""

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body. Raises `ReplicaLostError` where a broken answer cannot say so itself."""
        try:
            for piece in self._here:
                yield piece
            async for part in self._parts:
                if isinstance(part, bytes):
                    yield part
                elif isinstance(part, Cut):
                    raise ReplicaLostError(part.message)
        except Exception as error:
            # A stream never just ends, whatever has happened.
            if not isinstance(error, ReplicaLostError):
                _log.exception("an answer of replica %s broke off", self.head.replica)
            if not self.head.is_stream:
                raise
            yield _event(str(error))
        finally:
            self._stream.cancel()


async def dispatch(send: Send, request: EngineRequest, *, retry_for_s: float) -> Answer:
    """Wait until a replica has begun to answer. Raises `Refusal`: none has in that time.

    Cancelling it ends the request at the replica.
    """
    end_s = time.monotonic() + retry_for_s
    tried: set[str] = set()
    sleepers: set[str] = set()
    pause_s = FIRST_PAUSE_S
    attempts = 0
    while True:
        stream = send(replace(request, tried=frozenset(tried), sleepers=frozenset(sleepers)))
        try:
            begun = await _begin(stream, attempts)
        except BaseException:
            stream.cancel()
            raise
        if isinstance(begun, Answer):
            return begun
        stream.cancel()
        if begun.code == ASLEEP and begun.replica not in sleepers:
            sleepers.add(begun.replica)
            continue
        tried.add(begun.replica)
        attempts += 1
        if time.monotonic() + pause_s >= end_s:
            raise Refusal(begun.status, begun.code, begun.message, begun.retry_after_s or 1.0)
        await asyncio.sleep(pause_s)
        pause_s = min(LAST_PAUSE_S, 2 * pause_s)


async def _begin(stream: ReplicaStream, tried: int) -> Answer | Unserved:
    parts = stream.__aiter__()
    replica = ""
    try:
        head = await anext(parts)
        if isinstance(head, Unserved):
            return head
        assert isinstance(head, Head), head
        replica = head.replica
        here = [head.first]
        size = len(head.first)
        while not head.is_stream and size <= MOST_WHOLE_BYTES:
            part = await anext(parts, None)
            if part is None:
                break
            if isinstance(part, Cut):
                return _lost(part.message, replica)
            assert isinstance(part, bytes), part
            here.append(part)
            size += len(part)
        return Answer(head, tried, parts, stream, here)
    except (ReplicaLostError, StopAsyncIteration) as error:
        return _lost(str(error), replica)


def _lost(why: str, replica: str) -> Unserved:
    message = f"No replica could serve this request: {why or 'the replica ended'}; try again later."
    return Unserved(503, "replica_lost", message, replica)


def _event(why: str) -> bytes:
    error = {
        "message": f"The answer is not whole: {why}. Send the request again.",
        "type": "server_error",
        "param": None,
        "code": "replica_lost",
    }
    return b"data: " + json.dumps({"error": error}).encode() + b"\n\n"
