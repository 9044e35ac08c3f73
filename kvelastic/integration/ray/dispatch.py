"""Dispatches a request to a replica; retries until one has started to respond.

    answer = await dispatch(send, request, retry_for_s=120)       # raises Refusal
    answer.head.status, answer.head.headers
    async for piece in answer.pieces(): ...                       # raises ReplicaLostError

`send` passes the request to the replica that the router chooses. The router's sleep state may be
half a second old. So a sleeping replica first refuses with `ASLEEP`, and the request is marked. It
then goes to an awake replica, or returns to a sleeping one, which wakes for a marked request.

A response that is not an event stream counts as started only when it is complete. So if its replica
dies, the request is retried. An event stream that breaks off ends with an error event.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from kvelastic.controller.http.refusal import Refusal
from kvelastic.errors import ReplicaLostError
from kvelastic.integration.ray.messages import ASLEEP, Cut, EngineRequest, Head, Unserved

_log = logging.getLogger("kvelastic.ray")

FIRST_PAUSE_S: Final = 0.05
LAST_PAUSE_S: Final = 1.0
MOST_WHOLE_BYTES: Final = 8 << 20
"""A larger response is forwarded before it is complete, and cannot be retried."""


class ReplicaStream(Protocol):
    """A replica's response as it arrives. Its `__anext__` raises `ReplicaLostError`."""

    def __aiter__(self) -> AsyncIterator[Head | bytes | Unserved | Cut]:
        """Iterate over the parts (see `messages`)."""

    def cancel(self) -> None:
        """End the request at the replica."""


Send = Callable[[EngineRequest, float], ReplicaStream]
"""Sends a request, which a replica must accept within so many seconds."""


@dataclass
class Answer:
    """A response that has started."""

    head: Head
    tried: int
    """Number of failed attempts before."""
    _parts: AsyncIterator[Head | bytes | Unserved | Cut]
    _stream: ReplicaStream
    _here: list[bytes] = field(default_factory=list)
    """Pieces that have already arrived."""

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body. Raises `ReplicaLostError` if a response without streaming breaks off."""
        try:
            for piece in self._here:
                yield piece
            async for part in self._parts:
                if isinstance(part, bytes):
                    yield part
                elif isinstance(part, Cut):
                    raise ReplicaLostError(part.message)
        except Exception as error:
            # A stream always ends with an event, even after an error.
            if not isinstance(error, ReplicaLostError):
                _log.exception("an answer of replica %s broke off", self.head.replica)
            if not self.head.is_stream:
                raise
            yield _event(str(error))
        finally:
            self._stream.cancel()


async def dispatch(send: Send, request: EngineRequest, *, retry_for_s: float) -> Answer:
    """Wait until a replica has started to respond; return the response.

    Raises `Refusal` if none has after `retry_for_s`. Cancellation ends the request at the replica.
    """
    end_s = time.monotonic() + retry_for_s
    tried: set[str] = set()
    sleepers: set[str] = set()
    pause_s = FIRST_PAUSE_S
    attempts = 0
    while True:
        marked = replace(request, tried=frozenset(tried), sleepers=frozenset(sleepers))
        stream = send(marked, max(FIRST_PAUSE_S, end_s - time.monotonic()))
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
