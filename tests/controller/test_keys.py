"""Keys: what each is good for, where it goes, and who is said to have done what."""

from __future__ import annotations

import hashlib
import json
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from running import Controller, Engine, config_for
from waiting import wait_until

pytestmark = pytest.mark.slow


API, BOUNDED, ADMIN = "api-key-1", "api-key-2", "admin-key-1"
ENGINE_KEY = "key-of-the-engine"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def id_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:8]


def sha256(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def front(engine: Engine) -> Iterator[Controller]:
    bounded = {"key": sha256(BOUNDED), "name": "batch", "max_priority": 10}
    auth = {
        "api_keys": [sha256(API), bounded],
        "admin_keys": [{"key": sha256(ADMIN), "name": "ops"}],
        "model_paths": ["/v1/own/", "/v1/other"],
    }
    config = config_for(engine, auth=auth, model={"max_in_flight": 1, "aliases": ["alias"]})
    with Controller(config) as front:
        yield front


@pytest.fixture(scope="module")
def half_open(engine: Engine) -> Iterator[Controller]:
    """Admin keys, and models for everybody."""
    with Controller(config_for(engine, auth={"admin_keys": [sha256(ADMIN)]})) as front:
        yield front


def complete(front: Controller, **headers: str) -> httpx.Response:
    return front.post("/v1/completions", {"model": "m"}, headers=headers)


# ------------------------------------------------------------------- admin keys, and no others


def test_foreign_origin_cannot_use_models_without_api_keys(
    half_open: Controller, engine: Engine
) -> None:
    before = engine.count("requests")
    assert complete(half_open).status_code == 200
    page = complete(half_open, origin="http://evil.example")
    assert (page.status_code, page.json()["error"]["code"]) == (403, "foreign_origin")
    rebound = complete(half_open, host="evil.example")
    assert (rebound.status_code, rebound.json()["error"]["code"]) == (403, "foreign_host")
    assert half_open.get("/models", headers={"host": "evil.example"}).status_code == 403
    assert engine.count("requests") == before + 1
    # Who has a key is no page's doing.
    assert complete(half_open, host="models.example", **bearer(ADMIN)).status_code == 200


CARRIERS = [
    {"authorization": f"Bearer {ADMIN}"},
    {"authorization": f"bearer   {ADMIN}"},
    {"authorization": f"Token {ADMIN}"},
    {"authorization": ADMIN},
    {"x-api-key": ADMIN},
    {"api-key": ADMIN},
    {"x-goog-api-key": ADMIN},
    {"authorization": f"Bearer {ENGINE_KEY}", "x-api-key": ADMIN},
]


@pytest.mark.parametrize("headers", CARRIERS)
def test_controller_key_is_not_forwarded_to_the_engine(
    half_open: Controller, engine: Engine, headers: dict[str, str]
) -> None:
    assert complete(half_open, **headers).status_code == 200
    assert ADMIN not in json.dumps(engine.state()["headers"])


def test_foreign_key_is_forwarded_without_api_keys(half_open: Controller, engine: Engine) -> None:
    complete(half_open, **bearer(ENGINE_KEY))
    assert ["Authorization", f"Bearer {ENGINE_KEY}"] in [
        [key.title(), value] for key, value in engine.state()["headers"]
    ]


def test_controller_keys_are_removed_from_all_headers(front: Controller, engine: Engine) -> None:
    headers = {**bearer(API), "api-key": BOUNDED, "x-other": f"Bearer {ADMIN}", "x-mine": "a b"}
    assert complete(front, **headers).status_code == 200
    seen = {key.lower(): value for key, value in engine.state()["headers"]}
    assert seen["x-mine"] == "a b"
    assert not {API, BOUNDED, ADMIN} & {word for value in seen.values() for word in value.split()}
    assert complete(front, **bearer("wrong"), **{"x-api-key": API}).status_code == 200


# ------------------------------------------------------------------------ operations on engines

OPERATIONS = [
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/load%5FlorA_adapter",
    "/v1/load_lora_adapter/", "/v1/completions/../load_lora_adapter", "/v1/model/load",
    "/v1/audio/voices", "/v1/anything", "/v1/",
]  # fmt: skip


@pytest.mark.parametrize("path", OPERATIONS)
def test_engine_operations_need_an_admin_key(front: Controller, engine: Engine, path: str) -> None:
    def status(key: str) -> int:
        with httpx.Client() as client:
            request = client.build_request("POST", front.url, json={"lora_name": "x"})
            request.url = request.url.copy_with(raw_path=f"{path}?model=m".encode())
            request.headers.update(bearer(key))
            return client.send(request).status_code

    before = engine.count("echoed")
    assert status("wrong") in {401, 400}
    assert status(API) in {403, 400}
    assert engine.count("echoed") == before
    if ".." not in path:
        assert status(ADMIN) == 200
        assert engine.count("echoed") == before + 1


@pytest.mark.parametrize(
    "path",
    ["/v1/embeddings", "/v1/responses/resp_1/cancel", "/v1/audio/transcriptions", "/v1/rerank",
     "/tokenize", "/v1/messages/count_tokens", "/v1/own/a/b", "/v1/other"],
)  # fmt: skip
def test_inference_paths_need_no_admin_key(front: Controller, path: str) -> None:
    answer = front.post(path, {"model": "m"}, headers=bearer(API))
    assert (answer.status_code, answer.json()["path"]) == (200, path)


def test_without_keys_local_clients_may_call_operations(engine: Engine) -> None:
    with Controller(config_for(engine)) as front:
        path = "/v1/load_lora_adapter?model=m"
        assert front.post(path, {}).status_code == 200
        assert front.post(path, {}, headers={"origin": "http://evil.example"}).status_code == 403


# ------------------------------------------------------------------------------------- priority


def test_key_priority_bound_caps_requested_priority(front: Controller, engine: Engine) -> None:
    """One request is at the engine; of those behind it, the order in which they are served."""

    def ask(key: str, name: str, priority: int, **body: Any) -> None:
        headers = {**bearer(key), "x-request-id": name, "x-kvelastic-priority": str(priority)}
        front.post("/v1/completions", {"model": "m", **body}, headers=headers)

    threads: list[threading.Thread] = []

    def start(waiting: int, *args: Any, **more: Any) -> None:
        threads.append(threading.Thread(target=ask, args=args, kwargs=more))
        threads[-1].start()
        wait_until(lambda: gate()["queued"] == waiting and gate()["in_flight"] == 1)

    def gate() -> Any:
        return front.get("/models", headers=bearer(API)).json()["models"]["m"]

    start(0, API, "first", 0, fake={"hold": "priority"})
    start(1, API, "plain-1", 0)
    start(2, API, "greedy", 1000)
    start(3, BOUNDED, "bounded-9", 9)
    start(4, BOUNDED, "bounded-1000", 1000)
    start(5, BOUNDED, "bounded-10", 10)
    start(6, API, "humble", -5)
    start(7, ADMIN, "admin", 1000)
    engine.release("priority")
    for thread in threads:
        thread.join()
    front.wait_for_line('"humble"')
    served = [
        line["id"]
        for line in map(json.loads, front.lines)
        if line["kind"] == "request" and line.get("id") in ORDER
    ]
    assert served == ORDER


ORDER = ["first", "admin", "bounded-1000", "bounded-10", "bounded-9", "plain-1", "greedy", "humble"]


# ---------------------------------------------------------------------------------------- audit


def audits(front: Controller) -> list[dict[str, Any]]:
    """The lines so far; the answer to what they tell of has come."""
    front.post("/action/wakeup/nobody", headers=bearer("the-end"))
    front.wait_for_line('"POST /action/wakeup/nobody"')
    lines = [json.loads(line) for line in front.lines if '"audit"' in line]
    return [line for line in lines if line["action"] != "POST /action/wakeup/nobody"]


def test_audit_log_names_key_and_action(engine: Engine) -> None:
    auth = {"api_keys": [sha256(API)], "admin_keys": [{"key": ADMIN, "name": "ops"}]}
    with Controller(config_for(engine, auth=auth, model={"aliases": ["alias"]})) as front:
        front.post("/action/sleep/alias", headers=bearer(ADMIN))
        front.post("/action/wakeup/m", headers=bearer(ADMIN))
        front.post("/action/sleep/m", headers=bearer(API))
        front.post("/action/sleep/m", headers=bearer("guessed"))
        front.client.request("PATCH", "/memory/m", json={"limit": "1G"}, headers=bearer(ADMIN))
        front.post("/v1/load_lora_adapter?model=alias", {}, headers=bearer(ADMIN))
        front.post("/v1/load_lora_adapter?model=alias", {}, headers=bearer(API))
        front.post("/v1/completions", {"model": "m"}, headers=bearer(ADMIN))
        front.get("/models", headers=bearer(ADMIN))
        front.path.write_text("models: 3")
        front.post("/admin/reload", headers=bearer(ADMIN))
        front.send(signal.SIGHUP)
        front.wait_for_line('"SIGHUP"')
        told = audits(front)
        who = {None: None, id_of(API): "api", id_of(ADMIN): "admin"}
        assert [
            (line["action"], line["model"], line["outcome"], line["error"], who[line["key"]])
            for line in told
        ] == [
            ("POST /action/sleep/alias", "m", "done", "", "admin"),
            ("POST /action/wakeup/m", "m", "done", "", "admin"),
            ("POST /action/sleep/m", "m", "refused", "admin_key_needed", "api"),
            ("POST /action/sleep/m", "m", "refused", "invalid_api_key", None),
            ("PATCH /memory/m", "m", "refused", "SEGMENT_NOT_FOUND", "admin"),
            ("POST /v1/load_lora_adapter", "m", "done", "", "admin"),
            ("POST /v1/load_lora_adapter", None, "refused", "admin_key_needed", "api"),
            ("POST /admin/reload", None, "refused", "CONTROLLER_CONFIG", "admin"),
            ("SIGHUP", None, "refused", "CONTROLLER_CONFIG", None),
        ]
        assert {line["name"] for line in told} == {"ops", None}
        assert all(line["client"].startswith("127.0.0.1 port ") for line in told[:-1])
        assert ADMIN not in "\n".join(front.lines)
        assert "guessed" not in "\n".join(front.lines)
        request = json.loads(front.wait_for_line('"/v1/completions"'))
        assert request["key"] == id_of(ADMIN)


def test_audit_log_names_clients_that_have_gone(front: Controller) -> None:
    action = "POST /memory/m/tiers/clear"
    lines = f"{action} HTTP/1.1", "Host: x", "Content-Length: 9", f"X-Api-Key: {ADMIN}", "", "{"
    with socket.create_connection(("127.0.0.1", front.port)) as sock:
        sock.sendall("\r\n".join(lines).encode())
    line = json.loads(front.wait_for_line(f'"{action}"'))
    assert (line["outcome"], line["status"], line["error"]) == ("failed", 0, "client_gone")
    front.get("/version")
    assert not [line for line in front.lines if "Traceback" in line]
