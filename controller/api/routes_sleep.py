"""Sleep and wake: /sleep, /action."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from kvelastic.controller.api import reports
from kvelastic.controller.http.replies import Json
from kvelastic.controller.models.engine_calls import NEEDS_DEV_MODE, PORT_CLOSED
from kvelastic.controller.models.gate import State
from kvelastic.controller.models.served_model import ServedModel

if TYPE_CHECKING:
    from kvelastic.controller.app_state import AppState


async def sleep_status(app_state: AppState, _: Request) -> Any:
    """Models that sleep, and models that may be put to sleep."""
    sleep = app_state.settings.sleep
    return {
        "sleeping_models": {
            model.name: reports.sleep_detail(model)
            for model in app_state.fleet
            if reports.is_sleeping(model)
        },
        "sleep_candidates": [
            model.name for model in reports.candidates(list(app_state.fleet), sleep.idle_after)
        ],
        "auto_sleep_enabled": sleep.auto,
        "idle_threshold_seconds": sleep.idle_after,
        "wakeup_on_request": sleep.wake_on_request,
        "min_sleep_seconds": sleep.min_sleep,
    }


async def sleep_candidates(app_state: AppState, _: Request) -> Any:
    """Models that may be put to sleep now, the longest idle first."""
    sleep = app_state.settings.sleep
    found = reports.candidates(list(app_state.fleet), sleep.idle_after)
    return {
        "sleep_candidates": [model.name for model in found],
        "candidate_details": {
            model.name: {**reports.idle_detail(model), "can_sleep": model.may_sleep}
            for model in found
        },
        "idle_threshold_seconds": sleep.idle_after,
        "auto_sleep_enabled": sleep.auto,
    }


async def put_to_sleep(app_state: AppState, request: Request) -> Any:
    """Put a model to sleep and wait until it sleeps. 409 while requests are in flight."""
    model = app_state.fleet.need(request.path_params["model"])
    if not model.can_sleep:
        message = (
            f"An engine of the kind {model.settings.engine!r} cannot sleep, and is not launched on"
            " demand."
        )
        return _result(model, 400, False, message)
    if model.gate.state is State.ASLEEP:
        return _result(model, 200, True, "The model is asleep already.")
    refusal = model.gate.ask_sleep(time.monotonic(), by_hand=True)
    if refusal is not None:
        return _result(model, refusal.status, False, refusal.message)
    slept = model.sleeps
    await model.settled()
    if model.sleeps > slept or model.state is State.ASLEEP:
        return _result(model, 200, True, "The model is asleep.")
    return _result(model, *_failed_sleep(model))


def _failed_sleep(model: ServedModel) -> tuple[int, bool, str]:
    # Do not return the whole problem, because it contains the engine's address.
    problem = model.last_problem or ""
    if PORT_CLOSED in problem:
        return 503, False, f"The engine could not be put to sleep: {PORT_CLOSED}."
    message = "The engine could not be put to sleep"
    why = "GET /models says why (last_problem)"
    if model.reported_state is State.DOWN:
        return 503, False, f"{message}, and does not serve any more. {why}."
    why = NEEDS_DEV_MODE if NEEDS_DEV_MODE in problem else why
    return 502, False, f"{message}; it serves as before. {why}."


async def wake_up(app_state: AppState, request: Request) -> Any:
    """Wake a model and wait until it can serve."""
    model = app_state.fleet.need(request.path_params["model"])
    if model.gate.state is State.AWAKE:
        await model.find_state()  # another client may have put the engine to sleep
    if model.gate.state is State.AWAKE:
        return _result(model, *await _wake_awake(model))
    if model.gate.state is State.FALLING_ASLEEP:
        await model.settled()
    refusal = model.ask_wake(time.monotonic())
    if refusal is not None:
        return _result(model, refusal.status, False, refusal.message)
    await model.settled()
    if model.state is State.AWAKE:
        return _result(model, 200, True, "The model is awake.")
    why = f" {model.last_problem}" if model.last_problem else ""
    return _result(model, 502, False, f"The model could not be woken; it is asleep as before.{why}")


async def _wake_awake(model: ServedModel) -> tuple[int, bool, str]:
    """Wake the memory of a model that counts as awake: `kvctl sleep` may have put it to sleep."""
    await model.look_at_engines()
    if model.reported_state is State.DOWN:
        return 503, False, "No engine of this model accepts connections."
    was_asleep = await model.memory.is_asleep()
    problem = await model.wake_memory()
    if problem is not None:
        return 502, False, f"Its memory could not be woken: {problem}"
    if was_asleep:
        return 200, True, "The model's memory, put to sleep outside the controller, is awake now."
    return 200, True, "The model is awake already."


def _result(model: ServedModel, status: int, success: bool, message: str) -> Json:
    body = {
        "model_name": model.name,
        "success": success,
        "message": message,
        "state": model.reported_state.value,
    }
    headers = {"retry-after": "1"} if status in {409, 503} else None
    return Json(body, status, headers)
