"""Memory of instances and devices, and requests to instances; links: /memory, /devices, /links."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from kvelastic.controller.api.json_body import check_keys, json_object, size_of, wait_of
from kvelastic.controller.api.routes import instance_of
from kvelastic.controller.http.refusal import Refusal
from kvelastic.controller.http.replies import Json
from kvelastic.controller.models import instance_memory
from kvelastic.controller.models.served_model import ServedModel
from kvelastic.instance.outcome import HOLDS, MAY_HOLD, Verdict
from kvelastic.instance.status import UNLIMITED_BYTES
from kvelastic.shared import link_status, segment
from kvelastic.units import MAX_PRIORITY

if TYPE_CHECKING:
    from kvelastic.controller.app_state import AppState


async def all_memory(app_state: AppState, _: Request) -> Any:
    """Every model with an instance, every instance of this machine as kvctl lists it, and devices.

    All values come from one read of every control block, so a device's parts are the sums of its
    instances' parts.
    """
    rows, devices = await asyncio.to_thread(instance_memory.rows_and_devices)
    by_name = {row["name"]: row for row in rows}
    models = {model.instance: model.name for model in app_state.fleet}
    for device in devices:
        for member in device["members"]:
            member["model"] = models.get(member["name"])
    return {
        "models": {
            model.name: by_name.get(model.instance)
            for model in app_state.fleet
            if model.settings.instance is not None
        },
        "instances": rows,
        "devices": devices,
    }


async def memory_of(app_state: AppState, request: Request) -> Any:
    """Memory of one model's instance."""
    model = app_state.fleet.need(request.path_params["model"])
    row = await asyncio.to_thread(instance_memory.row, instance_of(model))
    return {"model": model.name, "memory": row}


async def change_memory(app_state: AppState, request: Request) -> Any:
    """Set a model's `min`, `limit` and `priority`, and `wait` until they are applied.

    A `limit` of null removes the limit.

    200: applied or seen. 202: accepted and not yet in force, also if the controller ends or the
    model is removed while the request waits. 409: refused or superseded.
    """
    model = app_state.fleet.need(request.path_params["model"])
    name = instance_of(model)
    body = await json_object(app_state, request)
    check_keys(body, "min", "limit", "priority", "wait")
    min_bytes, limit_bytes = size_of(body, "min"), size_of(body, "limit")
    if "limit" in body and body["limit"] is None:
        limit_bytes = UNLIMITED_BYTES
    priority = body.get("priority")
    if priority is not None and (
        isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > MAX_PRIORITY
    ):
        raise Refusal(
            400,
            "invalid_value",
            f"priority is a whole number, {-MAX_PRIORITY} to {MAX_PRIORITY}.",
            param="priority",
        )
    wait_s = wait_of(body)
    asked = segment.Request(limit_bytes, min_bytes, priority)
    if asked.is_empty:
        raise Refusal(400, "nothing_requested", "Give one of min, limit and priority at least.")
    if min_bytes is not None and limit_bytes is not None and min_bytes > limit_bytes:
        raise Refusal(400, "invalid_value", "min is above limit.", param="min")
    request.state.asked = {"min": min_bytes, "limit": limit_bytes, "priority": priority}
    return await _request(model, name, asked, wait_s)


async def trim(app_state: AppState, request: Request) -> Any:
    """Have a model's instance release every parked page."""
    model = app_state.fleet.need(request.path_params["model"])
    name = instance_of(model)
    body = await json_object(app_state, request)
    return await _request(model, name, segment.Request(trim=True), wait_of(body))


async def devices(app_state: AppState, _: Request) -> Any:
    """Every device that instances share: its capacity, and the grants of its instances."""
    return {"devices": await asyncio.to_thread(instance_memory.devices)}


async def _request(
    model: ServedModel, name: str, asked: segment.Request, wait_s: float | None
) -> Json:
    answer = await instance_memory.request(
        name, asked, wait_s=wait_s, is_over=lambda: model.gate.closing is not None
    )
    verdict = Verdict(answer["state"])
    status = 200 if verdict in HOLDS else 202 if verdict in MAY_HOLD else 409
    return Json({"model": model.name, "instance": name, "answer": answer}, status)


async def links(_: AppState, __: Request) -> Any:
    """Every node of this machine and its links, as `kvctl links --json` lists them."""
    nodes = await asyncio.to_thread(link_status.nodes)
    return {"nodes": [link_status.object_of(node) for node in nodes]}
