"""Prompts computed by a prefill pool and decoded by the model's engines, and what happens without.

The fake engines refuse parts that vLLM's connectors would not take, and count them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from running import Controller, Engine, Program, fake_launch, start
from waiting import DEADLINE_S, wait_until

MIB = 1 << 20
CHAT = {"messages": [{"role": "user", "content": "hello"}]}


def config_of(pair: Pair, pool: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    """The decode engines are the model `m`, the prefill engines the model `p`."""
    models = [
        {"name": "m", "engine": "vllm", "url": pair.decode.url, "prefill": "p"},
        {"name": "p", "engine": "vllm", "url": pair.prefill.url, **(pool or {})},
    ]
    return {"models": models, "sleep": {"min_sleep": 0}, **sections}


class Pair(NamedTuple):
    prefill: Engine
    decode: Engine

    def reset(self) -> None:
        self.prefill.reset()
        self.decode.reset()

    def ask_fails(self) -> None:
        """Neither engine was asked for anything wrong."""
        assert self.prefill.count("bad_transfers") == self.decode.count("bad_transfers") == 0


@pytest.fixture(scope="module")
def engines() -> Iterator[Pair]:
    with Engine("vllm", "p") as prefill, Engine("vllm", "m") as decode:
        yield Pair(prefill, decode)


@pytest.fixture(scope="module")
def controller(engines: Pair) -> Iterator[Controller]:
    with Controller(config_of(engines)) as controller:
        yield controller


@pytest.fixture
def front(controller: Controller, pair: Pair) -> Controller:
    """Both models are awake."""
    assert controller.post("/action/wakeup/p").json()["success"]
    assert controller.state("p") == "awake"
    return controller


@pytest.fixture
def pair(engines: Pair) -> Iterator[Pair]:
    engines.reset()
    yield engines
    engines.ask_fails()


def fallbacks(front: Controller) -> dict[str, int]:
    found: dict[str, int] = front.get("/models").json()["models"]["m"]["prefill_fallbacks"]
    return found


def new_fallbacks(front: Controller, do: Callable[[], object]) -> dict[str, int]:
    """What `do` adds to the counts."""
    before = fallbacks(front)
    do()
    return {
        reason: count - before.get(reason, 0)
        for reason, count in fallbacks(front).items()
        if count != before.get(reason, 0)
    }


def ticket_of(engine: Engine) -> Any:
    return json.loads(engine.state()["body"])["kv_transfer_params"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello", "n": 2, "min_tokens": 2}),
        ("/v1/chat/completions", CHAT | {"max_completion_tokens": 6}),
        ("/v1/messages", CHAT),
    ],
)
def test_ticket_travels_from_prefill_to_decode(
    front: Controller, pair: Pair, path: str, body: dict[str, Any]
) -> None:
    body = {"model": "m", "max_tokens": 5, "stream_options": {"include_usage": True}, **body}
    direct = httpx.post(pair.decode.url + path, json={**body, "stream": True}).content
    pair.reset()
    assert front.post(path, {**body, "stream": True}).content == direct
    (ticket,) = pair.prefill.state()["tickets"]
    assert pair.decode.state()["used"] == [ticket]
    asked = json.loads(pair.decode.state()["body"])
    assert asked == {**body, "stream": True, "kv_transfer_params": ticket}
    assert json.loads(pair.prefill.state()["body"])["model"] == "p"


def test_ollama_requests_use_the_pool(front: Controller, pair: Pair) -> None:
    answer = front.post("/api/chat", {"model": "m", "stream": False, **CHAT})
    assert answer.status_code == 200
    assert pair.decode.state()["used"] == pair.prefill.state()["tickets"] != []


def test_both_parts_carry_the_request_id(front: Controller, pair: Pair) -> None:
    body = {"model": "m", "prompt": "x"}
    front.post("/v1/completions", body, headers={"x-request-id": "one"})
    for engine in pair:
        assert ["x-request-id", "one"] in [[k.lower(), v] for k, v in engine.state()["headers"]]


@pytest.mark.slow
def test_large_body_goes_to_both_engines(front: Controller, pair: Pair) -> None:
    body = json.dumps({"model": "m", "prompt": "x" * (3 * MIB), "max_tokens": 2})
    answer = front.client.post("/v1/completions", content=body + " " * MIB)
    assert answer.status_code == 200
    assert pair.decode.state()["used"] == pair.prefill.state()["tickets"] != []
    assert len(json.loads(pair.decode.state()["body"])["prompt"]) == 3 * MIB
    assert re.search(r"^kvelastic_buffered_bytes 0", front.get("/metrics").text, re.M)


@pytest.mark.parametrize(
    ("fake", "reason"),
    [
        ({"status": 500}, "status_500"),
        ({"status": 400}, "status_400"),
        ({"reset": True}, "engine_failed"),
        ({"ticket": False}, "no_ticket"),
    ],
)
def test_failed_prefill_leaves_the_prompt_to_decode(
    front: Controller, pair: Pair, fake: dict[str, Any], reason: str
) -> None:
    pair.prefill.change(fake=fake)

    def ask() -> None:
        assert front.complete().status_code == 200
        assert ticket_of(pair.decode) is None

    assert new_fallbacks(front, ask) == {reason: 1}
    line = json.loads(front.wait_for_line(f'"prefill_fallback": "{reason}"'))
    assert (line["model"], line["status"]) == ("m", 200)


REST_FOR_EVER = """
import kvelastic.controller.__main__ as main
from kvelastic.controller.routing import engine_request
engine_request.UNREACHABLE_REST_S = 1e9
main.main()
"""


def test_hanging_prefill_engine_is_not_awaited_again(pair: Pair, tmp_path: Path) -> None:
    pair.prefill.change(fake={"hang": "first"})
    config = config_of(pair, {"timeouts": {"idle": "100ms"}}, server={"port": 0})
    path = tmp_path / "controller.yaml"
    path.write_text(json.dumps(config))
    command = [sys.executable, "-c", REST_FOR_EVER, "--config", str(path)]
    with Program(start(*command, environment=os.environ)) as program:
        line = json.loads(program.wait_for_line("listening on"))
        url = f"http://127.0.0.1:{line['message'].rsplit(' ', 1)[1]}"
        for reason in ("engine_timeout", "paused", "paused"):
            body = {"model": "m", "prompt": "x"}
            answer = httpx.post(url + "/v1/completions", json=body, timeout=DEADLINE_S)
            assert answer.status_code == 200
            assert ticket_of(pair.decode) is None
            program.wait_for_line(f'"prefill_fallback": "{reason}"')
    assert pair.prefill.count("requests") == pair.prefill.count("cancelled") == 1


def test_ended_prefill_engine_is_not_missed(pair: Pair) -> None:
    with Engine("vllm", "p") as prefill, Controller(config_of(Pair(prefill, pair.decode))) as front:
        assert front.complete().status_code == 200
        assert pair.decode.state()["used"] == prefill.state()["tickets"] != []
        prefill.end(signal.SIGKILL)
        assert new_fallbacks(front, front.complete) == {"engine_unreachable": 1}
        assert new_fallbacks(front, front.complete) == {"down": 1}
        assert ticket_of(pair.decode) is None


def test_ticket_goes_to_the_engine_that_accepts(pair: Pair) -> None:
    with Engine("vllm", "m") as dead:
        config = config_of(pair)
        urls = [dead.url, pair.decode.url]
        config["models"][0] = {"name": "m", "engine": "vllm", "urls": urls, "prefill": "p"}
        with Controller(config) as front:
            dead.end(signal.SIGKILL)
            assert {front.complete().status_code for _ in range(3)} == {200}
            assert fallbacks(front) == {}
    assert pair.decode.state()["used"] == pair.prefill.state()["tickets"]
    assert len(pair.decode.state()["used"]) == 3


def test_pool_serves_alone_without_decode_engine(pair: Pair) -> None:
    with Engine("vllm", "m") as decode, Controller(config_of(Pair(pair.prefill, decode))) as front:
        decode.end(signal.SIGKILL)
        theirs = {"do_remote_prefill": True, "id": "theirs"}
        for _ in range(2):

            def ask() -> None:
                answer = front.complete(max_tokens=3, kv_transfer_params=theirs)
                assert answer.json()["usage"]["completion_tokens"] == 3

            assert new_fallbacks(front, ask) == {"decode_engine_unreachable": 1}
            body = json.loads(pair.prefill.state()["body"])
            assert (body["model"], body["kv_transfer_params"]) == ("p", None)
        assert len(pair.prefill.state()["tickets"]) == 1, "no engine would use another"


def test_sleeping_model_that_may_not_wake_is_replaced(front: Controller, pair: Pair) -> None:
    with front.reloaded(config_of(pair, sleep={"wake_on_request": False})):
        assert front.post("/action/sleep/m").json()["success"]
        assert new_fallbacks(front, front.complete) == {"decode_model_asleep": 1}
        assert front.post("/action/sleep/p").json()["success"]
        assert front.complete().json()["error"]["code"] == "model_asleep"
        assert front.post("/action/wakeup/m").json()["success"]
    assert pair.decode.count("requests") == 0


def test_failed_decode_is_not_sent_to_another_engine(front: Controller, pair: Pair) -> None:
    pair.decode.change(fake={"reset": True})
    assert front.complete().json()["error"]["code"] == "engine_failed"
    assert (pair.prefill.count("requests"), pair.decode.count("requests")) == (1, 1)


def test_sleeping_pool_wakes_while_decode_serves(front: Controller, pair: Pair) -> None:
    assert front.post("/action/sleep/p").json()["success"]
    pair.prefill.change(wake_hold="wake")
    assert new_fallbacks(front, front.complete) == {"waking": 1}
    assert ticket_of(pair.decode) is None
    pair.prefill.release("wake")
    wait_until(lambda: front.state("p") == "awake")
    assert new_fallbacks(front, front.complete) == {}
    assert pair.decode.state()["used"] == pair.prefill.state()["tickets"] != []


def test_pool_that_requests_may_not_wake_sleeps_on(front: Controller, pair: Pair) -> None:
    assert front.post("/action/sleep/p").json()["success"]
    with front.reloaded(config_of(pair, sleep={"wake_on_request": False})):
        assert new_fallbacks(front, front.complete) == {"asleep": 1}
        assert front.state("p") == "asleep"
    assert pair.prefill.count("requests") == 0


def test_pool_on_demand_is_started_by_a_request(pair: Pair, tmp_path: Path) -> None:
    """Its engine has a key of its own, which the prefill part carries."""
    config = config_of(pair)
    launch = fake_launch(tmp_path, "--model=p", on_demand=True)
    config["models"][1] = {"name": "p", "engine": "vllm", "launch": launch}
    with Controller(config) as front:
        wait_until(lambda: front.state("p") == "asleep")
        assert new_fallbacks(front, front.complete) == {"waking": 1}
        wait_until(lambda: front.state("p") == "awake")
        assert new_fallbacks(front, front.complete) == {}
    assert len(pair.decode.state()["used"]) == 1


def test_requests_wait_for_a_place_in_the_pool(front: Controller, pair: Pair) -> None:
    pair.prefill.change(fake={"hold": "prompt"})
    with (
        front.reloaded(config_of(pair, {"max_in_flight": 1})),
        socket.create_connection(("127.0.0.1", front.port)) as one,
        socket.create_connection(("127.0.0.1", front.port)) as two,
    ):
        for client in (one, two):
            client.sendall(completion())
        wait_until(lambda: front.get("/models").json()["models"]["p"]["queued"] == 1)
        assert pair.prefill.state()["in_flight"] == 1
        pair.prefill.release("prompt")
        for client in (one, two):
            client.settimeout(DEADLINE_S)
            assert client.recv(100).startswith(b"HTTP/1.1 200")
    assert len(pair.decode.state()["used"]) == 2


def test_queued_prompt_does_not_wait_for_sleeping_pool(pair: Pair) -> None:
    with Engine("vllm", "x") as other:
        groups = [{"name": "g", "models": ["p", "x"], "at_once": 1}]
        config = config_of(pair, {"max_in_flight": 1}, groups=groups, swap={"min_awake": 0})
        config["models"].append({"name": "x", "engine": "vllm", "url": other.url})
        with Controller(config) as front, ThreadPoolExecutor(3) as threads:
            assert front.post("/action/sleep/x").json()["success"]
            pair.prefill.change(fake={"hold": "prompt"})
            asked = [threads.submit(front.complete) for _ in range(2)]
            wait_until(lambda: front.get("/models").json()["models"]["p"]["queued"] == 1)
            asked.append(threads.submit(front.complete, "x"))
            wait_until(lambda: fallbacks(front) == {"paused": 1})
            pair.prefill.release("prompt")
            assert [each.result().status_code for each in asked] == [200] * 3
            assert (front.state("p"), front.state("x")) == ("asleep", "awake")
    assert len(pair.decode.state()["used"]) == 1


def completion() -> bytes:
    body = json.dumps({"model": "m", "prompt": "x"}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


def test_client_disconnect_ends_the_prefill_part(front: Controller, pair: Pair) -> None:
    pair.prefill.change(fake={"hang": "first"})
    with socket.create_connection(("127.0.0.1", front.port)) as client:
        client.sendall(completion())
        wait_until(lambda: pair.prefill.state()["in_flight"] == 1)
    wait_until(lambda: pair.prefill.count("cancelled") == 1)
    wait_until(lambda: front.get("/models").json()["models"]["p"]["in_flight"] == 0)
    assert pair.decode.count("requests") == 0


def test_clients_do_not_choose_where_blocks_come_from(front: Controller, pair: Pair) -> None:
    theirs = {"do_remote_prefill": True, "do_remote_decode": False, "id": "theirs"}
    front.complete(kv_transfer_params=theirs)
    assert pair.decode.state()["used"] == pair.prefill.state()["tickets"] != []
    pair.prefill.change(fake={"status": 500})
    front.complete(kv_transfer_params=theirs)
    assert ticket_of(pair.decode) is None


@pytest.mark.parametrize("prompts", [["a", "b"], [[1, 2], [3]]])
def test_several_prompts_are_left_to_decode(
    front: Controller, pair: Pair, prompts: list[Any]
) -> None:
    assert new_fallbacks(front, lambda: front.complete(prompt=prompts)) == {"several_prompts": 1}
    assert new_fallbacks(front, lambda: front.complete(prompt=[1, 2])) == {}
    assert len(pair.prefill.state()["tickets"]) == 1


def test_chat_has_one_prompt(front: Controller, pair: Pair) -> None:
    """Whatever its unknown field `prompt` has, which engines ignore."""
    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}], "prompt": ["a", "b"]}
    assert new_fallbacks(front, lambda: front.post("/v1/chat/completions", chat)) == {}
    assert len(pair.prefill.state()["tickets"]) == 1


def test_other_requests_do_not_reach_the_pool(front: Controller, pair: Pair) -> None:
    body = {"model": "m", "input": "x"}
    for path in ("/v1/embeddings", "/v1/responses", "/upstream/m/v1/completions"):
        assert front.post(path, body).status_code == 200, path
        assert "kv_transfer_params" not in json.loads(pair.decode.state()["body"])
    assert pair.prefill.count("requests") == 0


def test_metrics_show_both_parts(front: Controller, pair: Pair) -> None:
    def value(name: str) -> float:
        found = re.search(rf"^kvelastic_{re.escape(name)} (\S+)", front.get("/metrics").text, re.M)
        return float(found[1]) if found else 0.0

    names = [
        'requests_total{model="p",outcome="ok"}',
        'request_seconds_count{model="p"}',
        'requests_total{model="m",outcome="ok"}',
    ]
    failed = 'requests_total{model="p",outcome="engine_error"}'
    fallback = 'prefill_fallbacks_total{model="m",reason="status_500"}'
    before = [value(name) for name in (*names, failed, fallback)]
    front.complete()
    after = [value(name) for name in (*names, failed, fallback)]
    assert [a - b for a, b in zip(after, before, strict=True)] == [1, 1, 1, 0, 0]
    pair.prefill.change(fake={"status": 500})
    front.complete()
    last = [value(name) for name in (*names, failed, fallback)]
    assert [a - b for a, b in zip(last, after, strict=True)] == [0, 1, 1, 1, 1]


def test_pool_can_be_added_and_removed(front: Controller, pair: Pair) -> None:
    config = config_of(pair)
    del config["models"][0]["prefill"]
    with front.reloaded(config):
        front.complete()
        assert "kv_transfer_params" not in json.loads(pair.decode.state()["body"])
    front.complete()
    assert pair.decode.state()["used"] == pair.prefill.state()["tickets"] != []
