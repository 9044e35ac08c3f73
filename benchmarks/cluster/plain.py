"""Ray Serve alone: an ingress that reads the model's name, and a deployment for each model that
starts an engine and forwards requests to it. Ray's own router chooses the replica.

    serve.run(build({"models": [{"name": "m", "command": ["engine", "{port}"]}]}))

A model has the keys `name`, `command`, and perhaps `env`, `replicas` and `resources`; `front` may
have `resources`, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

from kvelastic.integration.ray.replica import free_port

REQUESTS = 256
_HOP_BY_HOP = frozenset(("transfer-encoding", "connection"))


class PlainEngine:
    """Starts the engine and forwards requests to it."""

    async def __init__(self, model: dict[str, Any]) -> None:  # type: ignore[misc] # Ray awaits it
        port = str(free_port())
        command = [word.replace("{port}", port) for word in model["command"]]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        self._engine = subprocess.Popen(command, env=inherited | model.get("env", {}))
        self._address = f"http://127.0.0.1:{port}"
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout())
        while not await self._is_ready():
            if self._engine.poll() is not None:
                raise RuntimeError(f"the engine ended with {self._engine.returncode}: {command}")
            await asyncio.sleep(0.05)

    async def _is_ready(self) -> bool:
        with contextlib.suppress(aiohttp.ClientConnectionError):
            async with self._session.get(f"{self._address}/health") as answer:
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
        path = request.url.path.removeprefix(request.scope["root_path"])
        target = f"{path}?{request.url.query}"
        headers = {"content-type": request.headers["content-type"]}
        parts = handle.forward.remote(request.method, target, headers, body).__aiter__()
        status, kept = await anext(parts)
        return StreamingResponse(parts, status, kept)


def build(config: Mapping[str, Any]) -> serve.Application:
    """Return the application. Starts nothing."""
    front = serve.deployment(
        PlainFront,
        max_ongoing_requests=REQUESTS,
        ray_actor_options=_options(config.get("front", {})),
    )
    return front.bind({model["name"]: _engine(model) for model in config["models"]})


def _engine(model: dict[str, Any]) -> serve.Application:
    deployment = serve.deployment(
        PlainEngine,
        name=f"PlainEngine:{model['name']}",
        num_replicas=model.get("replicas", 1),
        max_ongoing_requests=REQUESTS,
        ray_actor_options=_options(model),
    )
    return deployment.bind(model)


def _options(part: dict[str, Any]) -> dict[str, Any]:
    return {"num_cpus": 0.1, "resources": part.get("resources", {})}
