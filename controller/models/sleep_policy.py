"""Selects the models to put to sleep: pure functions.

due(models)                       # models that have been idle long enough
victims(models, requests, held)   # models whose memory others wait for
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvelastic.controller.models.served_model import ServedModel


@dataclass(frozen=True)
class MemoryRequest:
    """The memory request of an instance that waits for it."""

    device: str
    bytes: int
    priority: int


def due(models: Iterable[ServedModel]) -> list[ServedModel]:
    """Return the models that have been idle long enough, the longest idle first."""
    found = [
        model
        for model in models
        if model.may_sleep and model.idle_after_s is not None and model.idle_s >= model.idle_after_s
    ]
    return sorted(found, key=lambda model: -model.idle_s)


def victims(
    models: Iterable[ServedModel],
    requests: Iterable[MemoryRequest],
    held: Mapping[str, tuple[frozenset[str], int]],
) -> list[ServedModel]:
    """Return the models to put to sleep for these memory requests.

    `held` has the devices and bytes of each instance. The models' priority is at most the highest
    of the requests on a device. The least important come first, among them the longest idle.
    Selection stops when their memory covers the requests of their device.
    """
    chosen: list[ServedModel] = []
    missing: dict[str, int] = {}
    highest: dict[str, int] = {}
    for request in requests:
        missing[request.device] = missing.get(request.device, 0) + request.bytes
        highest[request.device] = max(
            highest.get(request.device, request.priority), request.priority
        )
    for model in sorted(models, key=lambda model: (model.priority, -model.idle_s)):
        devices, held_bytes = held.get(model.instance or "", (frozenset(), 0))
        if not model.may_sleep or held_bytes <= 0:
            continue
        for device in devices:
            if missing.get(device, 0) > 0 and model.priority <= highest[device]:
                missing[device] -= held_bytes
                chosen.append(model)
                break
    return chosen
