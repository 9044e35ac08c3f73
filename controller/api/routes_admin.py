"""Operators' requests to the controller itself: /admin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.routing import Route

from kvelastic.controller.api.routes import Who, route

if TYPE_CHECKING:
    from kvelastic.controller.app_state import AppState


def routes(app_state: AppState) -> list[Route]:
    """Return the routes of this module."""
    return [route(app_state, "/admin/reload", "POST", Who.ADMIN, reload_settings)]


async def reload_settings(app_state: AppState, _: Request) -> Any:
    """Reload the configuration file; 400 if it is invalid, and then nothing changes."""
    return await app_state.reload()
