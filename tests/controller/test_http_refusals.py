"""What is refused before a request is one, or asks for another protocol; and in whose shape."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator

import pytest
from running import Controller, Engine, config_for
from test_security import raw
from waiting import DEADLINE_S, wait_until

KEY = "some-key"
AUTH = b"Authorization: Bearer some-key\r\n"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def front(engine: Engine) -> Iterator[Controller]:
    server = {"max_headers": 4096, "max_body": 1000}
    config = config_for(engine, server=server, auth={"api_keys": [KEY]})
    with Controller(config) as front:
        yield front


def parts(answer: bytes) -> tuple[int, dict[bytes, bytes], dict[str, object]]:
    """Status, headers and JSON of an answer that is the only one on its connection."""
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    headers = dict(line.lower().split(b": ", 1) for line in lines[1:])
    assert len(body) == int(headers[b"content-length"])
    return int(lines[0].split()[1]), headers, json.loads(body)


# ----------------------------------------------------------------------------------- no HTTP

NO_HTTP = [
    b"what is this\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 50,  # TLS
    b"BREW /pot HTTP/1.1\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nNo colon\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n",
    b"CONNECT evil:443 HTTP/1.1\r\nHost: evil\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\n" + AUTH + b"Transfer-Encoding: chunked\r\n\r\nz\r\n",
]


@pytest.mark.parametrize("sent", NO_HTTP)
def test_invalid_http_is_refused_in_json(front: Controller, sent: bytes) -> None:
    status, headers, body = parts(raw(front.port, sent))
    assert status in {400, 426}
    assert headers[b"content-type"] == b"application/json"
    assert headers[b"connection"] == b"close"
    error = body["error"]
    assert isinstance(error, dict)
    assert set(error) == {"message", "type", "param", "code"}


def test_garbage_after_request_does_not_corrupt_its_response(
    front: Controller, engine: Engine
) -> None:
    """It is cut short, but nothing that is not the engine's is in it."""
    body = json.dumps({"model": "m", "stream": True, "fake": {"hold": "spoil"}}).encode()
    with socket.create_connection(("127.0.0.1", front.port), timeout=DEADLINE_S) as sock:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n" + AUTH
        sock.sendall(head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        answer = sock.recv(65536)
        while b"t0" not in answer:
            answer += sock.recv(65536)
        sock.sendall(b"garbage that is no request\r\n\r\n")
        engine.release("spoil")
        try:
            while piece := sock.recv(65536):
                answer += piece
        except ConnectionResetError:
            pass
    assert b"invalid_http" not in answer
    assert answer.count(b"HTTP/1.1 ") == 1


# ----------------------------------------------------------------------------------- upgrades

HIDDEN = b"POST /v1/score?model=m HTTP/1.1\r\nHost: a\r\n" + AUTH + b"Content-Length: 0\r\n\r\n"


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c", b"TLS/1.0"])
@pytest.mark.parametrize("method", [b"GET", b"POST"])
def test_upgrade_is_426_and_its_body_not_parsed(
    front: Controller, engine: Engine, protocol: bytes, method: bytes
) -> None:
    before = engine.state()["counts"]
    head = (
        method + b" /v1/realtime?model=m HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\n" + AUTH
        + b"Upgrade: " + protocol + b"\r\nContent-Length: %d\r\n\r\n" % len(HIDDEN)
    )  # fmt: skip
    for pieces in ([head + HIDDEN], [head, HIDDEN]):
        status, headers, body = parts(raw(front.port, *pieces))
        assert (status, headers[b"upgrade"]) == (426, b"http/1.1")
        assert body["error"]["code"] == "upgrade_not_served"  # type: ignore[index]
    assert engine.state()["counts"] == before
    assert not [line for line in front.lines if "pip install" in line]


def test_pipelined_upgrade_waits_for_the_previous_response(
    front: Controller, engine: Engine
) -> None:
    body = json.dumps({"model": "m", "fake": {"hold": "turn"}}).encode()
    first = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n" + AUTH + b"Content-Length: %d\r\n\r\n"
    upgrade = b"GET /v1/x HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    with socket.create_connection(("127.0.0.1", front.port), timeout=DEADLINE_S) as sock:
        sock.sendall(first % len(body) + body + upgrade)
        wait_until(lambda: engine.state()["in_flight"] == 1)
        engine.release("turn")
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    assert re.findall(rb"HTTP/1\.1 ([0-9]+)", answer) == [b"200", b"426"]


# ----------------------------------------------------------------------------- Anthropic's shape


def bodies(front: Controller) -> Iterator[tuple[int, str, bytes]]:
    """Refusals of /v1/messages, from each place where one is made: status, type, the answer."""
    target = b"POST /v1/messages?beta=true HTTP/1.1\r\nHost: a\r\n"
    length = b"Content-Length: %d\r\n\r\n%s"
    nobody = b'{"model": "nobody"}'
    yield (
        401,
        "authentication_error",
        raw(front.port, target + b"Connection: close\r\n" + length % (2, b"{}")),
    )
    last = target + AUTH + b"Connection: close\r\n"
    yield 404, "not_found_error", raw(front.port, last + length % (len(nobody), nobody))
    yield 400, "invalid_request_error", raw(front.port, last + length % (2, b"{}"))
    yield 413, "request_too_large", raw(front.port, last + b"Content-Length: 9999\r\n\r\n")
    yield 431, "invalid_request_error", raw(front.port, target + b"X: " + b"y" * 5000)
    yield 400, "invalid_request_error", raw(front.port, target + b"no colon\r\n\r\n")
    yield 405, "invalid_request_error", raw(front.port, b"OPTIONS" + last[4:] + b"\r\n")
    yield 400, "invalid_request_error", raw(front.port, last.replace(b"?", b"/../x?") + b"\r\n")
    yield (
        426,
        "invalid_request_error",
        raw(front.port, target + b"Connection: upgrade\r\nUpgrade: h2c\r\n\r\n"),
    )


def test_errors_have_anthropic_format_on_messages_paths(front: Controller) -> None:
    for status, kind, answer in bodies(front):
        check_anthropic_error(answer, status, kind)


@pytest.mark.slow
def test_timeouts_have_anthropic_format_on_messages_paths(engine: Engine) -> None:
    server = {"header_timeout": "500ms", "body_timeout": "500ms"}
    with Controller(config_for(engine, server=server)) as front:
        head = b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\n"
        body = b"Connection: close\r\nContent-Length: 9\r\n\r\n1"
        for sent in (head + body, head + b"Authoriz"):
            check_anthropic_error(raw(front.port, sent), 408, "invalid_request_error")


def check_anthropic_error(answer: bytes, status: int, kind: str) -> None:
    found, headers, body = parts(answer)
    assert (found, body["type"]) == (status, "error"), answer
    error = body["error"]
    assert isinstance(error, dict)
    assert error["type"] == kind, answer
    assert set(error) == {"type", "message"}
    assert body.get("request_id") == (headers.get(b"x-request-id", b"").decode() or None)


@pytest.mark.slow
def test_anthropic_client_library_reads_the_errors(front: Controller) -> None:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(api_key=KEY, base_url=front.url, max_retries=0) as client:
        with pytest.raises(anthropic.NotFoundError) as caught:
            client.messages.create(model="nobody", max_tokens=1, messages=[])
        assert caught.value.body["error"]["type"] == "not_found_error"
        assert caught.value.request_id
        assert "nobody" in str(caught.value)
        client.api_key = "wrong"
        with pytest.raises(anthropic.AuthenticationError):
            client.messages.create(model="m", max_tokens=1, messages=[])


def test_trailers_are_no_headers(front: Controller, engine: Engine) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
    body = b'Transfer-Encoding: chunked\r\n\r\ne\r\n{"model": "m"}\r\n0\r\n'
    assert parts(raw(front.port, head + body + AUTH + b"\r\n"))[0] == 401
    assert parts(raw(front.port, head + AUTH + body + b"X-Trailer: x\r\n\r\n"))[0] == 200
    assert "x-trailer" not in {name.lower() for name, _ in engine.state()["headers"]}


def test_openai_paths_keep_openai_error_format(front: Controller) -> None:
    for path in ("/v1/messagesx", "/v1/completions", "/v1/models"):
        assert "code" in front.post(path, {}).json()["error"]
