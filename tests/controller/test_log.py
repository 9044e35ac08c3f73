"""The log: nobody waits for who reads it, and what could not be written is counted."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

import httpx
import pytest
import yaml
from ports import free_port
from processes import run_python
from running import Engine, config_for
from waiting import DEADLINE_S, wait_until

from kvelastic.controller.http.log_writer import LogWriter
from kvelastic.controller.http.request_log import JsonFormatter, RequestLog

SMALL_PIPE_BYTES = 4096
F_SETPIPE_SZ = 1031


@contextmanager
def writer_of_a_pipe(most_waiting_bytes: int) -> Iterator[tuple[LogWriter, int]]:
    """A writer, and the end that can be read."""
    read, write = os.pipe()
    fcntl.fcntl(write, F_SETPIPE_SZ, SMALL_PIPE_BYTES)
    try:
        yield LogWriter(write, most_waiting_bytes=most_waiting_bytes), read
    finally:
        os.close(read)


def rest_of(fd: int) -> list[str]:
    """Lines until the other end closes."""
    return b"".join(iter(lambda: os.read(fd, 65536), b"")).decode().splitlines()


def test_lines_keep_their_order() -> None:
    with writer_of_a_pipe(1 << 20) as (writer, read):
        wanted = [f"line {number}" for number in range(5000)]
        found: list[str] = []
        reader = threading.Thread(target=lambda: found.extend(rest_of(read)))
        reader.start()
        for number, line in enumerate(wanted):
            writer.write(line, at_once=number % 100 == 0)
        writer.close(DEADLINE_S)
        reader.join()
        assert found == wanted
        assert writer.dropped_lines == 0


def test_times_are_iso_8601_in_utc() -> None:
    with writer_of_a_pipe(1 << 20) as (writer, read):
        before = datetime.now(timezone.utc)
        RequestLog(writer).write({"path": "/v1/completions"})
        record = logging.LogRecord("kvelastic", logging.INFO, "", 0, "asleep", (), None)
        record.created = before.timestamp()
        writer.write(JsonFormatter().format(record))
        writer.close(DEADLINE_S)
        request, event = (json.loads(line) for line in rest_of(read))
    assert event["time"] == before.isoformat(timespec="milliseconds")
    assert event["time"].endswith("+00:00")
    assert request["time"] >= event["time"]


def test_unread_lines_are_dropped_and_counted() -> None:
    with writer_of_a_pipe(100_000) as (writer, read):
        wanted = [f"line {number:06}" for number in range(50_000)]
        for line in wanted:
            writer.write(line)
        dropped = writer.dropped_lines
        assert dropped >= len(wanted) - 100_000 // len(wanted[0]) - 1
        found: list[str] = []
        reader = threading.Thread(target=lambda: found.extend(rest_of(read)))
        reader.start()
        writer.close(DEADLINE_S)
        reader.join()
        *lines, last = found
        assert lines == wanted[: len(wanted) - dropped]
        assert f"{dropped} lines of this log were dropped" in json.loads(last)["message"]


def test_close_does_not_wait_for_a_stalled_reader() -> None:
    with writer_of_a_pipe(100_000) as (writer, read):
        for _ in range(1000):
            writer.write("x" * 50)
        writer.close(0.05)
        reader = threading.Thread(target=rest_of, args=[read])
        reader.start()
        reader.join()


def test_non_blocking_stream_loses_no_lines() -> None:
    with writer_of_a_pipe(1 << 20) as (writer, read):
        os.set_blocking(writer._fd, False)  # type: ignore[arg-type]
        for _ in range(1000):
            writer.write("x" * 50, at_once=True)
        found: list[str] = []
        reader = threading.Thread(target=lambda: found.extend(rest_of(read)))
        reader.start()
        writer.close(DEADLINE_S)
        reader.join()
        assert found == ["x" * 50] * 1000


def test_truncated_line_does_not_corrupt_the_next(tmp_path: Path) -> None:
    """As on a disk that is full, and then has room again."""
    log = tmp_path / "log"
    program = (
        "import resource, signal, sys, threading\n"
        "from kvelastic.controller.http.log_writer import LogWriter\n"
        "import os\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "fd = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY | os.O_APPEND)\n"
        "def limit(size_bytes):\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))\n"
        "limit(15)\n"
        "with LogWriter(fd) as writer:\n"
        "    def write(line):\n"
        "        writer.write(line, at_once=True)\n"
        "    write('first line'); write('second line'); write('third line')\n"
        "    while writer.dropped_lines < 2: pass\n"
        "    limit(resource.RLIM_INFINITY)\n"
        "    write('fourth line')\n"
        "print(writer.dropped_lines)\n"
    )
    assert run_python("-c", program, log).stdout == "2\n"
    first, half, *told = log.read_text().splitlines()
    assert (first, half) == ("first line", "seco")
    notes = [json.loads(line)["message"] for line in told if line.startswith("{")]
    assert [line for line in told if not line.startswith("{")] == ["fourth line"]
    assert len(notes) == 1
    assert notes[0].startswith("2 lines")


@contextmanager
def controller(
    engine: Engine, folder: Path, port: int, stderr: int
) -> Iterator[subprocess.Popen[bytes]]:
    path = folder / "controller.yaml"
    path.write_text(yaml.safe_dump(config_for(engine, server={"port": port})))
    process = subprocess.Popen(
        [sys.executable, "-m", "kvelastic.controller", "--config", str(path)],
        stdin=subprocess.DEVNULL,
        stderr=stderr,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_unread_stderr_blocks_neither_requests_nor_shutdown(tmp_path: Path) -> None:
    port = free_port()
    read, write = os.pipe()
    fcntl.fcntl(write, F_SETPIPE_SZ, SMALL_PIPE_BYTES)
    with Engine() as engine, controller(engine, tmp_path, port, write) as process:
        os.close(write)
        said = b""
        while b"listening on" not in said:
            said += os.read(read, 4096)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S) as client:
            body = {"model": "m", "prompt": "x"}
            for number in range(60):
                assert client.post("/v1/completions", json=body).status_code == 200
                if number % 10 == 0:  # says so in the log
                    assert client.post("/admin/reload").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
    lines = rest_of(read)
    os.close(read)
    assert lines
    assert all(json.loads(line) for line in lines[:-1])  # the last one was being written


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "closed"])
def test_lost_lines_are_counted_in_metrics(tmp_path: Path, kind: str) -> None:
    port = free_port()
    if kind == "full":
        stderr = os.open("/dev/full", os.O_WRONLY)
    else:
        read, stderr = os.pipe()
        os.close(read)
    with Engine() as engine, controller(engine, tmp_path, port, stderr) as process:
        os.close(stderr)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S) as client:

            def dropped() -> float:
                text = client.get("/metrics").text
                found = next(
                    line
                    for line in text.splitlines()
                    if line.startswith("kvelastic_log_dropped_lines_total")
                )
                return float(found.split()[1])

            def is_up() -> bool:
                try:
                    return client.get("/health").status_code == 200
                except httpx.TransportError:
                    return False

            wait_until(is_up)
            for _ in range(5):
                assert client.post("/v1/completions", json={"model": "m"}).status_code == 200
            wait_until(lambda: dropped() >= 6)  # with the line that says where it listens
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
