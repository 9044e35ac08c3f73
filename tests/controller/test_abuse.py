"""Clients that go away and engines that die, many at once: nobody and nothing is left over."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from running import FAKES, Controller, Engine, config_for, until
from test_launch import free_port


@pytest.mark.parametrize(
    "count", [400, pytest.param(10_000, marks=pytest.mark.soak)], ids=["some", "ten_thousand"]
)
def test_streams_cut_by_their_clients_leave_nothing(count: int) -> None:
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
        asyncio.run(all_of_them(front.url))
        until(lambda: engine.state()["in_flight"] == 0, 10)

        def left() -> tuple[int, int]:
            stats = front.get("/traffic/stats/m").json()["model_stats"]
            return stats["in_flight"], stats["queued"]

        until(lambda: left() == (0, 0), 10)
        metrics = front.get("/metrics").text
        assert "kvelastic_buffered_bytes 0.0" in metrics
        assert not [line for line in front.lines if "Traceback" in line]
        assert front.complete().status_code == 200


@pytest.mark.parametrize(
    "seconds", [4.0, pytest.param(300.0, marks=pytest.mark.soak)], ids=["short", "five_minutes"]
)
def test_engines_that_die_under_load_leave_nobody_without_an_answer(
    seconds: float, tmp_path: Path
) -> None:
    dice = random.Random(5)
    limit = aiohttp.ClientTimeout(total=15)
    models = [
        {
            "name": f"m{number}",
            "engine": "vllm",
            "timeouts": {"idle": "2s"},
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
    seen: dict[int | str, int] = {}

    async def client(session: aiohttp.ClientSession, url: str, end_s: float) -> None:
        while time.monotonic() < end_s:
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
                    if outcome == 503:
                        assert response.headers["retry-after"]
                        await asyncio.sleep(0.02)
            except aiohttp.ClientPayloadError:
                outcome = "cut"  # its engine died in the middle of its answer
            seen[outcome] = seen.get(outcome, 0) + 1

    async def killer(session: aiohttp.ClientSession, url: str, end_s: float) -> None:
        while time.monotonic() < end_s:
            await asyncio.sleep(dice.uniform(0.2, 0.8))
            async with session.get(f"{url}/admin/models/m{dice.randrange(2)}/logs") as response:
                pid = (await response.json())["pid"]
            if pid:
                os.kill(pid, 9)

    async def run(url: str) -> None:
        end_s = time.monotonic() + seconds
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(
                *(client(session, url, end_s) for _ in range(20)), killer(session, url, end_s)
            )

    with Controller({"models": models, "sleep": {"min_sleep": 0}}) as front:
        until(lambda: front.state("m0") == front.state("m1") == "awake")
        asyncio.run(run(front.url))
        assert set(seen) <= {200, 502, 503, 504, "cut"}, seen
        assert seen[200] > 0
        until(lambda: front.complete("m0").status_code == 200)
        until(lambda: front.complete("m1").status_code == 200)
        assert not [line for line in front.lines if "Traceback" in line]
        assert front.end() == 0
