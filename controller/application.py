"""The ASGI application: what is for engines goes straight to them, the rest to the routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from kvelastic.controller import (
    metrics,
    openapi,
    routes_admin,
    routes_dashboard,
    routes_memory,
    routes_models,
    routes_sleep,
)
from kvelastic.controller.front import Front
from kvelastic.controller.refusal import Refusal
from kvelastic.controller.replies import on_refusal, refusal_response, send_refusal

Asgi = Callable[[Any, Any, Any], Awaitable[None]]

ENGINE_PATHS = frozenset(
    ("/tokenize", "/detokenize", "/rerank", "/v2/rerank", "/score", "/pooling", "/classify")
)
ENGINE_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"))


def make_application(front: Front) -> Asgi:
    """The front as an ASGI application. `front.start()` comes before its first request."""
    described = [
        *routes_models.routes(front),
        *routes_sleep.routes(front),
        *routes_memory.routes(front),
        *routes_dashboard.routes(front),
        *routes_admin.routes(front),
        *metrics.routes(front),
    ]
    pages = Starlette(
        routes=[
            *described,
            *openapi.routes(front, described),
            *routes_dashboard.pages(front),
        ],
        exception_handlers={
            HTTPException: _on_http_exception,
            Refusal: on_refusal,
            Exception: _on_error,
        },
    )
    pages.router.redirect_slashes = False

    async def application(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        path: str = scope["path"]
        if is_for_engines(path):
            if scope["method"] not in ENGINE_METHODS:
                await send_refusal(send, Refusal(405, "method_not_allowed", "Not allowed here."))
            elif _is_crooked(path):
                await send_refusal(send, Refusal(400, "invalid_path", "The path has dots in it."))
            else:
                await front.forwarder(scope, receive, send)
            return
        await pages(scope, receive, send)

    return application


def is_for_engines(path: str) -> bool:
    """Whether a path is an engine's, and not one of ours."""
    if path.startswith("/v1/"):
        return path != "/v1/models" and not path.startswith("/v1/models/")
    return path in ENGINE_PATHS


def _is_crooked(path: str) -> bool:
    """Whether an engine might read another path out of it: /v1/../sleep."""
    return "\\" in path or "/." in path or "//" in path


async def _on_http_exception(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    response = refusal_response(Refusal(error.status_code, code, error.detail))
    for key, value in (error.headers or {}).items():
        response.headers[key] = value
    return response


async def _on_error(_: Request, error: Exception) -> Response:
    return refusal_response(
        Refusal(500, "internal_error", "The controller failed; its log says where.")
    )
