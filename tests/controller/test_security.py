"""Who may ask what, and what cannot be done to the controller over its socket."""

from __future__ import annotations

import hashlib
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import needs
import pytest
from certificates import make_certificate
from processes import run_python
from running import Controller, Engine, config_for
from waiting import DEADLINE_S, wait_until

API, ADMIN = "api-key-1", "admin-key-1"
DIGEST = "sha256:" + hashlib.sha256(ADMIN.encode()).hexdigest()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def front(engine: Engine) -> Iterator[Controller]:
    auth = {"api_keys": ["${API}"], "admin_keys": [DIGEST]}
    server = {"max_body": 100_000, "max_headers": 4096}
    with Controller(
        config_for(engine, auth=auth, server=server), environment={"API": API}
    ) as front:
        yield front


def raw(port: int, *pieces: bytes) -> bytes:
    """Send bytes as they are; everything that comes back until the other side closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as sock:
        try:
            for piece in pieces:
                sock.sendall(piece)
        except OSError:
            pass  # refused in the middle; what it said is still there
        answer = b""
        try:
            while piece := sock.recv(65536):
                answer += piece
        except ConnectionResetError:
            pass
        return answer


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


READS = [
    "/v1/models", "/models", "/health/m", "/traffic/stats", "/sleep/status", "/memory", "/devices"
]  # fmt: skip
WRITES = [
    ("POST", "/action/sleep/m"),
    ("POST", "/action/wakeup/m"),
    ("POST", "/admin/reload"),
    ("PATCH", "/memory/m"),
    ("POST", "/memory/m/trim"),
    ("PATCH", "/memory/m/tiers/disk"),
    ("POST", "/memory/m/tiers/disk/trim"),
    ("POST", "/memory/m/tiers/clear"),
    ("POST", "/memory/m/tiers/erase"),
    ("POST", "/memory/m/tiers/verify"),
]


@pytest.mark.parametrize("path", READS)
def test_reading_needs_a_key(front: Controller, path: str) -> None:
    assert front.get(path).status_code == 401
    assert front.get(path, headers=bearer("wrong")).status_code == 401
    assert front.get(path, headers=bearer(API)).status_code == 200
    assert front.get(path, headers=bearer(ADMIN)).status_code == 200


def test_models_need_a_key_hidden_from_the_engine(front: Controller, engine: Engine) -> None:
    refused = front.complete()
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    assert refused.headers["www-authenticate"] == "Bearer"
    body = {"model": "m"}
    assert front.post("/v1/completions", body, headers=bearer(API)).status_code == 200
    assert front.post("/v1/completions", body, headers={"x-api-key": API}).status_code == 200
    seen = {key.lower() for key, _ in engine.state()["headers"]}
    assert not seen & {"authorization", "x-api-key"}


@pytest.mark.parametrize(("method", "path"), WRITES)
def test_changing_needs_an_admin_key(front: Controller, method: str, path: str) -> None:
    def status(**headers: str) -> int:
        return front.client.request(method, path, json={}, headers=headers).status_code

    assert status() == 401
    assert status(**bearer("wrong")) == 401
    assert status(**bearer(API)) == 403
    assert status(**bearer(ADMIN)) not in {401, 403}


def test_health_needs_no_key(front: Controller) -> None:
    assert front.get("/health").status_code == 200


def test_body_and_header_sizes_are_limited(front: Controller) -> None:
    big = front.client.post("/v1/completions", content=b"x" * 100_001, headers=bearer(API))
    assert (big.status_code, big.json()["error"]["code"]) == (413, "body_too_large")
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer api-key-1\r\n"
    )
    chunk = b"186a0\r\n" + b"x" * 100_000 + b"\r\n"
    answer = raw(
        front.port, head + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n", chunk, chunk
    )
    assert answer.startswith(b"HTTP/1.1 413")
    assert raw(front.port, head + b"X-Big: " + b"x" * 5000 + b"\r\n\r\n").startswith(
        b"HTTP/1.1 431"
    )
    assert b" 431 " in raw(front.port, head, *[b"x" * 3000] * 4)
    assert b" 431 " in raw(front.port, b"GET /" + b"x" * 9000)


@pytest.mark.slow
def test_slow_clients_get_408(engine: Engine) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    server = {"header_timeout": "300ms", "body_timeout": "300ms", "keep_alive": "1s"}
    with Controller(config_for(engine, server=server)) as front, ThreadPoolExecutor(4) as threads:
        sent = (
            b"GET / HTTP/1.1\r\nHost: local",
            b"",
            head + b"Content-Length: 10\r\n\r\n123",
            b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
        )
        *late, idle = threads.map(partial(raw, front.port), sent)
        assert all(b" 408 " in answer for answer in late)
        assert idle.startswith(b"HTTP/1.1 200")  # and then the idle connection is closed


SMUGGLED = [
    b"Content-Length: 2\r\nContent-Length: 60\r\n\r\n{}",
    b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    b"Transfer-Encoding: chunked\r\n\r\n10000000000000000\r\n{}\r\n0\r\n\r\n",
    b"Transfer-Encoding: chunked\r\n\r\n-1\r\n{}\r\n0\r\n\r\n",
    b"Content-Length: +2\r\n\r\n{}",
    b"Content-Length: 0x2\r\n\r\n{}",
    b"X: a\nContent-Length: 2\r\n\r\n{}",
    b" Folded: x\r\nContent-Length: 2\r\n\r\n{}",
    b"X\0: y\r\n\r\n",
]
HIDDEN = b"POST /action/sleep/m HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize("crooked", SMUGGLED)
def test_request_smuggling_is_refused(front: Controller, engine: Engine, crooked: bytes) -> None:
    before = engine.state()
    head = b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer api-key-1\r\n"
    answer = raw(front.port, head + crooked + HIDDEN)
    for line in answer.split(b"\r\n"):
        assert not line.startswith(b"HTTP/1.1 2")
    after = engine.state()
    assert after["counts"] == before["counts"]


def test_mutated_requests_never_succeed(front: Controller, engine: Engine) -> None:
    before = engine.count("sleep_calls")
    dice = random.Random(7)
    body = b'{"model":"m","prompt":"x"}'
    seed = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Authorization: Bearer wrong\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s"
        % (len(body), body)
    )
    for _ in range(300):
        data = bytearray(seed)
        for _ in range(dice.randint(1, 12)):
            place = dice.randrange(len(data))
            match dice.randrange(3):
                case 0:
                    data[place] = dice.randrange(256)
                case 1:
                    del data[place : place + dice.randint(1, 9)]
                case _:
                    data[place:place] = dice.randbytes(dice.randint(1, 9))
        with socket.create_connection(("127.0.0.1", front.port), timeout=DEADLINE_S) as sock:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            answer = b""
            try:
                while piece := sock.recv(65536):
                    answer += piece
            except ConnectionResetError:
                pass
            assert not answer.startswith((b"HTTP/1.1 2", b"HTTP/1.1 5")), bytes(data)
    assert engine.count("sleep_calls") == before
    assert front.get("/health").status_code == 200


def test_without_keys_foreign_origins_are_refused(engine: Engine) -> None:
    with Controller(config_for(engine)) as front:
        page = {"origin": "http://evil.example"}
        assert front.post("/action/sleep/m", headers=page).status_code == 403
        assert front.get("/models", headers={"host": "evil.example"}).status_code == 403
        body = {"model": "m"}
        assert front.post("/v1/completions", body, headers=page).status_code == 403
        own = {"origin": f"http://127.0.0.1:{front.port}"}
        assert front.get("/models", headers=own).status_code == 200
        assert "access-control-allow-origin" not in front.get("/models", headers=own).headers
        assert front.client.options("/v1/completions").status_code == 405


def test_without_admin_keys_changes_are_refused(engine: Engine) -> None:
    config = config_for(engine, auth={"api_keys": [DIGEST]})
    with Controller(config) as front:
        response = front.post("/action/sleep/m", headers=bearer(ADMIN))
        assert (response.status_code, response.json()["error"]["code"]) == (403, "no_admin_keys")


@pytest.mark.slow
def test_a_public_address_without_keys_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("server: {host: 0.0.0.0}")
    done = run_python("-m", "kvelastic.controller", "--config", path, exit_code=2)
    assert "auth.api_keys" in done.stderr
    assert "Traceback" not in done.stderr


def test_plain_key_in_configuration_warns(engine: Engine) -> None:
    config = config_for(engine, auth={"api_keys": ["plain-secret"]})
    with Controller(config) as front:
        front.wait_for_line("sha256:HEX")
        assert not [line for line in front.lines if "plain-secret" in line]


@needs.openssl
def test_certificate_enables_https(engine: Engine, tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    import ssl
    import urllib.request

    config = config_for(engine, server={"tls_cert": str(cert), "tls_key": str(key)})
    with Controller(config) as front:
        trust = ssl.create_default_context(cafile=cert)
        url = f"https://127.0.0.1:{front.port}/health"
        with urllib.request.urlopen(url, context=trust, timeout=DEADLINE_S) as answer:
            assert answer.status == 200


@pytest.mark.slow
def test_total_buffered_body_size_is_limited(engine: Engine) -> None:
    config = config_for(engine, server={"max_buffered": 3000})
    with Controller(config) as front:
        with ThreadPoolExecutor() as pool:
            first = pool.submit(front.complete, pad="x" * 2000, fake={"hold": "b"})
            wait_until(lambda: "b" in engine.state()["held"])
            full = front.complete(pad="x" * 2000)
            assert (full.status_code, full.json()["error"]["code"]) == (503, "controller_full")
            engine.release("b")
            assert first.result().status_code == 200
        assert front.complete(pad="x" * 2000).status_code == 200


def test_body_is_freed_when_the_response_begins(engine: Engine) -> None:
    config = config_for(engine, server={"max_buffered": 3000})
    with Controller(config) as front:
        body = {"model": "m", "stream": True, "pad": "x" * 2000, "fake": {"hold": "c"}}
        with front.client.stream("POST", "/v1/completions", json=body) as response:
            pieces = response.iter_raw()
            next(pieces)
            assert front.complete(pad="x" * 2000).status_code == 200
            engine.release("c")
            b"".join(pieces)
