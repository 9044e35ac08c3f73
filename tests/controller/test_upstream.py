"""/upstream/{model}/...: what reaches a model's engine as it is, and what does not."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from running import Controller, Engine, config_for
from test_swap import on_demand
from waiting import wait_until

NAME = "org/m"


@pytest.fixture(scope="module")
def engine_of_all() -> Iterator[Engine]:
    with Engine("vllm", NAME) as engine:
        yield engine


@pytest.fixture(scope="module")
def front(engine_of_all: Engine) -> Iterator[Controller]:
    config = config_for(engine_of_all, model={"aliases": ["short"]})
    with Controller(config) as front:
        yield front


def raw(front: Controller, target: str, method: str = "GET", headers: str = "") -> int:
    """The status of a request whose target no client library has straightened."""
    with socket.create_connection(("127.0.0.1", front.port)) as sock:
        head = f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}"
        sock.sendall(f"{head}Content-Length: 0\r\n\r\n".encode())
        return int(sock.makefile("rb").readline().split()[1])


@pytest.mark.parametrize("name", ["org/m", "org%2Fm", "short"])
def test_request_reaches_the_engine_unchanged(engine: Engine, front: Controller, name: str) -> None:
    """The body is no JSON, names no model, and is not looked at."""
    answer = front.client.post(
        f"/upstream/{name}/any%20thing?model=other&x=%2F",
        content=b'{"model": "other", broken',
        headers={"X-Own": "1", "Connection": "close, X-Hop", "X-Hop": "1", "Accept": "a/b"},
    )
    assert answer.status_code == 200
    assert answer.json() == {
        "method": "POST",
        "path": "/any%20thing?model=other&x=%2F",
        "body": '{"model": "other", broken',
    }
    assert answer.headers["x-engine"] == "fake"
    assert answer.headers["content-security-policy"] == "sandbox"
    seen = {key.lower(): value for key, value in engine.state()["headers"]}
    assert (seen["x-own"], seen["accept"], seen["host"]) == ("1", "a/b", engine.url[7:])
    assert "x-hop" not in seen
    assert front.get(f"/upstream/{name}").json()["path"] == "/"


def test_request_wakes_the_model_and_streams(engine: Engine, front: Controller) -> None:
    assert front.post("/action/sleep/org/m").json()["success"]
    body = {"model": NAME, "stream": True, "fake": {"hold": "h"}}
    path = "/upstream/org/m/v1/completions"
    with front.client.stream("POST", path, json=body) as response:
        pieces = response.iter_raw()
        assert b"t0 " in next(pieces)
        facts = front.get("/models").json()["models"][NAME]
        assert (facts["state"], facts["in_flight"]) == ("awake", 1)
        assert front.post("/action/sleep/org/m").status_code == 409
        engine.release("h")
        assert b"[DONE]" in b"".join(pieces)
    assert engine.count("wake_calls") == 1


def test_client_disconnect_cancels_the_request(engine: Engine, front: Controller) -> None:
    body = {"model": NAME, "stream": True, "fake": {"hold": "h"}}
    path = "/upstream/org/m/v1/completions"
    with front.client.stream("POST", path, json=body) as response:
        next(response.iter_raw())
    wait_until(lambda: engine.count("cancelled") == 1)
    line = json.loads(front.wait_for_line(f'"path": "{path}"'))
    assert (line["kind"], line["model"]) == ("request", NAME)


@pytest.mark.slow
def test_request_starts_an_on_demand_engine(tmp_path: Path) -> None:
    (model,) = on_demand(tmp_path, "a")
    del model["instance"]
    model["launch"]["command"].remove("--instance")
    with Controller({"models": [model]}) as front:
        assert front.get("/upstream/a/v1/models").json()["data"] == [{"id": "a"}]
        assert front.state("a") == "awake"
        assert front.end() == 0


@pytest.mark.parametrize(
    "rest",
    [
        "../sleep",
        "v1/../sleep",
        "v1/%2e%2e/sleep",
        "v1/responses/..%2f..%2fsleep",
        "v1/responses/%252e%252e/sleep",
        "/sleep",
        "v1//completions",
        "v1%2Fcompletions",
        "v1\\completions",
        "v1/responses/%5c..%5csleep",
        ".",
    ],
)
def test_ambiguous_path_is_refused(engine: Engine, front: Controller, rest: str) -> None:
    for name in (NAME, "short"):
        assert raw(front, f"/upstream/{name}/{rest}", "POST") == 400
    assert engine.count("echoed") == engine.count("sleep_calls") == 0


def test_unknown_model_is_404(engine: Engine, front: Controller) -> None:
    for path in ("/upstream/", "/upstream/nobody/v1/models", "/upstream/org", "/upstream/org/mm/x"):
        answer = front.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert raw(front, "/upstream/" + "a/" * 30_000, "GET") in {404, 431}
    assert raw(front, "/upstream/../org/m/health") == 404
    for method in ("OPTIONS", "TRACE", "CONNECT"):
        assert raw(front, "/upstream/short/health", method) in {400, 404, 405, 426}
    assert engine.count("echoed") == 0


@pytest.mark.slow
def test_longest_matching_model_name_is_used() -> None:
    with (
        Engine("vllm", "org") as one,
        Engine("vllm", "org/m") as two,
        Controller(config_for(one, two)) as front,
    ):
        for path, wanted in (("org/m/x", two), ("org/x", one), ("org/m", two)):
            before = wanted.count("echoed")
            assert front.get(f"/upstream/{path}").status_code == 200
            assert wanted.count("echoed") == before + 1


def test_body_size_limit_applies(engine: Engine) -> None:
    config = config_for(engine, server={"max_body": "1K"})
    with Controller(config) as front:
        answer = front.client.post(f"/upstream/{NAME}/x", content=b"x" * 2000)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


KEYS = {"api_keys": ["user"], "admin_keys": ["admin"]}


@pytest.mark.slow
def test_paths_other_than_inference_need_admin_key(engine: Engine) -> None:
    with Controller(config_for(engine, auth=KEYS)) as front:

        def status(key: str | None, method: str, path: str) -> int:
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            url = f"/upstream/{NAME}{path}"
            return front.client.request(
                method, url, headers=headers, json={"model": NAME}
            ).status_code

        for method, path in (
            ("POST", "/v1/completions"),
            ("GET", "/health"),
            ("GET", "/v1/models"),
        ):
            assert [status(k, method, path) for k in (None, "user", "admin")] == [401, 200, 200]
        for method, path in (
            ("POST", "/sleep?level=1"),
            ("POST", "/wake_up"),
            ("POST", "/reset_prefix_cache"),
            ("POST", "/v1/load_lora_adapter"),
            ("GET", "/flush_cache"),  # of SGLang: it empties the cache
            ("GET", "/slots"),  # of llama.cpp: others' prompts
            ("POST", "/health"),
            ("DELETE", "/v1/models"),
        ):
            assert [status(k, method, path) for k in (None, "user")] == [401, 403], path
        assert engine.count("sleep_calls") == engine.count("echoed") == 0
        assert status("admin", "POST", "/reset_prefix_cache") == 200
        line = json.loads(front.wait_for_line('/reset_prefix_cache", "model": "org/m"'))
        found = [json.loads(x) for x in front.lines if '"audit"' in x and "reset_prefix" in x]
        assert [x["outcome"] for x in found] == ["refused", "refused", "done"], line
        assert found[-1]["action"] == f"POST /upstream/{NAME}/reset_prefix_cache"
        # The controller's keys stay here.
        assert "admin" not in json.dumps(engine.state()["headers"])
        # Who has no key learns no name.
        assert front.get("/upstream/nobody/x").status_code == 401


def test_foreign_origins_are_refused(engine: Engine, front: Controller) -> None:
    for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
        for path in ("/v1/completions", "/sleep?level=1"):
            answer = httpx.post(f"{front.url}/upstream/{NAME}{path}", json={}, headers=headers)
            assert answer.status_code == 403
    assert engine.count("sleep_calls") == engine.count("requests") == 0
