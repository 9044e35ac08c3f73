"""A request that has not begun is tried again; one that has begun ends with an error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from kvelastic.controller.http.refusal import Refusal
from kvelastic.errors import ReplicaLostError
from kvelastic.integration.ray import dispatch as dispatching
from kvelastic.integration.ray.dispatch import Answer, dispatch
from kvelastic.integration.ray.messages import ASLEEP, Cut, EngineRequest, Head, Unserved

EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON = [(b"content-type", b"application/json")]
LOST = ReplicaLostError("its replica was lost (ActorDiedError)")
DOWN = Unserved(503, "model_down", "The engine has failed.", "a")
Part = Head | bytes | Unserved | Cut | Exception


class Stream:
    """What one replica says, an exception in the place where Ray raises it."""

    def __init__(self, parts: list[Part]) -> None:
        self.parts = parts
        self.is_cancelled = False

    async def __aiter__(self) -> AsyncIterator[Any]:
        for part in self.parts:
            if isinstance(part, Exception):
                raise part
            yield part

    def cancel(self) -> None:
        self.is_cancelled = True


class Replicas:
    """Attempts in their order; the last one answers all that follow."""

    def __init__(self, *attempts: list[Part]) -> None:
        self.attempts = list(attempts)
        self.requests: list[EngineRequest] = []
        self.streams: list[Stream] = []

    def __call__(self, request: EngineRequest, within_s: float) -> Stream:
        self.requests.append(request)
        self.within_s = within_s
        parts = self.attempts.pop(0) if len(self.attempts) > 1 else self.attempts[0]
        self.streams.append(Stream(parts))
        return self.streams[-1]


@pytest.fixture(autouse=True)
def no_retry_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatching, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(dispatching, "LAST_PAUSE_S", 0.0)


def run(replicas: Replicas, take: Callable[[Answer], Any], retry_for_s: float = 60.0) -> Any:
    async def all_of_it() -> Any:
        request = EngineRequest("POST", "/v1/completions", body=b"{}")
        return await take(await dispatch(replicas, request, retry_for_s=retry_for_s))

    return asyncio.run(all_of_it())


async def body_of(answer: Answer) -> list[bytes]:
    return [piece async for piece in answer.pieces()]


def test_response_is_streamed_and_its_stream_cancelled() -> None:
    replicas = Replicas([Head(200, EVENTS, "a", b"1"), b"2", b"3"])
    assert run(replicas, body_of) == [b"1", b"2", b"3"]
    assert replicas.streams[0].is_cancelled


@pytest.mark.parametrize("failure", [[LOST], [DOWN], []])
def test_unstarted_request_is_retried_on_another_replica(failure: list[Part]) -> None:
    replicas = Replicas(failure, failure, [Head(200, EVENTS, "b", b"1")])
    assert run(replicas, body_of) == [b"1"]
    assert len(replicas.requests) == 3


def test_retry_excludes_the_failed_replica() -> None:
    replicas = Replicas([DOWN], [Head(200, EVENTS, "b", b"1")])
    run(replicas, body_of)
    assert [request.tried for request in replicas.requests] == [frozenset(), {"a"}]


def test_request_tries_awake_replicas_before_waking_one() -> None:
    asleep = Unserved(503, ASLEEP, "The replica sleeps.", "a")
    replicas = Replicas([asleep], [replace(asleep, replica="b")], [Head(200, JSON, "a", b"1")])
    assert run(replicas, body_of) == [b"1"]
    assert [request.sleepers for request in replicas.requests] == [frozenset(), {"a"}, {"a", "b"}]
    assert not any(request.tried for request in replicas.requests)


@pytest.mark.parametrize("failure", [LOST, Cut("the engine ended")])
def test_broken_stream_ends_with_error_event_without_retry(failure: Part) -> None:
    replicas = Replicas([Head(200, EVENTS, "a", b"data: 1\n\n"), failure])
    first, last = run(replicas, body_of)
    assert first == b"data: 1\n\n"
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "replica_lost"
    assert len(replicas.requests) == 1


@pytest.mark.parametrize("failure", [LOST, Cut("the engine ended")])
def test_broken_non_stream_response_is_retried(failure: Part) -> None:
    replicas = Replicas(
        [Head(200, JSON, "a", b'{"half'), failure], [Head(200, JSON, "b", b"{"), b"}"]
    )
    assert run(replicas, body_of) == [b"{", b"}"]


def test_broken_large_non_stream_response_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatching, "MOST_WHOLE_BYTES", 2)
    with pytest.raises(ReplicaLostError):
        run(Replicas([Head(200, JSON, "a", b"1"), b"234", LOST]), body_of)


def test_engine_error_is_passed_on() -> None:
    async def status_of(answer: Answer) -> int:
        return answer.head.status

    assert run(Replicas([Head(400, JSON, "a", b"{}")]), status_of) == 400


def test_last_refusal_is_raised_after_the_retry_time() -> None:
    with pytest.raises(Refusal) as caught:
        run(Replicas([DOWN]), body_of, retry_for_s=0.0)
    assert (caught.value.status, caught.value.code) == (503, "model_down")


def test_client_disconnect_cancels_the_request_at_the_replica() -> None:
    async def leave() -> Stream:
        class Silent(Stream):
            async def __aiter__(self) -> AsyncIterator[Any]:
                waits.set()
                await asyncio.Event().wait()
                yield b""

        waits, stream = asyncio.Event(), Silent([])
        request = EngineRequest("POST", "/v1/completions")
        task = asyncio.create_task(dispatch(lambda *_: stream, request, retry_for_s=60.0))
        await waits.wait()
        task.cancel()
        await asyncio.wait({task})
        return stream

    assert asyncio.run(leave()).is_cancelled
