"""Clients that go away and engines that die, many at once: nobody and nothing is left over."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from ports import free_port
from running import FAKES, Controller, Engine, config_for, rest_of
from waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "count", [400, pytest.param(10_000, marks=pytest.mark.soak)], ids=["some", "ten_thousand"]
)
def test_streams_cut_by_clients_leave_no_resources(count: int) -> None:
    dice = random.Random(3)

    async def cut(session: aiohttp.ClientSession, url: str, slots: asyncio.Semaphore) -> None:
        body = {"model": "m", "stream": True, "max_tokens": 50, "fake": {"token_s": 0.005}}
        async with slots:
            request = session.post(url + "/v1/completions", json=body)
            if dice.random() < 0.2:  # before its answer has begun
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(_read(request, 1000), 0.001)
            else:
                await _read(request, dice.randint(0, 5))

    async def _read(request: Any, pieces: int) -> None:
        async with request as response:
            for _ in range(pieces):
                await response.content.readline()
            response.close()

    async def all_of_them(url: str) -> None:
        slots = asyncio.Semaphore(100)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            await asyncio.gather(*(cut(session, url, slots) for _ in range(count)))

    with Engine() as engine, Controller(config_for(engine)) as front:

        def left() -> dict[str, float]:
            names = ("tasks", "buffered_bytes", 'in_flight{model="m"}', 'queued{model="m"}')
            rows = dict(
                line.rsplit(" ", 1) for line in front.get("/metrics").text.splitlines() if line
            )
            return {name: float(rows[f"kvelastic_{name}"]) for name in names}

        front.complete()
        before = left()
        asyncio.run(all_of_them(front.url))
        ended_s = time.monotonic()

        def is_nothing_left() -> bool:
            # Before, the controller may still have looked for engines of a killed one.
            return all(now <= before[name] for name, now in left().items())

        wait_until(lambda: engine.state()["in_flight"] == 0 and is_nothing_left())
        print(f"nothing left after {time.monotonic() - ended_s:.3f} s: {left()}")
        assert not [line for line in front.lines if "Traceback" in line]
        assert front.complete().status_code == 200


@pytest.mark.parametrize(
    "deaths", [6, pytest.param(400, marks=pytest.mark.soak)], ids=["short", "minutes"]
)
def test_engines_dying_under_load_fail_requests_cleanly(deaths: int, tmp_path: Path) -> None:
    dice = random.Random(5)
    limit = aiohttp.ClientTimeout(total=DEADLINE_S)
    models = [
        {
            "name": f"m{number}",
            "engine": "vllm",
            "timeouts": {"idle": "1s"},
            "queue_timeout": "5s",
            "launch": {
                "command": [
                    sys.executable,
                    str(FAKES / "engine.py"),
                    "--port={port}",
                    f"--model=m{number}",
                ],
                "port": free_port(),
                "backoff": "50ms",
                "backoff_max": "200ms",
                "log_file": str(tmp_path / f"{number}.log"),
            },
        }
        for number in range(2)
    ]
    seen: Counter[int | str] = Counter()
    is_over = False

    async def client(session: aiohttp.ClientSession, url: str) -> None:
        while not is_over:
            fake = {"hang": "first"} if dice.random() < 0.02 else {"token_s": 0.005}
            body = {
                "model": f"m{dice.randrange(2)}",
                "stream": dice.random() < 0.5,
                "fake": fake,
            }
            outcome: int | str
            try:
                async with session.post(
                    url + "/v1/completions", json=body, timeout=limit
                ) as response:
                    await response.read()
                    outcome = response.status
                    retry_after = response.headers.get("retry-after")
                if outcome == 503:
                    assert retry_after
                    await asyncio.sleep(0.02)
            except aiohttp.ClientPayloadError:
                outcome = "cut"  # its engine died in the middle of its answer
            seen[outcome] += 1

    async def killer(session: aiohttp.ClientSession, url: str) -> None:
        """Between two deaths a request is answered."""
        nonlocal is_over
        for _ in range(deaths):
            before = seen[200]
            while seen[200] == before:
                await asyncio.sleep(dice.uniform(0.1, 0.5))
            async with session.get(f"{url}/admin/models/m{dice.randrange(2)}/logs") as response:
                pid = (await response.json())["pid"]
            if not pid:
                continue
            with contextlib.suppress(ProcessLookupError):  # it may be dead just now
                if dice.random() < 0.3:  # it hangs as a whole, sockets open; some come back
                    os.kill(pid, signal.SIGSTOP)
                    await asyncio.sleep(dice.uniform(0.1, 1.5))
                    if dice.random() < 0.5:
                        os.kill(pid, signal.SIGCONT)
                        continue
                os.kill(pid, signal.SIGKILL)
        is_over = True

    async def run(url: str) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(*(client(session, url) for _ in range(20)), killer(session, url))

    with Controller({"models": models, "sleep": {"min_sleep": 0}}) as front:
        wait_until(lambda: front.state("m0") == front.state("m1") == "awake")
        asyncio.run(run(front.url))
        print(f"answers: {seen}")
        assert set(seen) <= {200, 502, 503, 504, "cut"}, seen
        assert seen[200] > 0
        wait_until(lambda: front.complete("m0").status_code == 200)
        wait_until(lambda: front.complete("m1").status_code == 200)
        assert not [line for line in front.lines if "Traceback" in line]
        assert front.end() == 0


def ask(port: int, path: str, **body: object) -> socket.socket:
    """Its answer is not read."""
    raw = json.dumps({"model": "m", **body}).encode()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)  # or the kernel takes megabytes
    sock.settimeout(DEADLINE_S)
    sock.connect(("127.0.0.1", port))
    sock.sendall(
        b"POST %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s"
        % (path.encode(), len(raw), raw)
    )
    return sock


def test_silent_engine_is_cut_but_not_slow_client() -> None:
    """The slow client reads nothing for as long as the controller waits for the silent engine."""
    with Engine() as engine:
        config = config_for(engine, model={"timeouts": {"idle": "3s"}})
        with Controller(config) as front:
            large = {"stream": True, "max_tokens": 300, "fake": {"pad": 100_000}}
            with ask(front.port, "/v1/completions", **large) as slow:
                start = slow.recv(1)
                hanging = {"stream": True, "fake": {"hang": "stream"}}
                with ask(front.port, "/v1/completions", **hanging) as sock:
                    cut = rest_of(sock)
                assert cut.startswith(b"HTTP/1.1 200")
                assert not cut.endswith(b"0\r\n\r\n")
                whole = start + rest_of(slow)
                assert len(whole) > 30_000_000, whole[:300]
                assert whole.endswith(b"0\r\n\r\n")
            wait_until(lambda: engine.state()["in_flight"] == 0)


def test_early_answered_request_closes_its_connection() -> None:
    head = b"POST /models HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
    with (
        Engine() as engine,
        Controller(config_for(engine, server={"keep_alive": "1s"})) as front,
        socket.create_connection(("127.0.0.1", front.port), timeout=DEADLINE_S) as sock,
    ):
        sock.sendall(head)
        assert sock.recv(65536).startswith(b"HTTP/1.1 405")
        sock.sendall(b"the rest")
        while sock.recv(65536):  # times out where nobody closes it
            pass
