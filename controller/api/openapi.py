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


def _json(schema: dict[str, Any], *, required: bool | None = None) -> dict[str, Any]:
    content: dict[str, Any] = {"content": {"application/json": {"schema": schema}}}
    return content if required is None else {"required": required, **content}


def _parameter(name: str, place: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "in": place, "required": True, "schema": {"type": "string"}, **more}


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
_OLLAMA_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string"}},
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
_NAME = {"type": "string", "minLength": 1}
_MODEL_PARAMETER = _parameter(
    "model", "path", description="Name or alias, its slashes encoded or not.", schema=_NAME
)
_TIER_PARAMETER = _parameter(
    "tier", "path", description="As /memory calls it: host, disk, disk2, ...", schema=_NAME
)
_MODEL_BODY = _json(
    {"type": "object", "required": ["model"], "properties": {"model": {"type": "string"}}},
    required=True,
)
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
        about = (f"{summary} The model's engine answers it.", "engine" + path.replace("/", "_"))
        paths[path] = {"post": _engine_operation(*about, {"requestBody": _MODEL_BODY})}
    paths["/v1/realtime"] = {
        "get": _engine_operation(
            "A WebSocket to an engine of the model.",
            "engine_v1_realtime",
            {"parameters": [_parameter("model", "query")]},
            answer=("101", "Messages go both ways as they are."),
        )
    }
    at_engine = {
        "parameters": [_MODEL_PARAMETER, _parameter("path", "path", description="At the engine.")]
    }
    paths["/upstream/{model}/{path}"] = {
        method: _engine_operation(
            "Any path of the model's engine; an admin key beyond inference and health.",
            f"upstream_{method}",
            at_engine,
        )
        for method in ("get", "post", "put", "patch", "delete")
    }
    for path, (method, summary, note) in _OLLAMA_ROUTES.items():
        paths[path] = {
            method: _engine_operation(
                f"Ollama's API. {summary}: {note}.",
                "ollama" + path.removeprefix("/api").replace("/", "_"),
                {"requestBody": _MODEL_BODY} if method == "post" else {},
                answer=("200", "As Ollama answers."),
                error=_OLLAMA_ERROR,
            )
        }
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


def _engine_operation(
    summary: str,
    operation_id: str,
    request: dict[str, Any],
    *,
    answer: tuple[str, str] = ("200", "The engine's answer."),
    error: dict[str, Any] = _ERROR,
) -> dict[str, Any]:
    """Return an operation whose response is an engine's; `request` has body and parameters."""
    return {
        "summary": summary,
        "operationId": operation_id,
        **request,
        "responses": {
            answer[0]: {"description": answer[1]},
            "default": {"description": "An error.", **_json(error)},
        },
        "security": [{"key": []}],
    }


def _operation(each: Route, path: str, method: str) -> dict[str, Any]:
    doc = (each.endpoint.__doc__ or "").strip()
    parameters: list[dict[str, Any]] = []
    if "{model}" in path:
        parameters.append(_MODEL_PARAMETER)
    if "{tier}" in path:
        parameters.append(_TIER_PARAMETER)
    parameters += [_parameter(name, "query", required=False) for name in _QUERIES.get(path, ())]
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
