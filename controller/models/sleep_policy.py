"""Selects the models to put to sleep: pure functions over plain values.

due(candidates)               # models that have been idle long enough
victims(candidates, requests)     # models whose memory others wait for
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """The current state of one model."""

    name: str
    is_awake: bool
    is_idle: bool
    """True without requests in flight and without waiting requests."""
    can_sleep: bool
    pinned: bool
    idle_s: float
    idle_after_s: float | None
    """Idle time after which it is put to sleep; None: never."""
    priority: int = 0
    devices: frozenset[str] = frozenset()
    """Devices on which its instance has memory; empty if unknown."""
    held_bytes: int = 0

    @property
    def may_sleep(self) -> bool:
        """True if the controller may put it to sleep without an operator."""
        return self.is_awake and self.is_idle and self.can_sleep and not self.pinned


@dataclass(frozen=True)
class MemoryRequest:
    """The memory request of an instance that waits for it."""

    device: str
    bytes: int
    priority: int


def due(candidates: list[Candidate]) -> list[str]:
    """Return the models that have been idle long enough, the longest idle first."""
    found = [
        c
        for c in candidates
        if c.may_sleep and c.idle_after_s is not None and c.idle_s >= c.idle_after_s
    ]
    return [c.name for c in sorted(found, key=lambda c: -c.idle_s)]


def victims(candidates: list[Candidate], requests: list[MemoryRequest]) -> list[str]:
    """Return the models to put to sleep for these memory requests.

    Their priority is at most the highest of the requests on a device. The least important come
    first, among them the longest idle. Selection stops when their memory covers the requests of
    their device. Models without memory are not selected.
    """
    chosen: list[str] = []
    missing: dict[str, int] = {}
    highest: dict[str, int] = {}
    for request in requests:
        missing[request.device] = missing.get(request.device, 0) + request.bytes
        highest[request.device] = max(
            highest.get(request.device, request.priority), request.priority
        )
    for candidate in sorted(candidates, key=lambda c: (c.priority, -c.idle_s)):
        if not candidate.may_sleep or candidate.held_bytes <= 0:
            continue
        for device in candidate.devices:
            if missing.get(device, 0) > 0 and candidate.priority <= highest[device]:
                missing[device] -= candidate.held_bytes
                chosen.append(candidate.name)
                break
    return chosen
