"""Logs of launched engines: their end, and what is added, for readers of any speed."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from running import Controller, fake_launch
from test_slow_clients import dial, metric
from waiting import DEADLINE_S, wait_until

from kvelastic.controller.launch.engine_log import (
    MOST_BEHIND_BYTES,
    PIECE_BYTES,
    LogReader,
    last_lines,
)

pytestmark = pytest.mark.slow


KEYS = {"api_keys": ["user"], "admin_keys": ["admin"]}
ADMIN = {"Authorization": "Bearer admin"}


# ------------------------------------------------------------------------------------- the file


def rest_of(reader: LogReader) -> bytes:
    return b"".join(iter(reader.more, b""))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def reader(path: Path) -> Iterator[LogReader]:
    reader = LogReader(path)
    yield reader
    reader.close()


def add(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


@pytest.mark.parametrize(
    ("written", "lines", "shown"),
    [
        (b"", 2, b""),
        (b"a\nb\nc\n", 2, b"b\nc\n"),
        (b"a\nb\nc", 2, b"b\nc"),
        (b"a\nb\nc\n", 3, b"a\nb\nc\n"),
        (b"a\nb\n", 9, b"a\nb\n"),
        (b"\n\n\n", 2, b"\n\n"),
    ],
)
def test_reader_returns_last_lines_and_additions(
    path: Path, reader: LogReader, written: bytes, lines: int, shown: bytes
) -> None:
    add(path, written)
    assert reader.begin(lines) == shown
    assert last_lines(path, lines) == shown.decode().splitlines()
    assert reader.more() == b""
    add(path, b"half a ")
    assert reader.more() == b"half a "
    add(path, b"line\n")
    assert reader.more() == b"line\n"


def test_last_lines_skip_a_long_first_line(path: Path) -> None:
    add(path, b"x" * (1 << 20) + b"\nlast\n")
    assert last_lines(path, 9) == ["last"]


def test_reader_follows_created_truncated_and_replaced_files(path: Path, reader: LogReader) -> None:
    assert reader.begin(5) == reader.more() == b""
    add(path, b"first\n")
    assert reader.more() == b"first\n"
    path.write_bytes(b"2\n")
    assert reader.more() == b"2\n"
    add(path, b"rest of the old one\n")
    path.rename(path.with_suffix(".1"))
    assert reader.more() == b"rest of the old one\n"
    assert reader.more() == b""
    add(path, b"the new one\n")
    assert reader.more() == b""  # it is seen that there is another one
    assert reader.more() == b"the new one\n"


def test_reads_after_close_return_nothing(path: Path, reader: LogReader) -> None:
    """Of a task that was cancelled: it must touch no descriptor that is another one's by now."""
    add(path, b"a\n")
    assert reader.begin(1) == b"a\n"
    add(path, b"b\n")
    reader.close()
    reader.close()
    assert reader.begin(1) == reader.more() == b""


def test_disconnected_followers_leave_no_descriptors(front: Controller) -> None:
    def come_and_go(_: int) -> None:
        with socket.create_connection(("127.0.0.1", front.port)) as sock:
            sock.sendall(
                b"GET /models/m/logs?follow=true HTTP/1.1\r\nHost: x\r\n"
                b"Authorization: Bearer admin\r\n\r\n"
            )

    log = front.get("/admin/models/m/logs").json()["file"]
    process = psutil.Process(front.process.pid)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(come_and_go, range(200)))
    wait_until(lambda: metric(front, "log_followers") == 0)
    wait_until(lambda: log not in {each.path for each in process.open_files()})


def test_slow_reader_skips_ahead_and_reports_bytes(path: Path, reader: LogReader) -> None:
    add(path, b"half a ")
    begun = reader.begin(1)
    line = b"%063d\n"
    add(path, b"".join(line % number for number in range(MOST_BEHIND_BYTES // 64 + 1)))
    first = reader.more()
    note, _, after = first.partition(b"too fast]\n")
    assert note.startswith(b"\n[")  # on a line of its own
    missed = int(note[2:].split()[0])
    shown = after + rest_of(reader)
    assert len(begun) + missed + len(shown) == path.stat().st_size
    assert shown.endswith(line % (MOST_BEHIND_BYTES // 64))
    assert shown.splitlines()[0].isdigit()
    assert len(shown.splitlines()[0]) == 63
    assert len(first) < PIECE_BYTES + 200


# ------------------------------------------------------------------------------------ the route


def launched(folder: Path, **launch: Any) -> dict[str, Any]:
    return {"name": "m", "launch": fake_launch(folder, "--kind=openai", **launch)}


def say(model: dict[str, Any], text: str, lines: int = 1) -> None:
    url = f"http://127.0.0.1:{model['launch']['port']}/fake/say"
    httpx.post(url, json={"lines": lines, "text": text}, timeout=DEADLINE_S).raise_for_status()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return launched(tmp_path_factory.mktemp("logs"))


@pytest.fixture(scope="module")
def front(model: dict[str, Any]) -> Iterator[Controller]:
    config = {"models": [model], "auth": KEYS, "server": {"send_timeout": "8s"}}
    with Controller(config) as front:
        front.client.headers.update(ADMIN)
        wait_until(lambda: front.state() == "awake")
        yield front


def test_log_is_followed_line_by_line(model: dict[str, Any], front: Controller) -> None:
    say(model, "before", 3)
    with front.client.stream("GET", "/models/m/logs?lines=2&follow=true") as response:
        assert response.headers["content-type"] == "text/plain; charset=utf-8"
        lines = response.iter_lines()
        assert [next(lines), next(lines)] == ["before 1", "before 2"]
        for number in range(3):
            say(model, f"after-{number}")
            assert next(lines) == f"after-{number} 0"
        assert metric(front, "log_followers") == 1
    wait_until(lambda: metric(front, "log_followers") == 0)


def test_log_without_follow_ends(model: dict[str, Any], front: Controller) -> None:
    say(model, "line", 3)
    assert front.get("/models/m/logs?lines=2").text == "line 1\nline 2\n"
    assert front.client.head("/models/m/logs").status_code == 200
    long = f"lines=005000{'0' * 5000}"
    for wrong in ("lines=0", "lines=9999", "lines=0050009", long, "lines=x", "follow=yes"):
        assert front.get(f"/models/m/logs?{wrong}").status_code == 400
    assert front.get("/models/nobody/logs").status_code == 404


def test_an_admin_key_is_needed(front: Controller) -> None:
    for key, status in (("user", 403), ("nobody's", 401)):
        headers = {"Authorization": f"Bearer {key}"}
        assert front.get("/models/m/logs", headers=headers).status_code == status


def test_stalled_follower_is_cut_without_blocking_engine(
    model: dict[str, Any], front: Controller
) -> None:
    """The engine writes 5 MB again and again, while nothing is read."""
    cut = metric(front, "send_timeouts_total")
    impatient = front.first_config | {"server": {"send_timeout": "300ms"}}
    with front.reloaded(impatient), dial(front.port) as sock:
        sock.sendall(
            b"GET /models/m/logs?follow=true HTTP/1.1\r\nHost: localhost\r\n"
            b"Authorization: Bearer admin\r\n\r\n"
        )
        assert sock.recv(1)

        def gone() -> bool:
            say(model, "x" * 500, 10_000)
            assert front.complete().status_code == 200
            return metric(front, "send_timeouts_total") == cut + 1

        wait_until(gone)
        with suppress(ConnectionError):
            while sock.recv(1 << 20):
                pass
    wait_until(lambda: metric(front, "log_followers") == 0)
    # Who reads all the time is told what is left out, or gets all of it.
    with (
        ThreadPoolExecutor(1) as threads,
        front.client.stream("GET", "/models/m/logs?lines=1&follow=true") as response,
    ):
        lines = response.iter_lines()
        next(lines)
        threads.submit(say, model, "y" * 500, 20_000)
        seen = next(line for line in lines if line.endswith(" 19999"))
        assert seen == "y" * 500 + " 19999"


def test_number_of_followers_is_limited(front: Controller) -> None:
    """All at once: each was counted when its answer began, and all were let in."""
    socks: list[socket.socket] = []
    try:
        address = ("127.0.0.1", front.port)
        socks += [socket.create_connection(address, DEADLINE_S) for _ in range(96)]
        for sock in socks:
            sock.sendall(
                b"GET /models/m/logs?follow=true HTTP/1.1\r\nHost: x\r\n"
                b"Authorization: Bearer admin\r\n\r\n"
            )
        assert sorted(sock.recv(12)[-3:] for sock in socks) == [b"200"] * 32 + [b"503"] * 64
        wait_until(lambda: metric(front, "log_followers") == 32)
        answer = front.get("/models/m/logs")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "too_many_followers")
    finally:
        for sock in socks:
            sock.close()
    wait_until(lambda: metric(front, "log_followers") == 0)


def test_following_survives_engine_restart_and_ends_with_controller(tmp_path: Path) -> None:
    model = launched(tmp_path, on_demand=True)
    with (
        Controller({"models": [model]}) as front,
        httpx.Client(base_url=front.url, timeout=DEADLINE_S) as client,
        client.stream("GET", "/models/m/logs?follow=true") as response,
    ):
        lines = response.iter_lines()
        for _ in range(2):
            assert front.complete().status_code == 200
            assert next(lines) == f"ready {model['launch']['port']}"
            assert front.post("/action/sleep/m").json()["success"]
        front.send(15)
        assert list(lines) == []
        assert front.wait() == 0
