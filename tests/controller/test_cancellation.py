"""A cancelled task ends, also if what it awaits completes at the same moment."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp
import pytest

from kvelastic.controller.launch.process_group import end_group
from kvelastic.controller.models.engine_calls import EngineCalls

STEPS = 40
"""More turns of the event loop than the awaited work takes."""


async def check_cancelled_at_each_step(work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """Run it STEPS times, cancelled one turn of the event loop later each time."""
    for step in range(STEPS):
        task = asyncio.ensure_future(work())
        for _ in range(step):
            await asyncio.sleep(0)
        was_cancelled = task.cancel()
        await asyncio.wait({task})
        assert task.cancelled() == was_cancelled, step


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "refused"])
def test_look_at_a_port_ends_when_cancelled(is_open: bool) -> None:
    async def run() -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            if is_open:
                listener.listen(STEPS)
            address = f"http://127.0.0.1:{listener.getsockname()[1]}"
            async with aiohttp.ClientSession() as session:
                calls = EngineCalls(session)
                await check_cancelled_at_each_step(lambda: calls.accepts_connections(address))

    asyncio.run(run())


def test_end_of_a_group_ends_when_cancelled() -> None:
    """Its leader ends at the moment of the cancellation."""

    class Leader:
        pid = 2**22 + 1  # above the kernel's largest, so that no group has it

        def __init__(self) -> None:
            self.returncode: int | None = None

        def send_signal(self, number: int) -> None:
            """It takes a while to end."""

        async def wait(self) -> None:
            await asyncio.sleep(0)
            self.returncode = 0

    asyncio.run(check_cancelled_at_each_step(lambda: end_group(Leader(), 60.0)))
