"""Operators' requests to the controller itself: /admin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.routing import Route

from kvelastic.controller.api.routes import Who, route

if TYPE_CHECKING:
    from kvelastic.controller.front import Front


def routes(front: Front) -> list[Route]:
    """Return the routes of this module."""
    return [route(front, "/admin/reload", "POST", Who.ADMIN, reload_settings)]


async def reload_settings(front: Front, _: Request) -> Any:
    """Reload the configuration file; 400 if it is invalid, and then nothing changes."""
    return await front.reload()
