"""Ollama's API, spoken by its official Python client, over the controller and a fake engine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ollama
import pytest
from ports import free_port
from running import FAKES, Controller, Engine, config_for
from waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.slow


HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def engine_of_all() -> Iterator[Engine]:
    with Engine("vllm", "m") as engine:
        yield engine


@pytest.fixture(scope="module")
def front(engine_of_all: Engine) -> Iterator[Controller]:
    config = config_for(engine_of_all, model={"aliases": ["short"], "ttl": "1h"})
    with Controller(config) as front:
        yield front


@pytest.fixture(scope="module")
def client(front: Controller) -> Iterator[ollama.Client]:
    client = ollama.Client(front.url, timeout=DEADLINE_S)
    yield client
    client._client.close()


def test_chat_with_and_without_streaming(engine: Engine, client: ollama.Client) -> None:
    answer = client.chat("short", HELLO, options={"num_predict": 3, "num_ctx": 4096})
    assert answer.message.content == "x x x "
    assert (answer.model, answer.done, answer.done_reason) == ("short", True, "stop")
    assert (answer.prompt_eval_count, answer.eval_count) == (1, 3)
    assert answer.total_duration
    body = json.loads(engine.state()["body"])
    assert (body["model"], body["messages"], body["max_tokens"]) == ("m", HELLO, 3)
    parts = list(client.chat("m", HELLO, stream=True, options={"num_predict": 3}))
    assert [part.message.content for part in parts] == ["t0 ", "t1 ", "t2 ", ""]
    assert [part.done for part in parts] == [False, False, False, True]
    assert parts[-1].eval_count == 3


def test_keep_alive_0_ignores_replaced_models(engine: Engine) -> None:
    """A reload gives the engine to a new model while a request of the old one runs."""
    engine.change(fake={"hold": "h"})
    config = config_for(engine, model={"url": None, "urls": [engine.url, "http://127.0.0.1:1"]})
    body = {"model": "m", "prompt": "x", "keep_alive": 0, "stream": False}
    with Controller(config_for(engine)) as front, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(front.post, "/api/generate", body)
        wait_until(lambda: engine.state()["in_flight"] == 1)
        front.write(config)
        assert front.client.post("/admin/reload").json()["changed"] == ["m"]
        engine.change(fake={})
        engine.release("h")
        assert asked.result().status_code == 200
        assert front.complete().status_code == 200
    assert engine.count("sleep_calls") == 0


@pytest.mark.parametrize("count", [100_000, 3_000_000])
def test_a_large_chat(engine: Engine, client: ollama.Client, count: int) -> None:
    """In memory, and in a file on its way to the engine."""
    messages = [{"role": "user", "content": "x" * count}]
    assert client.chat("m", messages).done
    assert [part.done for part in client.chat("m", messages, stream=True)][-1]


def test_generate(engine: Engine, client: ollama.Client) -> None:
    assert client.generate("m", "hello", system="s").response == "x x x x "
    assert engine.state()["path"] == "/v1/chat/completions"
    parts = client.generate("m", "hello", raw=True, stream=True)
    assert "".join(part.response or "" for part in parts) == "t0 t1 t2 t3 "
    assert engine.state()["path"] == "/v1/completions"


def test_tools(engine: Engine, client: ollama.Client) -> None:
    def add(a: int, b: int) -> int:
        """Add.

        Args:
            a: one
            b: the other
        """
        return a + b

    call = {"index": 0, "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    message = {"content": None, "tool_calls": [call]}
    deltas = [{"tool_calls": [call]}]
    fake = {"deltas": deltas, "finish_reason": "tool_calls", "message": message}
    engine.change(fake=fake)
    answers = [client.chat("m", HELLO, tools=[add])]
    answers += list(client.chat("m", HELLO, tools=[add], stream=True))[-1:]
    for answer in answers:
        (made,) = answer.message.tool_calls or ()
        assert (made.function.name, made.function.arguments) == ("add", {"a": 1, "b": 2})
    assert json.loads(engine.state()["body"])["tools"][0]["function"]["name"] == "add"
    engine.change(fake={})
    conversation: list[Any] = [*HELLO, answers[0].message, {"role": "tool", "content": "3"}]
    assert client.chat("m", conversation).message.content
    *_, made_before, result = json.loads(engine.state()["body"])["messages"]
    assert made_before["tool_calls"][0]["id"] == result["tool_call_id"]


def test_embeddings(engine: Engine, client: ollama.Client) -> None:
    assert client.embed("m", ["a", "b"]).embeddings == [[0.0, 0.5], [1.0, 0.5]]
    assert client.embed("m", "a").prompt_eval_count == 1
    assert client.embeddings("m", "a").embedding == [0.0, 0.5]


def test_list_ps_and_keep_alive_times(
    engine: Engine, front: Controller, client: ollama.Client
) -> None:
    (model,) = client.list().models
    assert model.model == "m"
    client.chat("m", HELLO, keep_alive="10m")
    (awake,) = client.ps().models
    assert awake.name == "m"
    assert awake.expires_at is not None
    assert model.modified_at is not None
    assert 500 < (awake.expires_at - model.modified_at).total_seconds() < 1000
    client.chat("m", HELLO, keep_alive=-1)
    (awake,) = client.ps().models
    assert awake.expires_at
    assert awake.expires_at.year == 2318
    assert front.get("/models").json()["models"]["m"]["ttl_seconds"] is None
    client.chat("m", HELLO)
    assert front.get("/models").json()["models"]["m"]["ttl_seconds"] == 3600
    assert client.show("m:latest").capabilities == ["completion", "tools"]
    assert front.get("/api/version").json().keys() == {"version"}
    assert front.client.head("/").status_code == 200
    assert front.client.head("/api/tags").status_code == 200


def test_keep_alive_and_empty_requests_load_and_unload(
    engine: Engine, front: Controller, client: ollama.Client
) -> None:
    client.chat("m", HELLO, keep_alive=0)
    wait_until(lambda: front.state() == "asleep")
    assert not client.ps().models
    assert client.generate("m").done_reason == "load"
    assert front.state() == "awake"
    assert client.chat("m", keep_alive=0).done_reason == "unload"
    assert front.state() == "asleep"
    assert client.chat("m", HELLO).message.content  # and does not wait for min_sleep
    engine.change(fake={"hold": "h"})
    with ThreadPoolExecutor(1) as threads:
        held = threads.submit(client.chat, "m", HELLO)
        wait_until(lambda: engine.state()["in_flight"] == 1)
        assert client.generate("m", keep_alive=0).done_reason == "unload"
        assert front.state() == "awake"  # somebody uses it
        engine.release("h")
        assert held.result().message.content
    assert engine.count("slept_while_busy") == engine.count("requests_while_asleep") == 0


@pytest.mark.parametrize(
    "more",
    [{"sleep": {"wake_on_request": False}}, {"model": {"pin": True}}],
    ids=["for good", "pin"],
)
def test_keep_alive_0_does_not_sleep_protected_models(engine: Engine, more: dict[str, Any]) -> None:
    with Controller(config_for(engine, **more)) as front:
        body = {"model": "m", "messages": HELLO, "stream": False, "keep_alive": 0}
        assert front.post("/api/chat", body).status_code == 200
        assert front.post("/api/generate", {"model": "m", "keep_alive": 0}).status_code == 200
        assert front.state() == "awake"
        assert engine.count("sleep_calls") == 0


def test_errors_have_ollama_format(
    engine: Engine, front: Controller, client: ollama.Client
) -> None:
    for status, call in (
        (404, lambda: client.chat("nobody", HELLO)),
        (404, lambda: client.pull("m")),
        (404, lambda: client.show("nobody")),
        (400, lambda: client.chat("m", HELLO, keep_alive="soon")),
    ):
        with pytest.raises(ollama.ResponseError) as caught:
            call()
        assert caught.value.status_code == status
        assert caught.value.error
    for method, path, body, status in (
        ("GET", "/api/chat", b"", 405),
        ("POST", "/api/tags", b"", 405),
        ("POST", "/api/show", b"[]", 400),
        ("POST", "/api/show", b"{}", 404),
        ("POST", "/api/chat", b"{", 400),
        ("POST", "/api/chat", b'{"model": "m", "format": "yaml"}', 400),
        ("POST", "/api/chat", b"x" * (17 << 20), 413),
        ("POST", "/api/nothing", b"", 404),
        ("DELETE", "/api/delete", b"", 404),
    ):
        response = front.client.request(method, path, content=body)
        assert response.status_code == status, (method, path)
        assert response.json().keys() == {"error"}, (method, path)
    engine.change(fake={"status": 429})
    with pytest.raises(ollama.ResponseError, match="as asked") as caught:
        client.chat("m", HELLO)
    assert caught.value.status_code == 429
    with pytest.raises(ollama.ResponseError, match="as asked"):
        list(client.chat("m", HELLO, stream=True))
    engine.change(fake={"cut_after": 2})
    with pytest.raises(ollama.ResponseError, match="broke off"):
        list(client.chat("m", HELLO, stream=True))
    engine.change(fake={"reset": True})
    with pytest.raises(ollama.ResponseError, match="broke off"):
        client.chat("m", HELLO)


def test_client_disconnect_cancels_its_request(engine: Engine, front: Controller) -> None:
    engine.change(fake={"hold": "h"})
    body = {"model": "m", "messages": HELLO}
    with front.client.stream("POST", "/api/chat", json=body) as response:
        assert response.headers["content-type"] == "application/x-ndjson"
        next(response.iter_raw())
    wait_until(lambda: engine.count("cancelled") == 1)
    line = front.wait_for_line('"path": "/api/chat", "model": "m"')
    assert json.loads(line)["kind"] == "request"


def test_keys_and_origins_are_checked(engine: Engine) -> None:
    with Controller(config_for(engine, auth={"api_keys": ["k"]})) as front:
        for path in ("/api/tags", "/api/ps"):
            assert front.get(path).status_code == 401
        body = {"model": "m", "messages": HELLO, "stream": False}
        refused = front.post("/api/chat", body)
        assert (refused.status_code, refused.json().keys()) == (401, {"error"})
        with_key = ollama.Client(
            front.url, timeout=DEADLINE_S, headers={"Authorization": "Bearer k"}
        )
        assert with_key.chat("m", HELLO).message.content
        assert len(with_key.list().models) == 1
        with_key._client.close()
    with Controller(config_for(engine)) as front:
        foreign = {"Origin": "http://evil.example"}
        assert front.post("/api/chat", body, headers=foreign).status_code == 403
        assert front.get("/api/tags", headers={"Host": "evil.example"}).status_code == 403


def test_request_after_expired_keep_alive_ignores_min_sleep(
    engine: Engine,
) -> None:
    sleep = {"min_sleep": "1h", "queue_timeout": "1m", "check_every": "20ms"}
    with Controller(config_for(engine, sleep=sleep)) as front:
        body = {"model": "m", "messages": HELLO, "stream": False}
        assert front.post("/api/chat", {**body, "keep_alive": 0.05}).status_code == 200
        wait_until(lambda: front.state() == "asleep")
        assert front.post("/api/chat", body).status_code == 200
        assert engine.count("wake_calls") == 1


def test_capabilities_come_from_the_configuration(engine: Engine) -> None:
    config = config_for(engine, model={"capabilities": ["embedding"]})
    with Controller(config) as front:
        shown = front.post("/api/show", {"model": "m"}).json()
        assert shown["capabilities"] == ["embedding"]


def test_request_starts_engine_and_keep_alive_stops_it(tmp_path: Path) -> None:
    """As with Ollama itself: a request loads a model, and it leaves by time."""
    launch: dict[str, Any] = {
        "command": [sys.executable, str(FAKES / "engine.py"), "--kind=openai", "--port={port}"],
        "port": free_port(),
        "on_demand": True,
        "log_file": str(tmp_path / "log"),
    }
    config = {"models": [{"name": "m", "launch": launch}], "sleep": {"check_every": "20ms"}}
    with Controller(config) as front:
        client = ollama.Client(front.url, timeout=DEADLINE_S)
        assert client.chat("m", HELLO, keep_alive=0.05).message.content
        wait_until(lambda: front.state() == "asleep")
        assert not client.ps().models
        client._client.close()
        assert front.end() == 0
