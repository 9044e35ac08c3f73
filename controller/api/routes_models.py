"""Models, their health, traffic and settings: /v1/models, /models, /health, /traffic, /admin."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from kvelastic import __version__
from kvelastic.controller.api import reports
from kvelastic.controller.api.routes import seconds_of
from kvelastic.controller.models.served_model import ServedModel

if TYPE_CHECKING:
    from kvelastic.controller.app_state import AppState

WINDOW_S = 60.0
HEALTH_TIMEOUT_S = 2.0


async def list_openai_models(app_state: AppState, _: Request) -> Any:
    """Models, in OpenAI's shape."""
    data = [reports.openai_model(model, app_state.started_at) for model in app_state.fleet]
    return {"object": "list", "data": data}


async def get_openai_model(app_state: AppState, request: Request) -> Any:
    """One model, in OpenAI's shape."""
    name = request.path_params["model"]
    model = app_state.fleet.need(name)
    shown = name if app_state.fleet.find(name) is not None else None
    return reports.openai_model(model, app_state.started_at, shown)


async def health(app_state: AppState, _: Request) -> Any:
    """Health of the controller itself, independent of its engines."""
    return {"status": "healthy"}


async def version(app_state: AppState, _: Request) -> Any:
    """Version of the controller."""
    return {"version": __version__}


async def model_health(app_state: AppState, request: Request) -> Any:
    """Health of one model's engines, or of `all`, from their health route."""
    name = request.path_params["model"]
    if name == "all" and app_state.fleet.find("all") is None:
        models = list(app_state.fleet)
        found = await asyncio.gather(*(_health_of(app_state, model) for model in models))
        return {"model": "all", "health": {u: ok for each in found for u, ok in each.items()}}
    model = app_state.fleet.need(name)
    return {
        "model": model.name,
        "health": await _health_of(app_state, model),
        "state": model.reported_state.value,
    }


async def _health_of(app_state: AppState, model: ServedModel) -> dict[str, bool]:
    settings = model.settings
    addresses = [replica.address for replica in model.replicas]
    answers = await asyncio.gather(
        *(
            app_state.calls.is_healthy(address, settings.health, model.api_key, HEALTH_TIMEOUT_S)
            for address in addresses
        )
    )
    health = {a: ok for a, ok in zip(addresses, answers, strict=True) if ok is not None}
    if len(health) < len(addresses):
        raise app_state.files.refusal("asking engines for their health")
    return health


async def list_models(app_state: AppState, _: Request) -> Any:
    """Models, with their addresses and their state."""
    return {
        "models": {
            model.name: {
                **reports.model_of(model),
                "makes_room_for": app_state.swapper.waits_for_room_of(model),
            }
            for model in app_state.fleet
        }
    }


async def idle_models(app_state: AppState, request: Request) -> Any:
    """Models without requests in flight whose last request is at least `threshold` ago."""
    threshold_s = seconds_of(request, "threshold", app_state.settings.sleep.idle_after)
    idle = [m for m in app_state.fleet if m.gate.is_idle and m.idle_s >= threshold_s]
    return {
        "idle_models": [model.name for model in idle],
        "idle_threshold_seconds": threshold_s,
        "idle_model_details": {model.name: reports.idle_detail(model) for model in idle},
        "idle_models_count": len(idle),
    }


async def active_models(app_state: AppState, request: Request) -> Any:
    """Models that are not idle, with their traffic."""
    threshold_s = seconds_of(request, "threshold", app_state.settings.sleep.idle_after)
    window_s = seconds_of(request, "window", WINDOW_S)
    active = [m for m in app_state.fleet if not (m.gate.is_idle and m.idle_s >= threshold_s)]
    return {
        "active_models": [model.name for model in active],
        "idle_threshold_seconds": threshold_s,
        "window_seconds": window_s,
        "active_model_details": {
            model.name: reports.traffic_of(model, window_s, threshold_s) for model in active
        },
        "active_models_count": len(active),
    }


async def traffic_stats(app_state: AppState, request: Request) -> Any:
    """The traffic of all models in the last `window` (60 s; at most 10 minutes)."""
    window_s = seconds_of(request, "window", WINDOW_S)
    threshold_s = app_state.settings.sleep.idle_after
    return {
        "traffic_stats": {
            model.name: reports.traffic_of(model, window_s, threshold_s)
            for model in app_state.fleet
        },
        "window_seconds": window_s,
    }


async def model_traffic_stats(app_state: AppState, request: Request) -> Any:
    """The traffic of one model."""
    model = app_state.fleet.need(request.path_params["model"])
    window_s = seconds_of(request, "window", WINDOW_S)
    facts = reports.traffic_of(model, window_s, app_state.settings.sleep.idle_after)
    return {
        "model_stats": {"model_name": model.name, "state": model.reported_state.value, **facts},
        "window_seconds": window_s,
    }


async def reload_settings(app_state: AppState, _: Request) -> Any:
    """Reload the configuration file; 400 if it is invalid, and then nothing changes."""
    return await app_state.reload()
