"""Pure functions that merge the replicas' replies into the dashboard's data for a whole cluster.

A row of the dashboard's models is a replica here, with its machine as `node`. Devices and links are
those of each machine, from one reply each.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

from kvelastic.integration.ray.messages import Control

_NOT_COLUMNS: Final = frozenset(("name", "model", "device", "group", "instances"))
"""Keys of a device or instance in a history whose values are not one value per sample."""


def merged_models(replies: Iterable[Control]) -> dict[str, Any]:
    """Return the body of `GET /models`: each replica, with its model's name and its machine."""
    models = {}
    for reply in _sorted(replies):
        for name, model in json.loads(reply.body)["models"].items():
            # The front does not serve engines' logs.
            more = {"model": name, "node": reply.node, "launched": False}
            models[reply.replica] = {**model, **more}
    return {"models": models}


def merged_traffic(replies: Iterable[Control]) -> dict[str, Any]:
    """Return the body of `GET /traffic/stats`, by replica."""
    return {
        "traffic_stats": {
            reply.replica: stats
            for reply in _sorted(replies)
            for stats in json.loads(reply.body)["traffic_stats"].values()
        }
    }


def merged_links(replies: Iterable[Control]) -> dict[str, Any]:
    """Return the body of `GET /links`: the nodes of copies between processes, of all machines."""
    found = one_for_each_machine(replies)
    return {"nodes": [node for reply in found for node in json.loads(reply.body)["nodes"]]}


def merged_history(replies: Iterable[Control]) -> dict[str, Any]:
    """Return the body of `GET /devices/history` for all machines. Takes milliseconds.

    A sample's number is its time in intervals since 1970, so the machines' samples of one time have
    one number. The last sample is the newest that all machines have. All fronts number the
    samples alike, so a page may ask any of them, and `controller_started_at` is 0.
    """
    histories = [(reply.node, json.loads(reply.body)) for reply in one_for_each_machine(replies)]
    histories = [(node, history) for node, history in histories if history["at"]]
    interval_s = max((history["interval_seconds"] for _, history in histories), default=1.0)
    numbers = [[round(at / interval_s) for at in history["at"]] for _, history in histories]
    first = min((each[0] for each in numbers), default=0)
    wanted = range(first, min((each[-1] for each in numbers), default=-1) + 1)
    devices = []
    for (node, history), own in zip(histories, numbers, strict=True):
        slots = {number: slot for slot, number in enumerate(own)}
        picked = [slots.get(number) for number in wanted]
        for device in history["devices"]:
            instances = [_picked(one, picked) for one in device["instances"]]
            devices.append({**_picked(device, picked), "node": node, "instances": instances})
    return {
        "controller_started_at": 0,
        "interval_seconds": interval_s,
        "first_sample": first,
        "at": [number * interval_s for number in wanted],
        "devices": devices,
    }


def one_for_each_machine(replies: Iterable[Control]) -> list[Control]:
    """Return the first reply from each machine, by the replicas' names."""
    by_node: dict[str, Control] = {}
    for reply in _sorted(replies):
        by_node.setdefault(reply.node, reply)
    return list(by_node.values())


def _picked(facts: dict[str, Any], slots: Sequence[int | None]) -> dict[str, Any]:
    """Return a device or instance with the samples in these slots, None for a missing one.

    A reply knows only its own instance's model, so `model` is None for all.
    """
    found = {
        key: value
        if key in _NOT_COLUMNS
        else [None if slot is None else value[slot] for slot in slots]
        for key, value in facts.items()
    }
    return {**found, "model": None} if "model" in found else found


def _sorted(replies: Iterable[Control]) -> list[Control]:
    return sorted(replies, key=lambda reply: reply.replica)
