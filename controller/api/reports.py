"""A model in the routes' responses: plain values for JSON, with kvcached's fields and our own."""

from __future__ import annotations

import time
from typing import Any

from kvelastic.controller.models.gate import State
from kvelastic.controller.models.served_model import ServedModel


def traffic_of(model: ServedModel, window_s: float, idle_threshold_s: float) -> dict[str, Any]:
    """Return the statistics of a model's requests in the last `window_s` seconds."""
    window = model.traffic.window(window_s, time.monotonic())
    mean_s = window.mean_total_s
    return {
        "total_requests": window.requests,
        "successful_requests": window.succeeded,
        "failed_requests": window.failed,
        "request_rate": round(window.requests / window.seconds, 4),
        "avg_response_time": 0.0 if mean_s is None else round(mean_s, 6),
        "last_activity_time": model.last_request_at,
        "idle_time_seconds": round(model.idle_s, 3),
        "is_idle": model.gate.is_idle and model.idle_s >= idle_threshold_s,
        "in_flight": model.gate.in_flight,
        "queued": model.gate.queued,
        "tokens_per_second": round(window.tokens / window.seconds, 3),
        "time_to_first_token_seconds": _rounded(window.first_byte_s),
        "response_time_seconds": _rounded(window.total_s),
        "requests_since_start": model.traffic.requests,
    }


def model_of(model: ServedModel) -> dict[str, Any]:
    """Return a model's entry in /models. `endpoint` is the first engine's address."""
    settings = model.settings
    return {
        "endpoint": model.replicas[0].address,
        "endpoints": [replica.address for replica in model.replicas],
        "engine": settings.engine,
        "aliases": list(settings.aliases),
        "state": model.reported_state.value,
        "in_flight": model.gate.in_flight,
        "queued": model.gate.queued,
        "instance": settings.instance,
        "pinned": settings.pin,
        "ttl_seconds": model.idle_after_s,
        "can_sleep": model.can_sleep,
        "on_demand": model.is_on_demand,
        "waits": None
        if model.wait is None
        else {"why": model.wait.why, "for_room_of": list(model.wait.leavers)},
        "launched": settings.launch is not None,
        "prefill": settings.prefill,
        "prefill_fallbacks": dict(model.prefill_fallbacks),
        "last_problem": model.problems,
    }


def openai_model(model: ServedModel, created_s: float, name: str | None = None) -> dict[str, Any]:
    """Return a model's entry in OpenAI's /v1/models."""
    return {
        "id": name or model.name,
        "object": "model",
        "created": int(created_s),
        "owned_by": "kvelastic",
        "aliases": list(model.settings.aliases),
        "state": model.reported_state.value,
    }


def idle_detail(model: ServedModel) -> dict[str, Any]:
    """Return how long a model has been idle."""
    return {
        "idle_time_seconds": round(model.idle_s, 3),
        "last_activity_time": model.last_request_at,
        "in_flight": model.gate.in_flight,
        "queued": model.gate.queued,
        "state": model.reported_state.value,
    }


def is_sleeping(model: ServedModel) -> bool:
    """Return True if requests for the model must wait until it wakes."""
    return model.gate.state in {State.ASLEEP, State.FALLING_ASLEEP, State.WAKING}


def sleep_detail(model: ServedModel) -> dict[str, Any]:
    """Return since when a model sleeps."""
    since = model.slept_at
    return {
        "sleep_start_time": since,
        "sleep_duration": 0.0 if since is None else round(max(0.0, time.time() - since), 3),
        "manual_sleep": model.gate.by_hand,
        "state": model.reported_state.value,
        "queued": model.gate.queued,
    }


def candidates(models: list[ServedModel], idle_after_s: float) -> list[ServedModel]:
    """Return the models that may be put to sleep now.

    They have been idle for at least `idle_after_s` seconds, or for their own `ttl`.
    """

    def is_due(model: ServedModel) -> bool:
        least_s = idle_after_s if model.settings.ttl is None else model.settings.ttl
        return model.may_sleep and model.idle_s >= least_s

    return sorted(filter(is_due, models), key=lambda model: -model.idle_s)


def _rounded(percentiles: dict[str, float | None]) -> dict[str, float | None]:
    return {key: None if value is None else round(value, 6) for key, value in percentiles.items()}
