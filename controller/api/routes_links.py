"""Links between processes that copy KV from each other: /links."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.routing import Route

from kvelastic.controller.api.routes import Who, route
from kvelastic.shared import link_status
from kvelastic.shared.link_status import object_of

if TYPE_CHECKING:
    from kvelastic.controller.app_state import AppState


def routes(app_state: AppState) -> list[Route]:
    """Return the routes of this module."""
    return [route(app_state, "/links", "GET", Who.API, links)]


async def links(_: AppState, __: Request) -> Any:
    """Every node of this machine and its links, as `kvctl links --json` lists them."""
    nodes = await asyncio.to_thread(link_status.nodes)
    return {"nodes": [object_of(node) for node in nodes]}
