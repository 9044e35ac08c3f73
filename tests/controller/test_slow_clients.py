"""Clients that do not read: their places come free, and those who are only slow are served."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from certificates import make_certificate
from hypothesis import given
from hypothesis import strategies as st
from running import Controller, Engine, config_for
from test_sleep import memory_mib
from waiting import DEADLINE_S, wait_until

from kvelastic.controller.http import connections
from kvelastic.controller.http.connections import (
    LEAST_BYTES,
    Connections,
    Sent,
    _sent,
    has_progressed,
)
from kvelastic.controller.http.open_files import OpenFiles

pytestmark = pytest.mark.slow


PAD_BYTES = 24_000_000
"""More than the kernel's buffers on both sides hold."""


def post(path: str, *, close: bool = True, **body: object) -> bytes:
    raw = json.dumps({"model": "m", **body}).encode()
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{'Connection: close' if close else 'X: y'}\r\n"
        f"Content-Length: {len(raw)}\r\n\r\n"
    ).encode() + raw


def dial(port: int, receive_buffer_bytes: int = 65536) -> socket.socket:
    """With a small receive buffer, or the kernel takes megabytes by itself."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    sock.settimeout(DEADLINE_S)
    sock.connect(("127.0.0.1", port))
    return sock


def is_cut(sock: socket.socket) -> bool:
    """Whether the controller has reset the connection; nothing is read for it."""
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0


def metric(front: Controller, name: str) -> float:
    for line in front.get("/metrics").text.splitlines():
        if line.startswith(f"kvelastic_{name} "):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no metric {name}")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def front(engine: Engine) -> Iterator[Controller]:
    """It cuts no client that a test is still preparing, and looks once a second."""
    with Controller(config_for(engine, server={"send_timeout": "8s", "keep_alive": "1s"})) as front:
        yield front


@contextlib.contextmanager
def impatient(front: Controller) -> Iterator[None]:
    """In the body the controller soon cuts a client that takes nothing."""
    server = front.first_config["server"] | {"send_timeout": "200ms"}
    with front.reloaded(front.first_config | {"server": server}):
        yield


@pytest.mark.parametrize("way", ["at_once", "streamed", "upstream", "a_byte_now_and_then"])
def test_client_not_reading_is_cut_and_model_sleeps(
    engine: Engine, front: Controller, way: str
) -> None:
    cut = metric(front, "send_timeouts_total")
    lines = len(front.lines)
    with dial(front.port) as sock:
        if way in {"streamed", "upstream"}:
            path = "/upstream/m/v1/completions" if way == "upstream" else "/v1/completions"
            sock.sendall(post(path, stream=True, max_tokens=300, fake={"pad": 100_000}))
        else:
            sock.sendall(post("/v1/echo", pad="x" * PAD_BYTES))
        assert sock.recv(1)
        wait_until(lambda: front.post("/action/sleep/m").status_code == 409)

        def gone() -> bool:
            if way == "a_byte_now_and_then" and not is_cut(sock):
                with contextlib.suppress(ConnectionError):
                    sock.recv(1)
            return bool(metric(front, "send_timeouts_total") == cut + 1)

        with impatient(front):
            wait_until(gone)
        wait_until(lambda: engine.state()["in_flight"] == 0)
        wait_until(lambda: front.post("/action/sleep/m").status_code == 200)
    assert front.post("/action/wakeup/m").status_code == 200

    def said() -> list[dict[str, Any]]:
        found = [json.loads(line) for line in list(front.lines)[lines:] if '"request"' in line]
        return [line for line in found if line["cancelled"]]

    (line,) = wait_until(said)
    assert line["error"] == "send_timeout"


class Watched(asyncio.Protocol):
    """A connection that `Connections` can cut."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.is_cut = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def cut(self) -> None:
        self.is_cut = True
        self.transport.abort()


@pytest.mark.parametrize(("each_bytes", "is_cut"), [(4 * LEAST_BYTES, False), (1, True)])
def test_only_clients_below_the_minimum_rate_are_cut(
    monkeypatch: pytest.MonkeyPatch, each_bytes: int, is_cut: bool
) -> None:
    """The kernel says what it has taken; time passes only between two looks."""
    now_s = 0.0
    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=lambda: now_s))

    async def run() -> None:
        nonlocal now_s
        loop = asyncio.get_running_loop()
        watched = Watched()
        server = await loop.create_server(lambda: watched, "127.0.0.1", 0)
        async with server:
            with dial(server.sockets[0].getsockname()[1]) as sock:
                while watched.transport is None:
                    await asyncio.sleep(0.001)
                watched.transport.write(b"x" * PAD_BYTES)
                all_of_them = Connections(OpenFiles(limit=1024, limit_at_start=1024), lambda: 10.0)
                all_of_them.enter(watched)
                for _ in range(20):
                    all_of_them.look()
                    now_s += 9.0
                    if watched.is_cut:
                        break
                    enough_bytes = _sent(watched.transport).taken_bytes + LEAST_BYTES
                    sock.recv(each_bytes, socket.MSG_WAITALL)
                    while not is_cut and _sent(watched.transport).taken_bytes < enough_bytes:
                        await asyncio.sleep(0.001)
                assert watched.is_cut is is_cut
                watched.transport.abort()

    asyncio.run(run())


def test_send_timeout_covers_the_end_of_responses(front: Controller) -> None:
    """All is written, the connection is being closed, and the client takes nothing of the rest."""
    with dial(front.port) as sock:
        # The last piece waits in the connection, and no exchange waits for it any more.
        sock.sendall(post("/v1/echo", close=False, pad="x" * 2_500_000))
        before = metric(front, "connections")
        wait_until(lambda: front.get("/models").json()["models"]["m"]["in_flight"] == 0)
        with impatient(front):
            wait_until(lambda: metric(front, "connections") < before)


def test_send_timeout_covers_controller_pages(front: Controller) -> None:
    before = metric(front, "connections")
    with dial(front.port) as sock:
        sock.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 400)
        wait_until(lambda: metric(front, "connections") == before + 1)
        with impatient(front):
            wait_until(lambda: metric(front, "connections") == before)


def test_send_timeout_applies_over_tls(engine: Engine, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    server = {"send_timeout": "200ms", "tls_cert": str(certificate), "tls_key": str(key)}
    context = ssl.create_default_context(cafile=str(certificate))
    with Controller(config_for(engine, server=server)) as front:
        front.client = httpx.Client(base_url=f"https://127.0.0.1:{front.port}", verify=context)
        with context.wrap_socket(dial(front.port), server_hostname="127.0.0.1") as sock:
            sock.sendall(post("/v1/echo", pad="x" * PAD_BYTES))
            assert sock.recv(1)
            wait_until(lambda: metric(front, "send_timeouts_total") == 1)
            wait_until(lambda: engine.state()["in_flight"] == 0)


@pytest.mark.parametrize(
    "count", [40, pytest.param(2000, marks=pytest.mark.soak)], ids=["some", "two_thousand"]
)
def test_many_stalled_clients_do_not_affect_others(count: int) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    body = post("/v1/completions", stream=True, max_tokens=100, fake={"pad": 100_000})
    try:
        with (
            ExitStack() as stack,
            Engine() as engine,
            Controller(config_for(engine, server={"send_timeout": "8s"})) as front,
        ):
            front.complete()
            before_mib = memory_mib(front)
            for number in range(count):
                stack.enter_context(dial(front.port)).sendall(body)
                if number % 20 == 0:
                    assert front.complete().status_code == 200
            with impatient(front):
                wait_until(lambda: metric(front, "send_timeouts_total") == count)
            wait_until(lambda: engine.state()["in_flight"] == 0)
            wait_until(lambda: metric(front, "connections") == 1)
            assert metric(front, "buffered_bytes") == 0
            grown_mib = memory_mib(front) - before_mib
            print(f"{count} clients: its memory's peak has grown by {grown_mib:.0f} MiB")
            # A client's part: what the connection holds back, and what has come of its engine.
            assert grown_mib < 50 + count * 0.75
            assert front.post("/action/sleep/m").status_code == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@given(
    taken=st.integers(0, 1 << 40),
    waited=st.integers(0, 1 << 24),
    more_taken=st.integers(0, 1 << 24),
    more_written=st.integers(0, 1 << 24),
)
def test_progress_needs_the_minimum_or_all_pending_bytes(
    taken: int, waited: int, more_taken: int, more_written: int
) -> None:
    mark = Sent(taken, taken + waited)
    now = Sent(taken + more_taken, taken + waited + more_taken + more_written)
    assert has_progressed(mark, now) == (more_taken >= min(waited, LEAST_BYTES))
