"""The two applications that are measured; they end with this program.

    .venv-ray/bin/python -m benchmarks.cluster.apps ENGINE_PYTHON PORT      # prints `ready`

/         kvelastic: KvFront, KvRouter and a KvEngine, as `build` makes them
/plain    Ray alone: an ingress that reads the model's name, Ray's own router, and a deployment that
          starts the same engine and forwards to it
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

from kvelastic.integration.ray.app import build
from kvelastic.integration.ray.replica import free_port

MODEL = "m"
REQUESTS = 256
_ENGINE = "benchmarks.router.engine"
_HOP_BY_HOP = frozenset(("transfer-encoding", "connection"))


class PlainEngine:
    """Starts the engine and forwards requests to it."""

    async def __init__(self, python: str) -> None:  # type: ignore[misc] # Ray awaits it
        port = free_port()
        self._engine = subprocess.Popen([python, "-m", _ENGINE, str(port)])
        self._address = f"http://127.0.0.1:{port}"
        self._session = aiohttp.ClientSession()
        while not await self._is_ready():
            await asyncio.sleep(0.05)

    async def _is_ready(self) -> bool:
        with contextlib.suppress(aiohttp.ClientConnectionError):
            async with self._session.get(self._address) as answer:
                return answer.ok
        return False

    async def forward(
        self, method: str, target: str, headers: dict[str, str], body: bytes
    ) -> AsyncIterator[Any]:
        """Yield status and headers, then the body as it comes."""
        url = self._address + target
        async with self._session.request(method, url, headers=headers, data=body) as answer:
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in _HOP_BY_HOP}
            yield answer.status, kept
            async for piece in answer.content.iter_any():
                yield piece

    def __del__(self) -> None:
        self._engine.terminate()


class PlainFront:
    """Sends a request to the deployment of its model."""

    def __init__(self, models: dict[str, Any]) -> None:
        self._models = {name: handle.options(stream=True) for name, handle in models.items()}

    async def __call__(self, request: Request) -> StreamingResponse:
        body = await request.body()
        handle = self._models[json.loads(body)["model"]]
        target = f"/v1/chat/completions?{request.url.query}"
        headers = {"content-type": request.headers["content-type"]}
        parts = handle.forward.remote(request.method, target, headers, body).__aiter__()
        status, kept = await anext(parts)
        return StreamingResponse(parts, status, kept)


def main(python: str, port: int) -> None:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port, "location": "HeadOnly"})
    model = {
        "name": MODEL,
        "command": [python, "-m", _ENGINE, "{port}"],
        "num_cpus": 0.1,
        "most_requests": REQUESTS,
    }
    serve.run(build({"models": [model]}), name="kvelastic", route_prefix="/")
    options = {"max_ongoing_requests": REQUESTS, "ray_actor_options": {"num_cpus": 0.1}}
    front, engine = (serve.deployment(each, **options) for each in (PlainFront, PlainEngine))
    serve.run(front.bind({MODEL: engine.bind(python)}), name="plain", route_prefix="/plain")
    print("ready", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
