"""Models, their health and their traffic: /v1/models, /models, /health, /traffic."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.routing import Route

from kvelastic import __version__
from kvelastic.controller.api import reports
from kvelastic.controller.api.routes import Who, route, seconds_of
from kvelastic.controller.models.gate import State
from kvelastic.controller.models.served_model import ServedModel

if TYPE_CHECKING:
    from kvelastic.controller.front import Front

WINDOW_S = 60.0
HEALTH_TIMEOUT_S = 2.0


def routes(front: Front) -> list[Route]:
    """Return the routes of this module."""
    return [
        route(front, "/v1/models", "GET", Who.API, list_openai_models),
        route(front, "/v1/models/{model:path}", "GET", Who.API, get_openai_model),
        route(front, "/health", "GET", Who.ALL, health),
        route(front, "/health/{model:path}", "GET", Who.API, model_health),
        route(front, "/models", "GET", Who.API, list_models),
        route(front, "/models/idle", "GET", Who.API, idle_models),
        route(front, "/models/active", "GET", Who.API, active_models),
        route(front, "/traffic/stats", "GET", Who.API, traffic_stats),
        route(front, "/traffic/stats/{model:path}", "GET", Who.API, model_traffic_stats),
        route(front, "/version", "GET", Who.ALL, version),
    ]


async def list_openai_models(front: Front, _: Request) -> Any:
    """Models, in OpenAI's shape."""
    data = [reports.openai_model(model, front.started_at) for model in front.fleet]
    return {"object": "list", "data": data}


async def get_openai_model(front: Front, request: Request) -> Any:
    """One model, in OpenAI's shape."""
    name = request.path_params["model"]
    model = front.fleet.need(name)
    shown = name if front.fleet.find(name) is not None else None
    return reports.openai_model(model, front.started_at, shown)


async def health(front: Front, _: Request) -> Any:
    """Health of the controller itself, independent of its engines."""
    return {"status": "healthy"}


async def version(front: Front, _: Request) -> Any:
    """Version of the controller."""
    return {"version": __version__}


async def model_health(front: Front, request: Request) -> Any:
    """Health of one model's engines, or of `all`, from their health route."""
    name = request.path_params["model"]
    if name == "all" and front.fleet.find("all") is None:
        models = list(front.fleet)
        found = await asyncio.gather(*(_health_of(front, model) for model in models))
        return {"model": "all", "health": {u: ok for each in found for u, ok in each.items()}}
    model = front.fleet.need(name)
    return {
        "model": model.name,
        "health": await _health_of(front, model),
        "state": model.gate.state.value,
    }


async def _health_of(front: Front, model: ServedModel) -> dict[str, bool]:
    settings = model.settings
    addresses = [replica.address for replica in model.replicas]
    answers = await asyncio.gather(
        *(
            front.calls.is_healthy(address, settings.health, model.api_key, HEALTH_TIMEOUT_S)
            for address in addresses
        )
    )
    health = {a: ok for a, ok in zip(addresses, answers, strict=True) if ok is not None}
    if len(health) < len(addresses):
        raise front.files.refusal("asking engines for their health")
    return health


async def list_models(front: Front, _: Request) -> Any:
    """Models, with their addresses and their state."""
    return {
        "models": {
            model.name: {
                **reports.model_of(model),
                "makes_room_for": front.turns.waits_for_room_of(model),
            }
            for model in front.fleet
        }
    }


async def idle_models(front: Front, request: Request) -> Any:
    """Models without requests in flight whose last request is at least `threshold` ago."""
    threshold_s = seconds_of(request, "threshold", front.settings.sleep.idle_after)
    idle = [m for m in front.fleet if m.gate.is_idle and m.idle_s >= threshold_s]
    return {
        "idle_models": [model.name for model in idle],
        "idle_threshold_seconds": threshold_s,
        "idle_model_details": {model.name: reports.idle_detail(model) for model in idle},
        "idle_models_count": len(idle),
    }


async def active_models(front: Front, request: Request) -> Any:
    """Models that are not idle, with their traffic."""
    threshold_s = seconds_of(request, "threshold", front.settings.sleep.idle_after)
    window_s = seconds_of(request, "window", WINDOW_S)
    active = [m for m in front.fleet if not (m.gate.is_idle and m.idle_s >= threshold_s)]
    return {
        "active_models": [model.name for model in active],
        "idle_threshold_seconds": threshold_s,
        "window_seconds": window_s,
        "active_model_details": {
            model.name: reports.traffic_of(model, window_s, threshold_s) for model in active
        },
        "active_models_count": len(active),
    }


async def traffic_stats(front: Front, request: Request) -> Any:
    """The traffic of all models in the last `window` (60 s; at most 10 minutes)."""
    window_s = seconds_of(request, "window", WINDOW_S)
    threshold_s = front.settings.sleep.idle_after
    return {
        "traffic_stats": {
            model.name: reports.traffic_of(model, window_s, threshold_s) for model in front.fleet
        },
        "window_seconds": window_s,
    }


async def model_traffic_stats(front: Front, request: Request) -> Any:
    """The traffic of one model."""
    model = front.fleet.need(request.path_params["model"])
    window_s = seconds_of(request, "window", WINDOW_S)
    facts = reports.traffic_of(model, window_s, front.settings.sleep.idle_after)
    return {
        "model_stats": {
            "model_name": model.name,
            "state": State(model.gate.state).value,
            **facts,
        },
        "window_seconds": window_s,
    }
