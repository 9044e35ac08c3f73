"""Requests to engines and their answers back, over real sockets to real processes."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import httpx
import pytest
from running import Controller, Engine, config_for
from waiting import DEADLINE_S, wait_until

from kvelastic.controller.models.served_model import ServedModel
from kvelastic.controller.routing.forward import served_by


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("vllm", "org/m") as engine:
        yield engine


@pytest.fixture(scope="module")
def front(engine: Engine) -> Iterator[Controller]:
    config = config_for(engine, model={"aliases": ["short", "a/b"]})
    with Controller(config) as front:
        yield front


@pytest.mark.slow
def test_response_is_passed_through_unchanged(front: Controller, engine: Engine) -> None:
    body = {"model": "org/m", "prompt": "x"}
    headers = {"x-request-id": "one"}
    through = front.post("/v1/completions", body, headers=headers)
    direct = httpx.post(engine.url + "/v1/completions", json=body, headers=headers)
    assert through.status_code == direct.status_code == 200
    assert through.content == direct.content

    def without_date(response: httpx.Response) -> list[tuple[str, str]]:
        return sorted((k, v) for k, v in response.headers.multi_items() if k != "date")

    assert without_date(through) == without_date(direct)
    assert len(through.headers.get_list("date")) == 1


def test_request_body_reaches_the_engine_unchanged(front: Controller, engine: Engine) -> None:
    body = '{ "model":"org/m",  "prompt": "ä\\u00e4", "max_tokens":1}'.encode()
    front.client.post("/v1/completions", content=body)
    assert engine.state()["body"].encode() == body


@pytest.mark.parametrize("status", [400, 404, 422, 429, 500, 503])
def test_engine_errors_reach_the_client(front: Controller, status: int) -> None:
    response = front.complete("org/m", fake={"status": status})
    assert response.status_code == status
    assert response.json()["error"]["message"] == "as asked"
    assert response.headers["retry-after"] == "7"


def test_stream_is_unchanged_and_unbuffered(front: Controller, engine: Engine) -> None:
    body = {"model": "org/m", "stream": True, "max_tokens": 5}
    direct = httpx.post(engine.url + "/v1/chat/completions", json=body).content
    assert front.post("/v1/chat/completions", body).content == direct
    body["fake"] = {"hold": "stream"}
    with front.client.stream("POST", "/v1/chat/completions", json=body) as response:
        pieces = response.iter_raw()
        first = next(pieces)  # the engine holds the second token back until it is told
        assert b"t0" in first
        assert b"t1" not in first
        engine.release("stream")
        assert first + b"".join(pieces) == direct


@pytest.mark.parametrize("stream", [True, False])
def test_client_disconnect_cancels_the_engine_request(
    front: Controller, engine: Engine, stream: bool
) -> None:
    before = engine.count("cancelled")
    fake = {"hang": "stream" if stream else "first"}
    body = json.dumps({"model": "org/m", "stream": stream, "fake": fake}).encode()
    with socket.create_connection(("127.0.0.1", front.port)) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s"
            % (len(body), body)
        )
        wait_until(lambda: engine.state()["in_flight"] == 1)
    wait_until(lambda: engine.count("cancelled") == before + 1)
    wait_until(lambda: front.get("/traffic/stats/short").json()["model_stats"]["in_flight"] == 0)


@pytest.mark.parametrize("is_later", [False, True])
def test_disconnect_of_pipelining_client_cancels_the_request(
    front: Controller, engine: Engine, is_later: bool
) -> None:
    """Its second request comes with the first one, or once that is at the engine."""
    before = engine.count("cancelled")
    body = json.dumps({"model": "org/m", "fake": {"hang": "first"}}).encode()
    one = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (
        len(body),
        body,
    )
    with socket.create_connection(("127.0.0.1", front.port)) as sock:
        sock.sendall(one if is_later else one + one)
        wait_until(lambda: engine.state()["in_flight"] == 1)
        if is_later:
            sock.sendall(one)
    wait_until(lambda: engine.count("cancelled") == before + 1)
    wait_until(lambda: front.get("/traffic/stats/short").json()["model_stats"]["in_flight"] == 0)


def test_truncated_stream_is_a_protocol_error(front: Controller) -> None:
    body = {"model": "org/m", "stream": True, "fake": {"cut_after": 2}}
    with (
        pytest.raises(httpx.RemoteProtocolError),
        front.client.stream("POST", "/v1/completions", json=body) as response,
    ):
        response.read()


def test_engine_connection_reset_is_502(front: Controller) -> None:
    response = front.complete("org/m", fake={"reset": True})
    assert (response.status_code, response.json()["error"]["code"]) == (502, "engine_failed")


def test_engine_idle_timeout_is_504(front: Controller, engine: Engine) -> None:
    with front.reloaded(config_for(engine, model={"timeouts": {"idle": "100ms"}})):
        response = front.complete("org/m", fake={"hang": "first"})
    assert (response.status_code, response.json()["error"]["code"]) == (504, "engine_timeout")
    assert "127.0.0.1" not in response.text


@pytest.mark.parametrize("name", ["short", "a/b"])
def test_alias_is_replaced_by_the_engines_name(
    front: Controller, engine: Engine, name: str
) -> None:
    assert front.complete(name).status_code == 200
    assert json.loads(engine.state()["body"])["model"] == "org/m"


@pytest.mark.parametrize("path", ["org/m", "org%2Fm", "org%2fm", "a/b", "a%2Fb", "short"])
def test_paths_accept_encoded_model_names_and_aliases(front: Controller, path: str) -> None:
    assert front.get(f"/v1/models/{path}").json()["object"] == "model"
    stats = front.get(f"/traffic/stats/{path}").json()["model_stats"]
    assert stats["model_name"] == "org/m"
    health = front.get(f"/health/{path}").json()
    assert list(health["health"].values()) == [True]


def test_other_v1_paths_reach_the_engine(front: Controller) -> None:
    response = front.post("/v1/some/new%20thing?x=1&y=%2F", {"model": "org/m"})
    assert response.json()["path"] == "/v1/some/new%20thing?x=1&y=%2F"
    form = front.client.post(
        "/v1/audio/transcriptions", files={"file": b"\0\1"}, data={"model": "org/m"}
    )
    assert form.json()["path"] == "/v1/audio/transcriptions"
    got = front.get("/v1/responses/resp_1", params={"model": "org/m"})
    assert got.json()["method"] == "GET"
    for path in ("/tokenize", "/detokenize", "/v1/embeddings", "/v1/rerank", "/v1/score"):
        assert front.post(path, {"model": "org/m"}).json()["path"] == path


@pytest.mark.parametrize("path", ["/v1/../sleep", "/v1/%2e%2e/sleep", "/v1//x", "/v1/..%5csleep"])
def test_path_traversal_is_refused(front: Controller, engine: Engine, path: str) -> None:
    before = engine.count("sleep_calls")
    with socket.create_connection(("127.0.0.1", front.port)) as sock:
        body = b'{"model":"org/m"}'
        sock.sendall(
            b"POST %s?level=1 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (path.encode(), len(body), body)
        )
        assert sock.recv(65536).startswith(b"HTTP/1.1 400")
    assert engine.count("sleep_calls") == before


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "model_missing"),
        (b"{}", 400, "model_missing"),
        (b"[]", 400, "invalid_json"),
        (b"{", 400, "invalid_json"),
        (b"[" * 100_000, 400, "invalid_json"),
        (b'{"model": 3}', 400, "invalid_model"),
        (b'{"model": "nobody"}', 404, "model_not_found"),
    ],
)
def test_controller_errors_have_openai_format(
    front: Controller, body: bytes, status: int, code: str
) -> None:
    response = front.client.post("/v1/completions", content=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, code)
    assert set(error) == {"message", "type", "param", "code"}


def test_unknown_models_add_no_traffic_statistics(front: Controller) -> None:
    for number in range(50):
        front.complete(f"nobody-{number}")
    assert list(front.get("/traffic/stats").json()["traffic_stats"]) == ["org/m"]


def test_hop_by_hop_headers_are_not_forwarded(front: Controller, engine: Engine) -> None:
    headers = {
        "connection": "keep-alive, x-mine",
        "x-mine": "1",
        "te": "trailers",
        "x-kept": "yes",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "tracestate": "a=b",
        "x-request-id": "bad id with spaces",
        "authorization": "Bearer mine",
    }
    front.post("/v1/echo", {"model": "org/m"}, headers=headers)
    seen = {key.lower(): value for key, value in engine.state()["headers"]}
    assert "x-mine" not in seen
    assert "te" not in seen
    assert seen["x-kept"] == "yes"
    assert seen["traceparent"] == headers["traceparent"]
    assert seen["tracestate"] == "a=b"
    assert " " not in seen["x-request-id"]
    assert seen["authorization"] == "Bearer mine"  # no keys of our own: it is the engine's


@pytest.mark.slow
def test_traffic_statistics_count_finished_requests(engine: Engine) -> None:
    with Controller(config_for(engine)) as front:
        front.complete("org/m", max_tokens=11)
        front.complete("org/m", max_tokens=5, stream=True)
        front.complete("org/m", fake={"status": 500})

        def stats() -> dict[str, float]:
            return front.get("/traffic/stats/org/m").json()["model_stats"]

        wait_until(lambda: stats()["total_requests"] == 3)
        found = stats()
        assert (found["successful_requests"], found["failed_requests"]) == (2, 1)
        assert found["tokens_per_second"] == pytest.approx(16 / 60, abs=0.01)
        assert found["is_idle"] is False


@pytest.mark.slow
def test_requests_go_to_the_least_busy_replica() -> None:
    with Engine() as one, Engine() as two:
        config = config_for(one, model={"url": None, "urls": [one.url, two.url]})
        with (
            Controller(config) as front,
            front.client.stream(
                "POST",
                "/v1/completions",
                json={"model": "m", "stream": True, "fake": {"hold": "h"}},
            ) as held,
        ):
            pieces = held.iter_raw()  # kept: a generator that is dropped closes the connection
            next(pieces)
            busy, free = (one, two) if one.state()["in_flight"] else (two, one)
            for _ in range(6):
                assert front.complete().status_code == 200
            assert (busy.count("requests"), free.count("requests")) == (1, 6)
            busy.release("h")
            assert b"[DONE]" in b"".join(pieces)
            free.end()
            for _ in range(6):  # the other one serves them, and nobody sees a refused connection
                assert front.complete().status_code == 200
            assert busy.count("requests") == 7


@pytest.mark.slow
def test_request_registered_after_the_cut_off_is_cancelled() -> None:
    """A reload removed its model, without a drain, after the gate had admitted it."""
    model = cast(ServedModel, SimpleNamespace(serving=set(), is_cut_off=True))

    async def serve() -> None:
        with served_by(model):
            await asyncio.Event().wait()

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(asyncio.wait_for(serve(), DEADLINE_S))
    assert model.serving == set()


def test_unreachable_engine_is_503_with_retry_after() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with Controller({"models": [{"name": "m", "url": url}]}) as front:
            response = front.complete()
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "engine_unreachable"
            assert response.headers["retry-after"]
            assert front.get("/health").status_code == 200
            assert list(front.get("/health/m").json()["health"].values()) == [False]
