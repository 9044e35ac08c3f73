"""The configuration is read again while a launched engine still ends its requests."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from running import Controller, app_state
from test_launch import launched, pid_of
from waiting import DEADLINE_S

from kvelastic.controller.models.gate import Ticket

pytestmark = pytest.mark.slow

NO_MODELS: dict[str, Any] = {"models": []}


def of_generation(config: dict[str, Any], generation: str) -> dict[str, Any]:
    """The configuration with other launch settings: the engine is replaced, on the same port."""
    (model,) = config["models"]
    launch = model["launch"] | {"env": {"GENERATION": generation}}
    return {"models": [model | {"launch": launch}]}


@contextmanager
def streaming(front: Controller, config: dict[str, Any]) -> Iterator[None]:
    """Run the body during a stream, which must end as if nothing had happened."""
    body = {"model": "m", "stream": True, "fake": {"hold": "h"}}
    with front.client.stream("POST", "/v1/completions", json=body) as response:
        pieces = response.iter_raw()
        first = next(pieces)
        yield
        port = config["models"][0]["launch"]["port"]
        httpx.post(f"http://127.0.0.1:{port}/fake/release?name=h").raise_for_status()
        assert b"[DONE]" in first + b"".join(pieces)


def reload_to(front: Controller, config: dict[str, Any]) -> None:
    front.write(config)
    front.post("/admin/reload").raise_for_status()


def check_not_launched(front: Controller) -> None:
    assert front.get("/admin/models/m/logs").json()["error"]["code"] == "not_launched"


def check_port_was_free(front: Controller) -> None:
    assert not [line for line in front.lines if "is taken by" in line]


def test_two_reloads_during_a_drain_launch_one(tmp_path: Path) -> None:
    config = launched(tmp_path)
    with Controller(config) as front:
        with streaming(front, config):
            reload_to(front, of_generation(config, "1"))
            reload_to(front, of_generation(config, "2"))
            check_not_launched(front)
        assert front.complete().status_code == 200
        engine = psutil.Process(pid_of(front))
        assert engine.environ()["GENERATION"] == "2"
        check_port_was_free(front)
        assert front.end() == 0
    assert not engine.is_running()


def test_model_added_again_waits_for_its_drain(tmp_path: Path) -> None:
    config = launched(tmp_path)
    with Controller(config) as front:
        assert front.complete().status_code == 200
        drained = pid_of(front)
        with streaming(front, config):
            reload_to(front, NO_MODELS)
            reload_to(front, config)
            check_not_launched(front)
        assert front.complete().status_code == 200
        assert pid_of(front) != drained
        check_port_was_free(front)
        assert front.end() == 0


def test_ended_engine_of_removed_model_stays_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its model still sends an answer to a slow client, and another one may have its port."""
    caplog.set_level(logging.WARNING, "kvelastic.controller")

    async def serve() -> None:
        ticket = Ticket()
        async with app_state(launched(tmp_path), NO_MODELS) as front:
            await front.fleet.need("m").enter(ticket)
            (process,) = front.processes.values()
            await front.reload()
            assert process.pid
            os.kill(process.pid, signal.SIGKILL)
            while not (said := [text for text in caplog.messages if "ended with -9" in text]):
                await asyncio.sleep(0.001)
            assert said == ["the engine ended with -9"]
            ticket.model.leave(ticket)
        assert process.starts == 1

    asyncio.run(asyncio.wait_for(serve(), DEADLINE_S))


def test_shutdown_during_a_drain_launches_nothing(tmp_path: Path) -> None:
    config = launched(tmp_path)

    async def serve() -> None:
        ticket = Ticket()
        async with app_state(config, of_generation(config, "1")) as front:
            await front.fleet.need("m").enter(ticket)
            await front.reload()
            front.refuse_new()
            ticket.model.leave(ticket)
        assert not front.processes

    asyncio.run(asyncio.wait_for(serve(), DEADLINE_S))
