"""Every parser on a request's path takes time that grows no faster than what it is given.

A real controller gets hostile requests of 1, 2, 4 ... 1,024 KiB; what counts is the CPU time of its
process, from the kernel, and of the process that reads large bodies.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from running import Controller, Engine, config_for
from waiting import DEADLINE_S

pytestmark = pytest.mark.slow


KIB = 1 << 10
SIZES_KIB = [1 << power for power in range(11)]
TRIES = 12
LEAST_MS = 4.0
"""Below it the fixed cost of a request and the machine's noise are what is seen."""
GENEROUS = 3.0
"""Twice the size may take three times as long, and four times the size six times as long: caches,
and a machine with other work. A parser that is quadratic takes 16 times as long then."""


@pytest.fixture(scope="module")
def front() -> Iterator[Controller]:
    server = {"max_headers": 4 << 20, "keep_alive": "1s", "log_requests": False}
    with Engine() as engine:
        config = config_for(engine, server=server, model={"aliases": ["short"]})
        with Controller(config) as front:
            for size in (100_000, 2 << 20):  # the reader of large bodies has started
                ask(front, post(fill(size, b" ", end=b'{"model":"short"}')))
            yield front


def cpu_ms(front: Controller) -> float:
    """CPU time of the controller's threads and of its children."""

    def of(pid: int) -> int:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [c for task in tasks for c in (task / "children").read_text().split()]
        own = sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)
        return own + sum(of(int(child)) for child in children)

    return of(front.process.pid) / 1e6


def fill(size: int, text: bytes, start: bytes = b"", end: bytes = b"") -> bytes:
    return start + text * ((size - len(start) - len(end)) // len(text)) + end


def post(body: bytes, kind: str = "application/json", path: str = "/v1/echo") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body


def form(body: bytes, boundary: str = "b") -> bytes:
    return post(body, f"multipart/form-data; boundary={boundary}")


def ollama(body: bytes) -> bytes:
    return post(body, path="/api/chat")


def get(
    *headers: bytes, target: bytes = b"/v1/echo?model=nobody", host: bytes = b"localhost"
) -> bytes:
    lines = [b"GET " + target + b" HTTP/1.1", b"Host: " + host, *headers, b"Connection: close"]
    return b"\r\n".join([*lines, b"", b""])


URLENCODED = "application/x-www-form-urlencoded"
PART = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
LAST = b'\r\n--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nshort\r\n--b--\r\n'
CALL = b'{"role":"assistant","tool_calls":[{"function":{"name":"f"}}]},'
END = b'1],"model":"short"}'
HOSTILE: dict[str, Callable[[int], bytes]] = {
    "json: lists": lambda n: post(fill(n, b"[],", b'{"x":[', END)),
    "json: nested": lambda n: post(fill(n, b"[", b'{"model":"m","x":')),
    "json: models": lambda n: post(fill(n, b'"model":"short",', b"{", b'"model":"short"}')),
    "json: escapes": lambda n: post(fill(n, b"\\u00e4", b'{"x":["', b'",' + END)),
    "json: a name": lambda n: post(fill(n, b"\\n", b'{"model":"', b'"}')),
    "json: digits": lambda n: post(fill(n, b"9", b'{"x":[', b"," + END)),
    "json: white space": lambda n: post(fill(n, b" \n", b'{"x":[', END)),
    "json: cut off": lambda n: post(fill(n, b'{"model":')),
    "form: dispositions": lambda n: form(fill(n, b"content-disposition:", b"--b\r\n")),
    "form: half dispositions": lambda n: form(fill(n, b"content-disposition: ;name=")),
    "form: lines": lambda n: form(fill(n, b"\r\n", PART, LAST)),
    "form: half boundaries": lambda n: form(fill(n, b"\r\n-", PART, LAST)),
    "form: like boundaries": lambda n: form(fill(n, b"\r\n--bx", PART, LAST)),
    "form: spaces after one": lambda n: form(fill(n, b" ", PART + b"\r\n--b", LAST)),
    "form: parts": lambda n: form(fill(n, PART + b"\r\n", end=LAST[2:])),
    "form: parameters": lambda n: form(
        fill(n, b"--b\r\nContent-Disposition: form-data" + b';"' * 900 + b"\r\n\r\n\r\n", end=LAST)
    ),
    "form: headers": lambda n: form(fill(n, b"--b\r\n" + b"a:\r\n" * 30 + b"\r\n\r\n", end=LAST)),
    "form: a long boundary": lambda n: form(
        fill(n, b"\r\n--" + b"a" * 69, PART, LAST), boundary="a" * 70
    ),
    "form: dashes": lambda n: form(fill(n, b"-")),
    "form: a content type": lambda n: post(b"x", 'multipart/form-data;"' + ';\\"' * (n // 3)),
    "urlencoded: fields": lambda n: post(fill(n, b"&"), URLENCODED),
    "urlencoded: escapes": lambda n: post(fill(n, b"%6d"), URLENCODED),
    "urlencoded: a name": lambda n: post(fill(n, b"%", b"model="), URLENCODED),
    "query: fields": lambda n: get(target=b"/v1/echo?" + b"a=b&" * (n // 4) + b"model=nobody"),
    "query: a name": lambda n: get(target=b"/v1/echo?model=" + b"%6d" * (n // 3)),
    "query: equals": lambda n: get(target=b"/v1/echo?" + b"=" * n),
    "ollama: lists": lambda n: ollama(fill(n, b"[],", b'{"model":"m","tools":[', b"1]}")),
    "ollama: results": lambda n: ollama(
        fill(
            n,
            CALL + b'{"role":"tool","tool_name":"f"},',
            b'{"model":"m","messages":[',
            b'{"role":"user"}]}',
        )
    ),
    "path": lambda n: get(target=b"/v1/" + b"a/" * (n // 2) + b"?model=nobody"),
    "path: escapes": lambda n: get(target=b"/v1/" + b"%2e" * (n // 3) + b"?model=nobody"),
    "headers: many": lambda n: get(*[b"X-A: b"] * (n // 8)),
    "headers: one": lambda n: get(b"X-A: " + b"b " * (n // 2)),
    "headers: connection": lambda n: get(b"Connection: " + b"a," * (n // 2)),
    "headers: priority": lambda n: get(b"X-Kvelastic-Priority: " + b"9" * n),
    "headers: request id": lambda n: get(b"X-Request-Id: " + b"a" * n),
    "headers: authorization": lambda n: get(b"Authorization: " + b"Bearer " * (n // 7)),
    "headers: content length": lambda n: get(b"Content-Length: " + b"0" * n),
    "host": lambda n: get(host=b"a." * (n // 2)),
    "host: brackets": lambda n: get(host=b"[" * n),
    "host: colons": lambda n: get(host=b":" * n),
    "host: at": lambda n: get(host=b"@" * n),
    "origin": lambda n: get(b"Origin: " + b"://" * (n // 3)),
    "origin: a name": lambda n: get(b"Origin: http://" + b"a." * (n // 2)),
}


def ask(front: Controller, request: bytes) -> bytes:
    """The answer's first line; the connection may be cut instead."""
    answer = b""
    with socket.create_connection(("127.0.0.1", front.port), timeout=DEADLINE_S) as sock:
        try:
            sock.sendall(request)
            while piece := sock.recv(1 << 20):
                answer = answer or piece
        except ConnectionError:  # it was refused before it was whole
            pass
    return answer.partition(b"\r\n")[0]


@pytest.mark.parametrize("shape", HOSTILE)
def test_parsing_time_is_linear_in_request_size(front: Controller, shape: str) -> None:
    """A size that took too long is asked again right after the smaller one: a processor that others
    use as well is slower for both.
    """

    def cost_ms(kib: int) -> float:
        request = HOSTILE[shape](kib * KIB)
        before_ms = cpu_ms(front)
        status = ask(front, request)
        assert re.match(rb"HTTP/1.1 (200|4\d\d)|$", status), status
        return cpu_ms(front) - before_ms

    least_kib, least_ms = 0, 0.0
    for kib in SIZES_KIB:
        took_ms = cost_ms(kib)
        if not least_kib:
            if took_ms > LEAST_MS:
                least_kib, least_ms = kib, took_ms
            continue
        most = max(GENEROUS, kib / least_kib * GENEROUS / 2)
        for _ in range(TRIES):
            if took_ms < least_ms * most:
                break
            least_ms, took_ms = cost_ms(least_kib), cost_ms(kib)
        else:
            pytest.fail(f"{took_ms:.1f} ms at {kib} KiB, {least_ms:.1f} ms at {least_kib} KiB")
    print(f"{shape}: {took_ms:.1f} ms at {SIZES_KIB[-1]} KiB, {least_ms:.1f} at {least_kib}")
