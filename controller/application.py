"""The ASGI application. Engines' paths go to the forwarder, all others to the table of routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from kvelastic.controller.api import (
    metrics,
    openapi,
    routes_dashboard,
    routes_logs,
    routes_memory,
    routes_models,
    routes_sleep,
    routes_tiers,
)
from kvelastic.controller.api.routes import Handler, Who, route
from kvelastic.controller.app_state import AppState
from kvelastic.controller.http.engine_paths import (
    ENGINE_METHODS,
    is_crooked,
    is_for_engines,
    is_ollama,
    is_upstream,
)
from kvelastic.controller.http.headers import Headers
from kvelastic.controller.http.refusal import Refusal
from kvelastic.controller.http.replies import on_refusal, refusal_response, send_refusal
from kvelastic.controller.routing.ollama import OllamaApi
from kvelastic.controller.routing.realtime import Realtime
from kvelastic.controller.routing.upstream import to_upstream

Asgi = Callable[[Any, Any, Any], Awaitable[None]]

ROUTES: Final[tuple[tuple[str, str, Who, Handler], ...]] = (
    ("GET", "/v1/models", Who.API, routes_models.list_openai_models),
    ("GET", "/v1/models/{model:path}", Who.API, routes_models.get_openai_model),
    ("GET", "/health", Who.ALL, routes_models.health),
    ("GET", "/health/{model:path}", Who.API, routes_models.model_health),
    ("GET", "/models", Who.API, routes_models.list_models),
    ("GET", "/models/idle", Who.API, routes_models.idle_models),
    ("GET", "/models/active", Who.API, routes_models.active_models),
    ("GET", "/traffic/stats", Who.API, routes_models.traffic_stats),
    ("GET", "/traffic/stats/{model:path}", Who.API, routes_models.model_traffic_stats),
    ("GET", "/version", Who.ALL, routes_models.version),
    ("GET", "/admin/models/{model:path}/logs", Who.ADMIN, routes_logs.engine_logs),
    ("GET", "/models/{model:path}/logs", Who.ADMIN, routes_logs.follow_log),
    ("GET", "/sleep/status", Who.API, routes_sleep.sleep_status),
    ("GET", "/sleep/candidates", Who.API, routes_sleep.sleep_candidates),
    ("POST", "/action/sleep/{model:path}", Who.ADMIN, routes_sleep.put_to_sleep),
    ("POST", "/action/wakeup/{model:path}", Who.ADMIN, routes_sleep.wake_up),
    ("PATCH", "/memory/{model:path}/tiers/{tier}", Who.ADMIN, routes_tiers.change_tier),
    ("POST", "/memory/{model:path}/tiers/{tier}/trim", Who.ADMIN, routes_tiers.trim_tier),
    ("POST", "/memory/{model:path}/tiers/clear", Who.ADMIN, routes_tiers.clear_tiers),
    ("POST", "/memory/{model:path}/tiers/erase", Who.ADMIN, routes_tiers.erase_records),
    ("POST", "/memory/{model:path}/tiers/verify", Who.ADMIN, routes_tiers.verify_tiers),
    ("GET", "/links", Who.API, routes_memory.links),
    # After the routes of tiers, which these would match as a model's name with slashes.
    ("GET", "/memory", Who.API, routes_memory.all_memory),
    ("POST", "/memory/{model:path}/trim", Who.ADMIN, routes_memory.trim),
    ("GET", "/memory/{model:path}", Who.API, routes_memory.memory_of),
    ("PATCH", "/memory/{model:path}", Who.ADMIN, routes_memory.change_memory),
    ("GET", "/devices", Who.API, routes_memory.devices),
    ("GET", "/devices/history", Who.API, routes_dashboard.devices_history),
    ("POST", "/admin/reload", Who.ADMIN, routes_models.reload_settings),
    ("GET", "/metrics", Who.API, metrics.metrics),
)
"""Method, path, authorization and handler, in the order in which they are matched. /openapi.json
describes them."""


def make_application(app_state: AppState) -> Asgi:
    """Return the ASGI application. Call `app_state.start()` before its first request."""
    described = [route(app_state, path, method, who, do) for method, path, who, do in ROUTES]
    pages = Starlette(
        routes=[
            *described,
            *openapi.routes(app_state, described),
            *routes_dashboard.pages(app_state),
        ],
        exception_handlers={
            HTTPException: _on_http_exception,
            Refusal: on_refusal,
            Exception: _on_error,
        },
    )
    pages.router.redirect_slashes = False
    ollama = OllamaApi(app_state)
    realtime = Realtime(app_state)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await realtime(scope, receive, send)
        elif scope["type"] == "http":
            await http(scope, receive, send)

    async def http(scope: Any, receive: Any, send: Any) -> None:
        if app_state.origins.allows_any:
            allowed = app_state.origins.preflight(scope)
            send = _sending(send, app_state.origins.cors(scope["headers"]))
            if allowed is not None:
                await send({"type": "http.response.start", "status": 204, "headers": allowed})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
        path: str = scope["path"]
        if is_for_engines(path):
            if scope["method"] not in ENGINE_METHODS:
                refusal = Refusal(405, "method_not_allowed", "Not allowed here.")
                await send_refusal(send, refusal, path)
            elif is_crooked(path):
                refusal = Refusal(400, "invalid_path", "The path has dots or escapes in it.")
                await send_refusal(send, refusal, path)
            else:
                await app_state.forwarder(scope, receive, send)
        elif is_upstream(path):
            await upstream(scope, receive, send)
        elif is_ollama(path):
            await ollama(scope, receive, send)
        else:
            await pages(scope, receive, send)

    async def upstream(scope: Any, receive: Any, send: Any) -> None:
        try:
            asked = to_upstream(scope, app_state.fleet, app_state.keys)
        except Refusal as refusal:
            await send_refusal(send, refusal, scope["path"])
        else:
            await app_state.forwarder(asked, receive, send)

    return application


def _sending(send: Any, more: Headers) -> Any:
    """Return a `send` that adds headers to every response."""

    async def send_on(message: Any) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *more]}
        await send(message)

    return send_on


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
