"""Bodies on their way: aliases in every form, large ones, and the process that reads those."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from running import Controller, Engine, Program, config_for, start
from waiting import DEADLINE_S, wait_until

MIB = 1 << 20
FORM = {"content-type": "multipart/form-data; boundary=------------------------4ebf00fbcf09"}
URLENCODED = {"content-type": "application/x-www-form-urlencoded"}
JSON = {"content-type": "application/json"}


def form(name: str, file_bytes: int = 0) -> bytes:
    """As curl sends it, the file before the field."""
    line = FORM["content-type"].partition("boundary=")[2]
    return (
        f'--{line}\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n'
        f"Content-Type: audio/wav\r\n\r\nmodel={name}\r\n{'x' * file_bytes}\r\n--{line}\r\n"
        f'Content-Disposition: form-data; name="model"\r\n\r\n{name}\r\n--{line}--\r\n'
    ).encode()


def urlencoded(name: str, other_bytes: int = 0) -> bytes:
    return f"a={name}&b={'x' * other_bytes}&model={name}&model_x={name}".encode()


def json_body(name: str, other_bytes: int = 0) -> bytes:
    text = f'{{ "x": {{"model": "{name}"}}, "\\u006dodel":  "{name}", "pad":"{"x" * other_bytes}"}}'
    return text.encode()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("vllm", "org/m") as engine:
        yield engine


@pytest.fixture(scope="module")
def front(engine: Engine) -> Iterator[Controller]:
    with Controller(config_for(engine, model={"aliases": ["short"]})) as front:
        yield front


def echoed(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text[:300]
    return response.json()


def worker_of(front: Controller) -> int | None:
    """The process that reads large bodies."""
    for path in Path(f"/proc/{front.process.pid}/task").glob("*/children"):
        for child in path.read_text().split():
            if "body_worker" in Path(f"/proc/{child}/cmdline").read_text():
                return int(child)
    return None


def buffered_bytes(front: Controller) -> float:
    found = re.search(r"^kvelastic_buffered_bytes (\S+)", front.get("/metrics").text, re.M)
    assert found
    return float(found[1])


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 100_000, 3 * MIB], ids=["small", "middle", "large"])
@pytest.mark.parametrize(
    ("make", "headers", "written"),
    [(json_body, JSON, b"org/m"), (form, FORM, b"org/m"), (urlencoded, URLENCODED, b"org/m")],
    ids=["json", "multipart", "urlencoded"],
)
def test_alias_is_replaced_and_other_bytes_kept(
    front: Controller, make: Any, headers: dict[str, str], written: bytes, size: int
) -> None:
    body = make("short", size)
    sent = echoed(front.client.post("/v1/echo", content=body, headers=headers))["body"].encode()
    at = body.rindex(b"short") if make is not urlencoded else body.index(b"&model=short") + 7
    assert sent == body[:at] + written + body[at + 5 :]
    # And under its own name nothing is touched at all.
    body = make("org/m", size)
    sent = echoed(front.client.post("/v1/echo", content=body, headers=headers))["body"].encode()
    assert sent == body


def test_alias_in_the_query_is_replaced(front: Controller) -> None:
    got = echoed(front.get("/v1/echo?x=%20&model=short&y=short"))
    assert got["path"] == "/v1/echo?x=%20&model=org/m&y=short"
    sound = {"content-type": "audio/wav"}
    got = echoed(front.client.post("/v1/echo?model=short", content=b"RIFF{", headers=sound))
    assert (got["path"], got["body"]) == ("/v1/echo?model=org/m", "RIFF{")
    # The body's name counts first, and then the query is not ours.
    got = echoed(front.post("/v1/echo?model=nobody", {"model": "short"}))
    assert (got["path"], got["body"]) == ("/v1/echo?model=nobody", '{"model":"org/m"}')


def test_json_sent_as_a_form_is_read(front: Controller) -> None:
    body = b' {"model": "short"}'
    got = echoed(front.client.post("/v1/echo", content=body, headers=URLENCODED))
    assert got["body"] == ' {"model": "org/m"}'


@pytest.mark.parametrize(
    ("body", "headers", "code"),
    [
        (b'{"model":"short","x":"\\ud800"}', JSON, "invalid_json"),
        (b'{"model":"\\udc00"}', JSON, "invalid_json"),
        (b'{"model":"short","x":NaN}', JSON, "invalid_json"),
        (b'{"model":"short","x":' + b"[" * 100_000, JSON, "invalid_json"),
        (b'{"model":"short","x":' + b"[]," * MIB, JSON, "invalid_json"),
        (b"[" + b"[]," * MIB, JSON, "invalid_json"),
        (b'{"model":"' + b"x" * 2 * MIB + b'"}', JSON, "invalid_model"),
        (b'{"x":"' + b"x" * 2 * MIB + b'"}', JSON, "model_missing"),
        (b"x", {"content-type": "multipart/form-data"}, "invalid_form"),
        (b"content-disposition:" * 6_000, FORM, "invalid_form"),
        (b"content-disposition:" * 60_000, FORM, "invalid_form"),
        (b"a=b&" * 300_000, URLENCODED, "invalid_form"),
        (b"model=short&model=org/m", URLENCODED, "invalid_model"),
    ],
)
def test_unreadable_body_is_400_with_openai_error(
    front: Controller, body: bytes, headers: dict[str, str], code: str
) -> None:
    response = front.client.post("/v1/completions", content=body, headers=headers)
    assert (response.status_code, response.headers["content-type"]) == (400, "application/json")
    assert response.json()["error"]["code"] == code
    assert buffered_bytes(front) == 0


@pytest.mark.slow
def test_exception_while_forwarding_is_500_in_json(engine: Engine) -> None:
    """Whatever is raised, and by whom: the connection lives, and the log has it."""
    sabotage = (
        "import kvelastic.controller.__main__ as main\n"
        "from kvelastic.controller.routing import engine_request\n"
        "def fails(*_, **__): raise ZeroDivisionError('on purpose')\n"
        "engine_request.to_engine = fails\n"
        "main.main()\n"
    )
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "controller.yaml"
        config = config_for(engine)
        path.write_text(yaml.safe_dump(config | {"server": {"port": 0}}))
        command = [sys.executable, "-c", sabotage, "--config", str(path)]
        with Program(start(*command, environment=os.environ)) as front:
            line = json.loads(front.wait_for_line("listening on"))
            port = int(line["message"].rsplit(" ", 1)[1])
            body = b'{"model":"org/m"}'
            request = (
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s"
                % (len(body), body)
            )
            with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as sock:
                for _ in range(2):  # on one connection
                    sock.sendall(request)
                    answer = b""
                    while b'"internal_error"' not in answer:
                        piece = sock.recv(65536)
                        assert piece, answer
                        answer += piece
                    assert answer.startswith(b"HTTP/1.1 500")
                    assert b"content-type: application/json" in answer
            front.wait_for_line("on purpose")
            assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200


# ------------------------------------------------------------------- the process for large bodies


@pytest.mark.slow
def test_only_large_bodies_start_the_reader_process(engine: Engine) -> None:
    with Controller(config_for(engine)) as front:
        assert front.complete("org/m", pad="x" * 500_000).status_code == 200
        assert worker_of(front) is None
        assert front.complete("org/m", pad="x" * 2 * MIB).status_code == 200
        worker = worker_of(front)
        assert worker is not None
        assert front.complete("org/m", pad="x" * 2 * MIB).status_code == 200
        assert worker_of(front) == worker
        assert front.end() == 0
    assert not Path(f"/proc/{worker}").exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_killed_body_reader_loses_no_request(front: Controller, number: signal.Signals) -> None:
    assert front.complete("org/m", pad="x" * 2 * MIB).status_code == 200
    worker = worker_of(front)
    assert worker is not None
    os.kill(worker, number)
    assert front.complete("org/m", pad="x" * 2 * MIB).status_code == 200
    assert (worker_of(front) == worker) == (number != signal.SIGKILL)


def test_body_reader_killed_while_reading_loses_nothing(front: Controller, engine: Engine) -> None:
    front.complete("org/m", pad="x" * 2 * MIB)
    worker = worker_of(front)
    assert worker is not None
    os.kill(worker, signal.SIGSTOP)
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(front.complete, "org/m", pad="x" * 2 * MIB) for _ in range(3)]
        wait_until(lambda: buffered_bytes(front) > 6 * MIB)  # one is asked for, two wait
        assert front.complete("org/m").status_code == 200  # small ones do not
        os.kill(worker, signal.SIGKILL)
        assert [each.result().status_code for each in asked] == [200, 200, 200]
    assert worker_of(front) != worker
    assert buffered_bytes(front) == 0


@pytest.mark.slow
def test_body_reader_ends_after_controller_is_killed(engine: Engine) -> None:
    with Controller(config_for(engine)) as front:
        front.complete("org/m", pad="x" * 2 * MIB)
        worker = worker_of(front)
        assert worker is not None
        os.kill(front.process.pid, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{worker}").exists())


@pytest.mark.slow
def test_queued_large_body_is_held_once(engine: Engine) -> None:
    """No copy of a body and nothing made of it lives as long as it waits."""
    bodies, size = 3, 2 * MIB

    def held_bytes(pid: int) -> int:
        status = Path(f"/proc/{pid}/status").read_text()
        kib = re.findall(r"^(?:RssAnon|RssShmem):\s+(\d+)", status, re.M)
        files = [
            path.stat().st_size
            for path in Path(f"/proc/{pid}/fd").iterdir()
            if "memfd:kvelastic-body" in str(path.readlink())
        ]
        return sum(map(int, kib)) * 1024 + sum(files)

    with Controller(config_for(engine)) as front, ThreadPoolExecutor() as pool:
        front.complete("org/m", pad="x" * 2 * MIB)
        before = held_bytes(front.process.pid)
        fake = {"hold": "wait"}
        body = (
            json.dumps({"model": "org/m", "fake": fake})[:-1].encode()
            + b',"x":['
            + b"[]," * (size // 3)
            + b"[]]}"
        )
        # None reaches the engine before its model is awake.
        assert front.post("/action/sleep/org%2Fm").status_code == 200
        engine.change(wake_hold="wake")
        asked = [
            pool.submit(front.client.post, "/v1/completions", content=body) for _ in range(bodies)
        ]
        wait_until(lambda: buffered_bytes(front) == bodies * len(body))
        wait_until(
            lambda: front.get("/traffic/stats/org%2Fm").json()["model_stats"]["queued"] == bodies
        )
        grown = held_bytes(front.process.pid) - before
        assert grown < bodies * len(body) + 6 * MIB
        engine.release("wake")
        # What is on its way to the engine is let go of as soon as the engine has it.
        wait_until(lambda: engine.state()["in_flight"] == bodies)
        wait_until(lambda: buffered_bytes(front) == 0)
        wait_until(lambda: held_bytes(front.process.pid) - before < 6 * MIB)
        engine.release("wait")
        assert {each.result().status_code for each in asked} == {200}
    engine.reset()


def test_large_body_is_freed_after_client_disconnects(front: Controller, engine: Engine) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000000\r\n\r\n"
    with socket.create_connection(("127.0.0.1", front.port)) as sock:
        sock.sendall(head + b'{"x":"' + b"x" * 5_000_000)
        wait_until(lambda: buffered_bytes(front) > 4_000_000)
    wait_until(lambda: buffered_bytes(front) == 0)


@pytest.mark.slow
def test_engine_may_respond_before_the_whole_body(front: Controller) -> None:
    """And what is sent to it goes on: its answer is not cut."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        config = {"models": [{"name": "m", "url": f"http://127.0.0.1:{server.getsockname()[1]}"}]}
        with Controller(config) as early, ThreadPoolExecutor() as pool:
            asked = pool.submit(early.complete, "m", pad="x" * 8 * MIB)
            while True:
                sock, _ = server.accept()
                with sock:
                    data = sock.recv(65536)
                    if not data.startswith(b"POST"):  # it looks whether the engine lives
                        continue
                    sock.sendall(b"HTTP/1.1 413 X\r\nContent-Length: 7\r\n\r\nto")
                    while len(data) < 6 * MIB:
                        piece = sock.recv(MIB)
                        assert piece, "the controller has cut an answer that is not complete"
                        data += piece
                    sock.sendall(b"o big")
                    # Bytes left unread would make the kernel reset the connection, and a reset may
                    # overtake the answer (RFC 9112, section 9.6). With the whole answer the
                    # controller may end the request.
                    while not data.endswith(b"}") and (piece := sock.recv(MIB)):
                        data += piece
                    break
            assert (asked.result().status_code, asked.result().text) == (413, "too big")
            wait_until(lambda: buffered_bytes(early) == 0)


@pytest.mark.slow
def test_complete_response_during_upload_is_not_cancelled() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as pool:
        config = {"models": [{"name": "m", "url": f"http://127.0.0.1:{server.getsockname()[1]}"}]}
        with Controller(config) as early:
            asked = pool.submit(early.complete, "m", pad="x" * 32 * MIB)
            while True:
                sock, _ = server.accept()
                with sock:
                    if not sock.recv(65536).startswith(
                        b"POST"
                    ):  # it looks whether the engine lives
                        continue
                    sock.sendall(b"HTTP/1.1 413 X\r\nContent-Length: 7\r\n\r\ntoo big")
                    assert asked.result().status_code == 413
                    line = json.loads(early.wait_for_line('"kind": "request"'))
                    break
    assert (line["status"], line["bytes"], line["cancelled"]) == (413, 7, False)
