"""The dashboard's files at / and /dashboard, and its data: /devices/history.

The files contain no secret and need no key. The routes that they call need their usual keys.
"""

from __future__ import annotations

import hashlib
import time
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvelastic.controller.api.routes import Who, route, seconds_of
from kvelastic.controller.http.refusal import Refusal
from kvelastic.controller.models.memory_history import MAX_WINDOW_S

if TYPE_CHECKING:
    from kvelastic.controller.app_state import AppState

_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS: Final = {
    # Trusted types: the browser blocks scripts that insert text as HTML.
    "content-security-policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # Cached but revalidated each time, so a page never runs scripts of another version.
    "cache-control": "no-cache",
}


def pages(app_state: AppState) -> list[Route]:
    """Return the routes of the dashboard's files. Reads the files once, here."""
    files = DashboardFiles()

    async def index(_app_state: AppState, request: Request) -> Any:
        return files.answer(request, "index.html")

    async def file(_app_state: AppState, request: Request) -> Any:
        return files.answer(request, request.path_params["name"])

    return [
        route(app_state, "/", "GET", Who.ALL, index),
        route(app_state, "/dashboard/{name}", "GET", Who.ALL, file),
    ]


async def devices_history(app_state: AppState, request: Request) -> Any:
    """Memory of every device, by instance, in the last `seconds` (default and maximum 10 minutes).

    There is one sample every `interval_seconds`. Sample numbers restart when
    `controller_started_at` changes. A value is null if the instance did not exist.
    """
    seconds = min(seconds_of(request, "seconds", MAX_WINDOW_S), MAX_WINDOW_S)
    history = app_state.memory_history.window(seconds, now_s=time.monotonic(), wall_s=time.time())
    models = {model.instance: model.name for model in app_state.fleet}
    for device in history["devices"]:
        for instance in device["instances"]:
            instance["model"] = models.get(instance["name"])
    return {"controller_started_at": app_state.started_at, **history}


class DashboardFiles:
    """The dashboard's files, read once. The front of a cluster serves them, too."""

    def __init__(self) -> None:
        folder = resources.files("kvelastic.controller").joinpath("dashboard")
        self._files: dict[str, tuple[bytes, dict[str, str]]] = {}
        """Each file's contents and headers, by name."""
        for each in folder.iterdir():
            kind = _TYPES.get("." + each.name.rpartition(".")[2])
            if kind is not None:
                body = each.read_bytes()
                etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
                self._files[each.name] = body, {**_HEADERS, "content-type": kind, "etag": etag}

    def answer(self, request: Request, name: str) -> Response:
        """Return the response with this file. Raises `Refusal` if it does not exist."""
        if name not in self._files:
            raise Refusal(404, "not_found", "The dashboard has no such file.")
        body, headers = self._files[name]
        known = request.headers.get("if-none-match", "")
        if any(tag.strip().removeprefix("W/") == headers["etag"] for tag in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers)
