"""Running out of file descriptors: as far as possible it does not happen, and else it is said."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import ssl
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import needs
import pytest
from certificates import make_certificate
from ports import free_port
from running import FAKES, Controller, Engine, config_for, rest_of
from test_slow_clients import dial, metric, post
from waiting import DEADLINE_S, wait_until

from kvelastic.controller.app_state import AppState
from kvelastic.controller.http.log_writer import LogWriter
from kvelastic.controller.http.open_files import OpenFiles
from kvelastic.controller.http.request_log import RequestLog
from kvelastic.controller.launch import launch_record
from kvelastic.controller.settings.settings_file import parse
from kvelastic.errors import SegmentError, is_out_of_descriptors

pytestmark = pytest.mark.slow


SOFT, HARD = 200, 256
MOST = (HARD - 96) // 2
"""What `open_files.py` makes of it."""


def limits(pid: int) -> tuple[int, int]:
    return resource.prlimit(pid, resource.RLIMIT_NOFILE)


@contextmanager
def no_descriptor_left(front: Controller) -> Iterator[None]:
    """As if somebody had lowered the limit of the running controller."""
    pid = front.process.pid
    before = limits(pid)
    least_free = next(n for n in range(before[0]) if not Path(f"/proc/{pid}/fd/{n}").exists())
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (least_free, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine() as engine:
        yield engine


def test_limit_is_raised_but_not_for_engines(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, str(FAKES / "engine.py"), "--port={port}"]
    launch = {"command": command, "port": port, "log_file": str(tmp_path / "log")}
    config = {"models": [{"name": "m", "engine": "vllm", "launch": launch}]}
    with Controller(config, open_files=(SOFT, HARD)) as front:
        assert limits(front.process.pid) == (HARD, HARD)
        wait_until(lambda: front.state() == "awake")
        pid = front.get("/admin/models/m/logs").json()["pid"]
        assert limits(pid) == (SOFT, HARD)


def test_excess_connections_are_503_while_others_are_served(engine: Engine) -> None:
    engine.reset()
    with Controller(config_for(engine), open_files=(SOFT, HARD)) as front, ExitStack() as stack:
        front.client.close()  # its connection would count
        assert MOST == 80
        body = post("/v1/completions", stream=True, fake={"hold": "h"})
        held = []
        for _ in range(MOST):
            held.append(stack.enter_context(dial(front.port)))
            held[-1].sendall(body)
            assert held[-1].recv(65536).startswith(b"HTTP/1.1 200")
        for _ in range(40):
            with dial(front.port) as sock:
                sock.sendall(body)
                answer = rest_of(sock)
            assert answer.startswith(b"HTTP/1.1 503"), answer
            assert b'"too_many_connections"' in answer
            assert b"retry-after: 1" in answer
        # Those who say nothing hold no place that a client could have, and not for ever.
        silent = [stack.enter_context(dial(front.port)) for _ in range(100)]
        wait_until(lambda: sum(is_closed(sock) for sock in silent) >= 100 - 24)
        engine.release("h")
        for sock in held:
            assert rest_of(sock).endswith(b"0\r\n\r\n")
        for sock in silent:
            sock.close()

        def is_served() -> bool:
            with dial(front.port) as sock:
                sock.sendall(post("/v1/completions"))
                return rest_of(sock).startswith(b"HTTP/1.1 200")

        wait_until(is_served)
        assert not [line for line in front.lines if "engine_unreachable" in line]


def is_closed(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


@needs.openssl
def test_silent_tls_handshakes_end(engine: Engine, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    tls = {"tls_cert": str(certificate), "tls_key": str(key), "header_timeout": "200ms"}
    trusted = ssl.create_default_context(cafile=str(certificate))
    in_tls = partial(trusted.wrap_socket, server_hostname="127.0.0.1")
    with Controller(config_for(engine, server=tls)) as front, dial(front.port) as silent:
        for _ in range(2):  # each one is accepted later, so its time ends later
            with suppress(OSError), in_tls(dial(front.port)) as sock:  # a slow handshake ends too
                rest_of(sock)
        assert is_closed(silent)


def test_descriptor_shortage_is_503_out_of_descriptors(engine: Engine) -> None:
    engine.reset()
    with Controller(config_for(engine)) as front, dial(front.port) as holder:
        holder.sendall(post("/v1/completions", stream=True, fake={"hold": "h"}))
        assert holder.recv(65536).startswith(b"HTTP/1.1 200")  # no engine's connection is idle
        front.get("/health")
        with no_descriptor_left(front):
            for path in ("/v1/completions", "/memory", "/devices", "/health/m"):
                answer = front.complete() if path.startswith("/v1") else front.get(path)
                assert (answer.status_code, answer.headers.get("retry-after")) == (503, "2"), path
                assert answer.json()["error"]["code"] == "out_of_descriptors"
            assert metric(front, "descriptor_shortages_total") >= 4
            said = wait_until(
                lambda: [line for line in front.lines if "out of file descriptors while" in line]
            )
            assert len(said) < 4, said  # one in ten seconds
            # Connections that cannot be accepted do not stop it, nor make it spin.
            refused = [dial(front.port) for _ in range(20)]
            assert front.get("/health").status_code == 200
        assert front.complete().status_code == 200
        assert not [line for line in front.lines if "engine_unreachable" in line]
        assert not [line for line in front.lines if "Traceback" in line]
        engine.release("h")
        assert rest_of(holder).endswith(b"0\r\n\r\n")
        for sock in refused:
            sock.close()
        with dial(front.port) as sock:
            sock.sendall(post("/v1/completions"))
            assert rest_of(sock).startswith(b"HTTP/1.1 200")


def test_descriptor_shortage_at_start_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Engines of a killed controller cannot be looked for then."""

    def no_descriptor() -> list[int]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/proc")

    async def serve() -> None:
        with LogWriter(None) as writer:
            front = AppState(parse('{"models": []}', {}), RequestLog(writer), OpenFiles.raised())
            await front.start()
            await asyncio.wait_for(asyncio.gather(*front._tasks), DEADLINE_S)
            await front.stop()

    monkeypatch.setattr(launch_record, "_processes_of_this_user", no_descriptor)
    asyncio.run(serve())
    assert "engines of a killed controller may be left" in caplog.text


def test_out_of_descriptors_is_found_in_the_cause() -> None:
    os_error = OSError(24, "Too many open files")
    error = SegmentError("cannot open it")
    error.__cause__ = os_error
    assert is_out_of_descriptors(os_error)
    assert is_out_of_descriptors(error)
    assert not is_out_of_descriptors(OSError(2, os.strerror(2)))
    assert not is_out_of_descriptors(None)
