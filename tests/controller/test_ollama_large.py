"""Large requests and answers of Ollama's API: none is translated in the controller's loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from waiting import DEADLINE_S

from kvelastic.controller.app_state import AppState
from kvelastic.controller.http.log_writer import LogWriter
from kvelastic.controller.http.open_files import OpenFiles
from kvelastic.controller.http.request_log import RequestLog
from kvelastic.controller.routing import ollama, ollama_answer
from kvelastic.controller.routing.forward import READ_BODY
from kvelastic.controller.routing.ollama import HERE_BYTES, OllamaApi
from kvelastic.controller.routing.ollama_request import Call, read, to_openai
from kvelastic.controller.settings.settings_file import parse

SETTINGS = parse("models: [{name: m, engine: vllm, url: 'http://127.0.0.1:9'}]", {})


class Engine:
    """In the forwarder's place: keeps a request, and answers with these pieces."""

    def __init__(self, front: AppState, *pieces: bytes) -> None:
        self.budget, self.reader = front.forwarder.budget, front.forwarder.reader
        self.stop = front.forwarder.stop
        self._pieces = pieces
        self.path = ""
        self.asked = b""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.path, self.asked = scope["path"], b"".join(scope[READ_BODY].pieces())
        scope[READ_BODY].release()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@pytest.fixture
def in_loop(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How large each thing was that was translated in this process."""
    sizes: list[int] = []

    def noting(translate: Callable[..., Any], at: int) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            sizes.append(len(arguments[at]))
            return translate(*arguments)

        return call

    monkeypatch.setattr(ollama, "read", noting(read, 1))
    monkeypatch.setattr(ollama, "whole", noting(ollama_answer.whole, 2))
    monkeypatch.setattr(ollama.Stream, "feed", noting(ollama_answer.Stream.feed, 1))
    return sizes


def asked(call: Call, body: bytes, *answer: bytes) -> tuple[int, bytes, Engine]:
    """Ask the controller; what it answers, and the engine that it asked."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    async def serve() -> Engine:
        with LogWriter(None) as writer:
            front = AppState(SETTINGS, RequestLog(writer), OpenFiles.raised())
            await front.start()
            engine = Engine(front, *answer)
            front.forwarder = engine  # type: ignore[assignment]
            scope = {
                "type": "http",
                "method": "POST",
                "path": call.value,
                "headers": [(b"host", b"127.0.0.1")],
            }
            await OllamaApi(front)(scope, receive, send)
            assert front.forwarder.budget.held_bytes == 0
            await front.stop()
            return engine

    engine = asyncio.run(asyncio.wait_for(serve(), DEADLINE_S))
    status = next(each["status"] for each in sent if "status" in each)
    return status, b"".join(each.get("body", b"") for each in sent), engine


@pytest.mark.parametrize("count", [1, 3_000_000])
def test_large_chat_is_translated_like_a_small_one(in_loop: list[int], count: int) -> None:
    message = {"role": "user", "content": "é", "images": ["iVBOR" + "A" * count]}
    body = json.dumps({"model": "m:latest", "messages": [message], "stream": False}).encode()
    answer = b'{"choices":[{"message":{"content":"hello"}}]}'
    status, said, engine = asked(Call.CHAT, body, answer)
    assert (status, json.loads(said)["message"]["content"]) == (200, "hello")
    assert (engine.path, engine.asked) == to_openai(read(Call.CHAT, body), "m", "vllm")
    assert max(in_loop) <= HERE_BYTES


@pytest.mark.parametrize(
    ("body", "status"),
    [
        pytest.param(
            b'{"model":"m","messages":[' + b'{"role":"u"},' * 190_000 + b'{"role":"u"}]}',
            413,
            id="messages",
        ),
        pytest.param(b'{"model":"m","messages":[' + b'"",' * 100_000 + b'""]}', 400, id="no chat"),
        pytest.param(b'{"messages":"' + b"x" * 100_000 + b'"}', 400, id="no model"),
        pytest.param(b'{"model":"none","x":"' + b"x" * 100_000 + b'"}', 404, id="unknown"),
        pytest.param(b"{" * 1_100_000, 400, id="no JSON"),
    ],
)
def test_large_invalid_request_is_refused_outside_the_loop(
    in_loop: list[int], body: bytes, status: int
) -> None:
    told, said, engine = asked(Call.CHAT, body)
    assert told == status, said
    assert json.loads(said)["error"]
    assert not engine.asked
    assert not in_loop


def test_millions_of_tools_are_forwarded_unchanged() -> None:
    body = b'{"model":"m","messages":[{"role":"u"}],"tools":[' + b"1," * 2_000_000 + b"1]}"
    _, _, engine = asked(Call.CHAT, body)
    assert b'"tools":[1,1,1' in engine.asked


@pytest.mark.parametrize("count", [1, 2_000])
def test_large_embeddings_are_translated_like_small_ones(in_loop: list[int], count: int) -> None:
    vector = b"[" + b",".join([b"0.25"] * 500) + b"]"
    one = b'{"embedding":' + vector + b',"index":%d}'
    data = b'{"data":[' + b",".join(one % n for n in range(count)) + b"]}"
    pieces = [data[n : n + 65_536] for n in range(0, len(data), 65_536)]
    status, said, _ = asked(Call.EMBED, b'{"model":"m","input":"x"}', *pieces)
    assert status == 200
    assert b'"embeddings":[' + b",".join([vector] * count) + b"]" in said
    assert max(in_loop) <= HERE_BYTES


def test_large_invalid_response_is_502(in_loop: list[int]) -> None:
    data = b'{"data":[' + b'{"embedding":[]},' * 1_000_000 + b"1]}"
    pieces = [data[n : n + 65_536] for n in range(0, len(data), 65_536)]
    status, said, _ = asked(Call.EMBED, b'{"model":"m","input":"x"}', *pieces)
    assert status == 502
    assert "objects and lists" in json.loads(said)["error"]
    assert max(in_loop) <= HERE_BYTES


@pytest.mark.parametrize(
    "events",
    [
        b"\n" * 1_000_000,
        b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n' * 10_000,
    ],
)
def test_stream_is_translated_in_small_parts(in_loop: list[int], events: bytes) -> None:
    whole = events + b"data: [DONE]\n\n"
    status, said, _ = asked(Call.CHAT, b'{"model":"m","messages":[{"role":"u"}]}', whole)
    assert status == 200
    assert json.loads(said.splitlines()[-1])["done"]
    assert said.count(b'"x"') == events.count(b'"x"')
    assert max(in_loop) <= HERE_BYTES


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"choices":[' + b"{}," * 100_000 + b"{}]}\n",
        b'data: {"choices":[{"logprobs":{"content":[' + b"1," * 100_000 + b"1]}}]}\n",
        b'data: {"choices":"' + b"x" * (ollama_answer.EVENT_BYTES + HERE_BYTES) + b'"}\n',
    ],
)
def test_oversized_stream_event_ends_the_stream(event: bytes) -> None:
    _, said, _ = asked(Call.CHAT, b'{"model":"m","messages":[{"role":"u"}]}', event)
    assert "an event of its stream is too large" in json.loads(said)["error"]
