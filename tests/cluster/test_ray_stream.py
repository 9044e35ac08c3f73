"""A response on its way from Ray to the front, with a generator in the place of Ray's."""

from __future__ import annotations

import subprocess

import needs
import pytest
from waiting import DEADLINE_S

READ = """
import asyncio
from types import SimpleNamespace

from kvelastic.integration.ray.front import _MOST_PARTS, _RayStream
from kvelastic.integration.ray.messages import EngineRequest
from kvelastic.integration.ray.watch import Watch


async def read():
    ended = asyncio.Event()

    async def parts():
        for _ in range(_MOST_PARTS):
            yield b"x"
        ended.set()

    handle = SimpleNamespace(forward=SimpleNamespace(remote=lambda request: parts()))
    watch = Watch(1.0, 1.0)
    stream = _RayStream(handle, watch, EngineRequest("POST", "/"), 1e6)
    await ended.wait()  # the queue is full
    watch.look(["r"], 2.0)  # the replica falls silent
    await asyncio.sleep(0)
    print(len([part async for part in stream]))


asyncio.run(read())
"""


@pytest.mark.slow
@needs.ray
def test_response_ends_if_its_replica_falls_silent() -> None:
    """All of it has arrived, and the client has read none of it."""
    done = subprocess.run(
        [str(needs.RAY_PYTHON), "-c", READ],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "64\n"), done.stderr
