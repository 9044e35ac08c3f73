"""What only an operator may do to the controller itself: /admin."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.routing import Route

from kvelastic.controller.refusal import Refusal
from kvelastic.controller.routes import Who, route

if TYPE_CHECKING:
    from kvelastic.controller.front import Front

MOST_LINES = 5000


def routes(front: Front) -> list[Route]:
    """Of this page."""
    return [
        route(front, "/admin/reload", "POST", Who.ADMIN, reload_settings),
        route(front, "/admin/models/{model:path}/logs", "GET", Who.ADMIN, engine_logs),
    ]


async def engine_logs(front: Front, request: Request) -> Any:
    """The last `lines` (200; at most 5000) of what a launched engine has written."""
    model = front.fleet.need(request.path_params["model"])
    process = front.processes.get(model)
    if process is None:
        raise Refusal(404, "not_launched", "This model's engine is not launched here.")
    text = request.query_params.get("lines", "200")
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:6]) <= MOST_LINES):
        raise Refusal(400, "invalid_value", f"lines is 1 to {MOST_LINES}.", param="lines")
    return {
        "model": model.name,
        "state": model.gate.state.value,
        "pid": process.pid,
        "starts": process.starts,
        "file": str(process.log_path),
        "lines": await asyncio.to_thread(process.last_lines, int(text)),
    }


async def reload_settings(front: Front, _: Request) -> Any:
    """Read the configuration file again; 400 if it has a fault, and then nothing has changed."""
    return await front.reload()
