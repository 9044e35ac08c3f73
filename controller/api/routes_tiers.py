"""Requests to the tiers of a model's instance: /memory/{model}/tiers/...

/memory and /memory/{model} report the contents of tiers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request

from kvelastic.controller.api.json_body import age_of, check_keys, json_object, size_of, wait_of
from kvelastic.controller.api.routes import instance_of
from kvelastic.controller.http.refusal import Refusal
from kvelastic.controller.http.replies import Json
from kvelastic.controller.models.instance_memory import polled
from kvelastic.shared import segment, tier_status
from kvelastic.shared.status_file import Asked
from kvelastic.shared.tier_status import TierAck, TierRequest

if TYPE_CHECKING:
    from kvelastic.controller.app_state import AppState

_USUAL_WAIT_S: Final = 2.0
"""Stores take part in a request, and may be slow."""
_VERIFY_WAIT_S: Final = 60.0
_STATUS_OF: Final = {"done": 200, "pending": 202, "refused": 409, "failed": 409}


async def change_tier(app_state: AppState, request: Request) -> Any:
    """Set the `limit` of a tier until its engine ends, and `wait` for the result.

    The tier's policy evicts what exceeds the limit. 200: done. 202: no result yet. 409: refused.
    """
    return await _ask_about_size(app_state, request, "limit", "limit")


async def trim_tier(app_state: AppState, request: Request) -> Any:
    """Shrink a tier to `size` once; its limit does not change."""
    return await _ask_about_size(app_state, request, "trim", "size")


async def clear_tiers(app_state: AppState, request: Request) -> Any:
    """Erase every tier object of this model and its settings, in all its tiers."""
    body = await json_object(app_state, request)
    check_keys(body, "wait")
    return await _ask(app_state, request, body, TierRequest("clear"), {})


async def erase_records(app_state: AppState, request: Request) -> Any:
    """Erase the tier objects of a `model`, or `older_than` an age, or both, in all its tiers."""
    body = await json_object(app_state, request)
    check_keys(body, "model", "older_than", "wait")
    model, age_s = body.get("model"), age_of(body, "older_than")
    if model is not None and not isinstance(model, str):
        raise Refusal(400, "invalid_value", "model is a text.", param="model")
    if model is None and age_s is None:
        raise Refusal(400, "nothing_requested", "Give one of model and older_than at least.")
    asked = TierRequest("erase", model=model, older_than_s=age_s)
    return await _ask(
        app_state, request, body, asked, {"model": model and model[:256], "older_than": age_s}
    )


async def verify_tiers(app_state: AppState, request: Request) -> Any:
    """Compare each tier's index with its accounting and its medium; 409 if they disagree."""
    body = await json_object(app_state, request)
    check_keys(body, "wait")
    return await _ask(app_state, request, body, TierRequest("verify"), {}, _VERIFY_WAIT_S)


async def _ask_about_size(app_state: AppState, request: Request, kind: str, key: str) -> Json:
    body = await json_object(app_state, request)
    check_keys(body, key, "wait")
    size_bytes = size_of(body, key)
    if size_bytes is None:
        raise Refusal(400, "nothing_requested", f"Give a {key}: bytes, or text like 512M.")
    asked = TierRequest(kind, tier=request.path_params["tier"], size_bytes=size_bytes)
    return await _ask(app_state, request, body, asked, {key: size_bytes})


async def _ask(
    app_state: AppState,
    request: Request,
    body: dict[str, Any],
    asked: TierRequest,
    audited: dict[str, Any],
    usual_wait_s: float = _USUAL_WAIT_S,
) -> Json:
    model = app_state.fleet.need(request.path_params["model"])
    name, wait_s = instance_of(model), wait_of(body)
    request.state.asked = audited
    answer = await ask(
        name,
        asked,
        usual_wait_s if wait_s is None else wait_s,
        lambda: model.gate.closing is not None,
    )
    return Json(
        {"model": model.name, "instance": name, "answer": answer}, _STATUS_OF[answer["state"]]
    )


async def ask(
    name: str, request: TierRequest, wait_s: float, is_over: Callable[[], bool]
) -> dict[str, Any]:
    """Send a request to an instance's tiers; wait for `wait_s` seconds, or until `is_over()`.

    In the result, `state` is done, refused, failed or pending (no result yet; the request remains
    posted). `records` has the number of tier objects erased (clear, erase) or held (other
    requests), by tier. Raises `Refusal` (404) for an unknown tier, and the errors of
    `tier_status.post`.
    """
    tiers, asked = await asyncio.to_thread(_post, name, request)
    with asked:
        answer = await polled(asked.look, wait_s, lambda: asked.is_lost or is_over())
    if answer is None:
        return {"state": "pending", "records": {}, "reason": ""}
    return {
        "state": answer.state,
        "records": dict(zip(tiers, answer.counts, strict=False)),
        "reason": answer.reason,
    }


def _post(name: str, request: TierRequest) -> tuple[list[str], Asked[TierAck]]:
    info = segment.inspect(name)
    shown = tier_status.read(info)
    tiers = [] if shown is None else [one.tier for one in shown.tiers]
    if shown is not None and request.tier and request.tier not in tiers:
        raise Refusal(
            404,
            "tier_not_found",
            f"{name!r} has no tier {request.tier[:100]!r}; it has {', '.join(tiers)}.",
            param="tier",
        )
    return tiers, tier_status.post(info, request)
