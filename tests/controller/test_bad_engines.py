"""Engines that break off, never begin or answer with pages; and what is left of a removed model."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import aiohttp
import httpx
import pytest
from running import Controller, Engine, config_for, fake_launch
from waiting import DEADLINE_S, wait_until

from kvelastic.controller.http.headers import SANDBOX, to_client
from kvelastic.controller.http.refusal import Refusal
from kvelastic.controller.launch.launch_environment import engine_environment
from kvelastic.controller.launch.listeners import program_of
from kvelastic.controller.models.engine_calls import KINDS, EngineCalls
from kvelastic.controller.routing.ollama_request import Call, read
from kvelastic.controller.settings.settings_file import parse

pytestmark = pytest.mark.slow


@contextmanager
def raw_engine(*pieces: bytes, again: bytes = b"") -> Iterator[str]:
    """An engine that answers every request with these bytes, and goes on with `again` for ever."""

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(1 << 16)
            for piece in pieces:
                connection.sendall(piece)
            while again:
                connection.sendall(again)
                if ended.wait(0.05):
                    return

    ended = threading.Event()
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        ended.set()
        listener.shutdown(socket.SHUT_RDWR)


def served(url: str, **more: object) -> dict[str, object]:
    return {"models": [{"name": "m", "url": url, **more}]}


def test_endless_100_continue_times_out() -> None:
    with (
        raw_engine(again=b"HTTP/1.1 100 Continue\r\n\r\n") as url,
        Controller(served(url, timeouts={"idle": "500ms"})) as front,
    ):
        answer = front.complete()
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "engine_timeout")


def test_truncated_engine_response_is_502_for_ollama() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 900\r\n\r\n{"
    with raw_engine(head) as url, Controller(served(url)) as front:
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": False}
        answer = front.post("/api/chat", body)
        assert answer.status_code == 502
        assert "broke off" in answer.json()["error"]


def test_html_from_engine_is_sandboxed() -> None:
    page = b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 3\r\n\r\n<p>"
    with raw_engine(page) as url, Controller(served(url)) as front:
        for path in ("/v1/completions", "/upstream/m/v1/models"):
            answer = front.post(path, {"model": "m"})
            assert answer.headers["content-security-policy"] == "sandbox", path
    assert to_client([(b"Content-Type", b"application/json; charset=utf-8")]) == [
        (b"content-type", b"application/json; charset=utf-8")
    ]
    assert to_client([]) == SANDBOX  # a browser would look for itself what it is


@pytest.mark.parametrize("drain_timeout", ["100ms", 0])
def test_removed_model_streams_end_after_drain_timeout(drain_timeout: str | int) -> None:
    with Engine() as engine:
        config = config_for(engine, server={"drain_timeout": drain_timeout})
        body = {"model": "m", "prompt": "x", "stream": True, "fake": {"hang": "stream"}}
        with (
            Controller(config) as front,
            httpx.Client(base_url=front.url, timeout=DEADLINE_S) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            pieces = response.iter_raw()
            next(pieces)
            nothing = {"server": {"drain_timeout": drain_timeout}, "models": []}
            with front.reloaded(nothing), pytest.raises(httpx.RemoteProtocolError):
                list(pieces)


def test_request_of_removed_model_is_logged_with_code() -> None:
    server = {"drain_timeout": 0}
    with (
        Engine() as engine,
        Controller(config_for(engine, server=server)) as front,
        ThreadPoolExecutor(1) as threads,
    ):
        asked = threads.submit(front.complete, fake={"hang": "first"})
        wait_until(lambda: engine.state()["in_flight"] == 1)
        with front.reloaded({"server": server, "models": []}):
            line = json.loads(front.wait_for_line(asked.result().headers["x-request-id"]))
    assert (line["status"], line["error"]) == (503, "model_removed")


def test_port_in_use_exits_1_and_names_process(tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        path = tmp_path / "controller.yaml"
        path.write_text(f"server: {{port: {port}}}")
        command = [sys.executable, "-m", "kvelastic.controller", "--config", str(path)]
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
    assert ended.returncode == 1, ended.stderr
    assert f"port {port}: it is taken by process" in ended.stderr


def test_missing_sleep_route_suggests_vllm_dev_mode() -> None:
    with Engine() as engine, Controller(config_for(engine)) as front:
        engine.change(sleep_status=404)
        answer = front.post("/action/sleep/m")
        assert answer.status_code == 502
        assert "VLLM_SERVER_DEV_MODE=1" in answer.text


def test_endless_response_to_engine_call_is_abandoned() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n"

    async def ask(url: str) -> None:
        async with aiohttp.ClientSession() as session:
            calls, kind = EngineCalls(session), KINDS["vllm"]
            assert await calls.is_sleeping(kind, url, None, DEADLINE_S) is None
            await calls.sleep(kind, url, None, DEADLINE_S)

    with raw_engine(head, again=b" " * (1 << 20)) as url:
        asyncio.run(ask(url))


def test_deeply_nested_engine_json_is_ignored() -> None:
    body = b"[" * 50_000
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body)

    async def ask(url: str) -> None:
        async with aiohttp.ClientSession() as session:
            calls = EngineCalls(session)
            assert await calls.is_sleeping(KINDS["vllm"], url, None, DEADLINE_S) is None

    with raw_engine(head, body) as url:
        asyncio.run(ask(url))


def test_engine_with_an_instance_has_kvelastic_enabled() -> None:
    settings = parse(
        "models: [{name: m, instance: i, launch: {command: [x], port: 1}},"
        " {name: o, launch: {command: [x], port: 2}}]",
        {},
    )
    with_one, without = (
        engine_environment({}, settings, model, "key", "mark") for model in settings.models
    )
    assert (with_one["KVELASTIC_IPC_NAME"], with_one["ENABLE_KVELASTIC"]) == ("i", "true")
    assert "ENABLE_KVELASTIC" not in without


def test_ready_engine_without_its_instance_is_a_problem(tmp_path: Path) -> None:
    model = {"name": "m", "instance": f"none-{os.getpid()}", "launch": fake_launch(tmp_path)}
    with Controller({"models": [model], "sleep": {"check_every": "50ms"}}) as front:

        def problem() -> str:
            return front.get("/models").json()["models"]["m"]["last_problem"] or ""

        wait_until(lambda: "no limit is in force" in problem())
        assert front.state() == "awake"


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["vllm", "serve", "m", "--api-key", "hunter2"], "vllm"),
        (
            ["/usr/bin/python3", "-m", "http.server", "--key=hunter2"],
            "/usr/bin/python3 -m http.server",
        ),
        (["python", "app.py", "hunter2"], "python app.py"),
        (["python", "-c", "key='hunter2'"], "python"),
        ([], ""),
    ],
)
def test_program_name_hides_secret_arguments(command: list[str], shown: str) -> None:
    assert program_of(command) == shown


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","messages":[' + b'{"role":"user"},' * 10_000 + b'{"role":"user"}]}',
        b'{"model":"m","messages":[{"role":"user","images":[' + b'"",' * 10_000 + b'""]}]}',
        b'{"model":"m","prompt":"x","images":[' + b'"",' * 10_000 + b'""]}',
        b'{"model":"m","input":[' + b'"",' * 10_000 + b'""]}',
    ],
)
def test_oversized_ollama_requests_are_refused(body: bytes) -> None:
    with pytest.raises(Refusal) as caught:
        read(Call.CHAT, body)
    assert (caught.value.status, caught.value.code) == (413, "body_too_large")
