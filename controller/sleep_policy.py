"""Which models to put to sleep: pure functions over plain values.

due(candidates)               # by the time they have been idle
victims(candidates, asks)     # because others wait for memory
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """One model, as it is now."""

    name: str
    is_awake: bool
    is_idle: bool
    """Nothing in flight and nothing waiting."""
    can_sleep: bool
    pinned: bool
    idle_s: float
    idle_after_s: float | None
    """None: never by time."""
    priority: int = 0
    devices: frozenset[str] = frozenset()
    """Where its instance has memory; empty if it is not known."""
    held_bytes: int = 0

    @property
    def may_sleep(self) -> bool:
        """Whether it can be put to sleep without an operator's word."""
        return self.is_awake and self.is_idle and self.can_sleep and not self.pinned


@dataclass(frozen=True)
class Ask:
    """An instance that waits for memory."""

    device: str
    bytes: int
    priority: int


def due(candidates: list[Candidate]) -> list[str]:
    """Models that have been idle long enough, the idlest first."""
    found = [
        c
        for c in candidates
        if c.may_sleep and c.idle_after_s is not None and c.idle_s >= c.idle_after_s
    ]
    return [c.name for c in sorted(found, key=lambda c: -c.idle_s)]


def victims(candidates: list[Candidate], asks: list[Ask]) -> list[str]:
    """Models whose sleep serves the asks: of no higher priority, least important and idlest first.

    Stops as soon as what they hold covers the asks of their device; one that holds nothing is
    left alone.
    """
    chosen: list[str] = []
    missing: dict[str, int] = {}
    highest: dict[str, int] = {}
    for ask in asks:
        missing[ask.device] = missing.get(ask.device, 0) + ask.bytes
        highest[ask.device] = max(highest.get(ask.device, ask.priority), ask.priority)
    for candidate in sorted(candidates, key=lambda c: (c.priority, -c.idle_s)):
        if not candidate.may_sleep or candidate.held_bytes <= 0:
            continue
        for device in candidate.devices:
            if missing.get(device, 0) > 0 and candidate.priority <= highest[device]:
                missing[device] -= candidate.held_bytes
                chosen.append(candidate.name)
                break
    return chosen
