"""/openapi.json and /docs: descriptions of the routes, for programs and for people."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import BaseRoute, Route

from kvelastic import __version__
from kvelastic.controller.api.routes import Who, route
from kvelastic.units import MAX_PRIORITY

if TYPE_CHECKING:
    from kvelastic.controller.app_state import AppState

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
_SIZE = {"oneOf": [{"type": "integer", "minimum": 0}, {"type": "string"}]}
_WAIT = {"oneOf": [{"type": "number", "minimum": 0, "maximum": 600}, {"type": "string"}]}
_AGE = {"type": "string"}


def _asks(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    """Return the schema of the body of a request to tiers."""
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {**properties, "wait": _WAIT},
        "required": list(required),
    }


_BODIES: dict[tuple[str, str], dict[str, Any]] = {
    ("/memory/{model}", "patch"): {
        "type": "object",
        "additionalProperties": False,
        "minProperties": 1,
        "properties": {
            "min": _SIZE,
            "limit": _SIZE,
            "priority": {"type": "integer", "minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY},
            "wait": _WAIT,
        },
    },
    ("/memory/{model}/trim", "post"): {"type": "object", "properties": {"wait": _WAIT}},
    ("/memory/{model}/tiers/{tier}", "patch"): _asks({"limit": _SIZE}, "limit"),
    ("/memory/{model}/tiers/{tier}/trim", "post"): _asks({"size": _SIZE}, "size"),
    ("/memory/{model}/tiers/clear", "post"): _asks({}),
    ("/memory/{model}/tiers/erase", "post"): {
        **_asks({"model": {"type": "string", "minLength": 1}, "older_than": _AGE}),
        "minProperties": 1,
    },
    ("/memory/{model}/tiers/verify", "post"): _asks({}),
}
_QUERIES: dict[str, tuple[str, ...]] = {
    "/traffic/stats": ("window",),
    "/traffic/stats/{model}": ("window",),
    "/devices/history": ("seconds",),
    "/models/idle": ("threshold",),
    "/models/active": ("threshold", "window"),
    "/admin/models/{model}/logs": ("lines",),
    "/models/{model}/logs": ("lines", "follow"),
}
_MODEL_PARAMETER = {
    "name": "model",
    "in": "path",
    "required": True,
    "description": "Name or alias, its slashes encoded or not.",
    "schema": {"type": "string", "minLength": 1},
}
_ENGINE_ROUTES = {
    "/v1/completions": "Completions.",
    "/v1/chat/completions": "Chat completions.",
    "/v1/embeddings": "Embeddings.",
    "/v1/responses": "Responses.",
    "/v1/rerank": "Rerank.",
    "/v1/score": "Score.",
    "/v1/messages": "Anthropic's messages.",
    "/tokenize": "Tokens of a text.",
    "/detokenize": "The text of tokens.",
}
_OLLAMA_ROUTES = {
    "/api/chat": ("post", "Chat", "its engine answers, in lines of JSON unless `stream` is false"),
    "/api/generate": ("post", "Generate", "its engine answers, in lines unless `stream` is false"),
    "/api/embed": ("post", "Embeddings of one text or several", "its engine answers"),
    "/api/embeddings": ("post", "An embedding, in the older shape", "its engine answers"),
    "/api/show": ("post", "A model", "what the configuration says of it"),
    "/api/tags": ("get", "Models", "all that are served"),
    "/api/ps": ("get", "Models that are awake", "with their memory and the time of their sleep"),
    "/api/version": ("get", "Which version this is", "open to everybody"),
}


def routes(app_state: AppState, described: list[Route]) -> list[BaseRoute]:
    """Return the routes of this module, which describe the routes in `described`."""
    document = describe(described)

    async def openapi(_app_state: AppState, _: Request) -> Any:
        """OpenAPI document of the controller's routes."""
        return document

    async def docs(_app_state: AppState, _: Request) -> Any:
        """The controller's routes as a web page."""
        return HTMLResponse(
            _page(document),
            headers={"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"},
        )

    return [
        route(app_state, "/openapi.json", "GET", Who.ALL, openapi),
        route(app_state, "/docs", "GET", Who.ALL, docs),
    ]


def describe(described: list[Route]) -> dict[str, Any]:
    """Return the OpenAPI document of these routes and of the engines' routes."""
    paths: dict[str, Any] = {}
    for each in described:
        path = each.path.replace(":path", "")
        for method in (each.methods or set()) - {"HEAD"}:
            paths.setdefault(path, {})[method.lower()] = _operation(each, path, method.lower())
    for path, summary in _ENGINE_ROUTES.items():
        body = {
            "type": "object",
            "required": ["model"],
            "properties": {"model": {"type": "string"}},
        }
        paths[path] = {
            "post": {
                "summary": f"{summary} The model's engine answers it.",
                "operationId": "engine" + path.replace("/", "_"),
                "requestBody": _json(body, required=True),
                "responses": {
                    "200": {"description": "The engine's answer."},
                    "default": {"description": "An error.", **_json(_ERROR)},
                },
                "security": [{"key": []}],
            }
        }
    paths["/v1/realtime"] = {"get": _realtime_operation()}
    paths["/upstream/{model}/{path}"] = {
        method: _upstream_operation(method) for method in ("get", "post", "put", "patch", "delete")
    }
    for path, (method, summary, note) in _OLLAMA_ROUTES.items():
        paths[path] = {method: _ollama_operation(path, method, f"{summary}: {note}.")}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvelastic controller",
            "version": __version__,
            "description": "One OpenAI front over many models: traffic, memory, sleep and wake.",
        },
        "paths": dict(sorted(paths.items())),
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _realtime_operation() -> dict[str, Any]:
    return {
        "summary": "A WebSocket to an engine of the model.",
        "operationId": "engine_v1_realtime",
        "parameters": [
            {"name": "model", "in": "query", "required": True, "schema": {"type": "string"}}
        ],
        "responses": {
            "101": {"description": "Messages go both ways as they are."},
            "default": {"description": "An error.", **_json(_ERROR)},
        },
        "security": [{"key": []}],
    }


def _upstream_operation(method: str) -> dict[str, Any]:
    path = {"name": "path", "description": "At the engine.", "in": "path", "required": True}
    return {
        "summary": "Any path of the model's engine; an admin key beyond inference and health.",
        "operationId": f"upstream_{method}",
        "parameters": [_MODEL_PARAMETER, {**path, "schema": {"type": "string"}}],
        "responses": {
            "200": {"description": "The engine's answer."},
            "default": {"description": "An error.", **_json(_ERROR)},
        },
        "security": [{"key": []}],
    }


def _ollama_operation(path: str, method: str, summary: str) -> dict[str, Any]:
    error = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
    operation: dict[str, Any] = {
        "summary": f"Ollama's API. {summary}",
        "operationId": "ollama" + path.removeprefix("/api").replace("/", "_"),
        "responses": {
            "200": {"description": "As Ollama answers."},
            "default": {"description": "An error.", **_json(error)},
        },
        "security": [{"key": []}],
    }
    if method == "post":
        body = {
            "type": "object",
            "required": ["model"],
            "properties": {"model": {"type": "string"}},
        }
        operation["requestBody"] = _json(body, required=True)
    return operation


def _operation(each: Route, path: str, method: str) -> dict[str, Any]:
    doc = (each.endpoint.__doc__ or "").strip()
    parameters: list[dict[str, Any]] = []
    if "{model}" in path:
        parameters.append(_MODEL_PARAMETER)
    if "{tier}" in path:
        parameters.append(
            {
                "name": "tier",
                "in": "path",
                "required": True,
                "description": "As /memory calls it: host, disk, disk2, ...",
                "schema": {"type": "string", "minLength": 1},
            }
        )
    parameters += [
        {"name": name, "in": "query", "required": False, "schema": {"type": "string"}}
        for name in _QUERIES.get(path, ())
    ]
    operation: dict[str, Any] = {
        "summary": doc.splitlines()[0] if doc else "",
        "description": " ".join(doc.split()),
        "operationId": each.name,
        "parameters": parameters,
        "responses": {
            "200": {"description": "Done."},
            "default": {"description": "An error, or what was not done and why."},
        },
        "security": [{"key": []}],
    }
    body = _BODIES.get((path, method))
    if body is not None:
        operation["requestBody"] = _json(body, required=bool(body.get("required")))
    return operation


def _json(schema: dict[str, Any], *, required: bool | None = None) -> dict[str, Any]:
    content: dict[str, Any] = {"content": {"application/json": {"schema": schema}}}
    return content if required is None else {"required": required, **content}


def _page(document: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td><code>{method.upper()}</code><td><code>{html.escape(path)}</code>"
        f"<td>{html.escape(operation.get('description') or operation['summary'])}"
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width">'
        "<title>kvelastic controller</title><style>:root{color-scheme:light dark}"
        "body{font:1rem/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem}"
        "td{padding:.3rem .8rem .3rem 0;vertical-align:top;border-top:1px solid #8884}</style>"
        f"<h1>kvelastic controller {html.escape(document['info']['version'])}</h1>"
        "<p>For programs: <a href=/openapi.json>/openapi.json</a>."
        f"<table>{rows}</table></html>"
    )
