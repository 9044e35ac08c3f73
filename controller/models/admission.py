"""Decides whether models fit beside each other, and which must go otherwise: pure functions.

    admission = Admission(devices, groups)
    admission.obstacle(vision, [chat, coder])   # why it does not fit beside them; None: it does
    admission.leavers(vision, [chat, coder])    # the models to remove so that it fits, or None

On each of its devices a model claims its reserve and its guarantee, as the ledger will when it
wakes. Caches beyond guarantees shrink automatically, so they are no obstacle. The sums are the
ledger's own (vmm_csrc/ledger/device_account.h).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from kvelastic import _vmm
from kvelastic.controller.settings.settings import GroupSettings
from kvelastic.units import format_size

_NAMED_HOLDERS: Final = 3


@dataclass(frozen=True)
class Claim:
    """A claim on one device."""

    reserved_bytes: int = 0
    guaranteed_bytes: int = 0

    @property
    def all_bytes(self) -> int:
        """The sum of both."""
        return self.reserved_bytes + self.guaranteed_bytes

    def larger(self, other: Claim) -> Claim:
        """Return the larger value of each field."""
        return Claim(
            max(self.reserved_bytes, other.reserved_bytes),
            max(self.guaranteed_bytes, other.guaranteed_bytes),
        )

    def __str__(self) -> str:
        """Return text such as "8.00 GiB reserved and 1.00 GiB guaranteed"."""
        parts = [
            f"{format_size(count)} {what}"
            for count, what in (
                (self.reserved_bytes, "reserved"),
                (self.guaranteed_bytes, "guaranteed"),
            )
            if count
        ]
        return " and ".join(parts) or "nothing"


@dataclass(frozen=True)
class Device:
    """One device, and the claims on it that belong to no model."""

    capacity_bytes: int
    total_bytes: int = 0
    """All memory if larger than the capacity; reserves use the rest first. 0: the capacity."""
    others: Mapping[str, Claim] = field(default_factory=dict)
    """Instances that belong to no model here, by name."""

    def __str__(self) -> str:
        """Return text such as "24.00 GiB", or "32.00 GiB (25.60 GiB of it for KV caches)"."""
        if self.total_bytes <= self.capacity_bytes:
            return format_size(self.capacity_bytes)
        return (
            f"{format_size(self.total_bytes)} ({format_size(self.capacity_bytes)} of it for KV"
            " caches)"
        )

    def holds(self, claims: Iterable[Claim]) -> bool:
        """Return True if the ledger would let these claims and the others be awake together."""
        all_claims = [*self.others.values(), *claims]
        return _vmm.has_room_for(
            self.capacity_bytes,
            self.total_bytes,
            sum(claim.guaranteed_bytes for claim in all_claims),
            sum(claim.reserved_bytes for claim in all_claims),
        )


class Stand(Enum):
    """A model's relation to memory."""

    AWAY = "away"
    """It holds no memory: asleep, stopped, or waiting for its turn."""
    COMING = "coming"
    """It has had its turn, and wakes or starts."""
    THERE = "there"
    GOING = "going"
    """It falls asleep or stops, and still holds its memory."""


@dataclass(frozen=True)
class Model:
    """One model as planned for."""

    name: str
    claims: Mapping[str, Claim] = field(default_factory=dict)
    """By device."""
    priority: int = 0
    group: str | None = None
    can_leave: bool = True
    """The controller may put it to sleep or stop it without an operator."""
    is_busy: bool = False
    """It has requests in flight, or is waking."""
    idle_s: float = 0.0
    stays_s: float = 0.0
    """Seconds until its `min_awake` ends."""
    is_in_use: bool = False
    """True if it is busy or was within the last `min_awake`."""
    yields: bool = False
    """Its new requests are already held back, so that it becomes idle."""
    stand: Stand = Stand.THERE
    is_starting: bool = False
    """Its wake starts a process; the number of concurrent starts is limited."""

    @property
    def may_leave_now(self) -> bool:
        """True if it can be put to sleep now."""
        return self.can_leave and not self.is_busy and self.stays_s <= 0

    def may_be_held_back_for(self, other: Model) -> bool:
        """Return True if, after its `min_awake`, its new requests may wait for the other model."""
        return self.can_leave and self.priority <= other.priority


class Admission:
    """Devices and groups at one moment."""

    def __init__(self, devices: Mapping[str, Device], groups: Mapping[str, GroupSettings]) -> None:
        self.devices = devices
        self.groups = groups

    def obstacle(self, coming: Model, beside: Iterable[Model]) -> str | None:
        """Return why it cannot be awake beside these models, or None if it can."""
        others = list(beside)
        return self._crowded_group(coming, others) or self._full_device(coming, others)

    def leavers(self, coming: Model, present: Sequence[Model]) -> list[Model] | None:
        """Return the present models that must go so that `coming` fits; None if it never does.

        Models that can go now come first, the least important and idlest first. Then models
        that need time: idle ones within `min_awake`, and busy ones that may be held back. Last,
        busy ones of a higher priority. No model goes unnecessarily.
        """
        leaving: list[Model] = []
        staying = {model.name: model for model in present}
        for model in sorted(present, key=lambda model: _order(model, coming)):
            if self.obstacle(coming, staying.values()) is None:
                break
            if model.can_leave and self._is_in_the_way(model, coming):
                leaving.append(staying.pop(model.name))
        if self.obstacle(coming, staying.values()) is not None:
            return None
        # Keep models that a later, larger one made superfluous, the most important first.
        for model in reversed(leaving[:-1]):
            if self.obstacle(coming, [*staying.values(), model]) is None:
                staying[model.name] = model
                leaving.remove(model)
        return leaving

    def explain(self, coming: Model, present: Sequence[Model]) -> str:
        """Return text on why it does not fit beside these models, with the memory's holders."""
        stuck = [model for model in present if not model.can_leave]
        return (
            self.obstacle(coming, [])
            or self.obstacle(coming, stuck)
            or self.obstacle(coming, present)
            or "nothing is in its way"
        )

    def _is_in_the_way(self, model: Model, coming: Model) -> bool:
        """Return True if its sleep can help, by a device or by groups."""
        if any(c.all_bytes and device in coming.claims for device, c in model.claims.items()):
            return True
        if model.group is not None and model.group == coming.group:
            return self.groups[model.group].at_once > 0
        return self._excludes(coming, model) or self._excludes(model, coming)

    def _excludes(self, one: Model, other: Model) -> bool:
        """Return True if `one` is in an exclusive group for which `other` must be asleep."""
        group = self.groups.get(one.group or "")
        if group is None or not group.exclusive or other.group == one.group or not other.can_leave:
            return False
        outside = self.groups.get(other.group or "")
        return outside is None or not outside.persistent

    def _crowded_group(self, coming: Model, others: list[Model]) -> str | None:
        group = self.groups.get(coming.group or "")
        if group is not None and group.at_once:
            inside = [model.name for model in others if model.group == coming.group]
            if len(inside) >= group.at_once:
                names = ", ".join(inside[:_NAMED_HOLDERS])
                return (
                    f"of the group {coming.group!r} {group.at_once} may be awake at once, and"
                    f" {names} {'is' if len(inside) == 1 else 'are'}"
                )
        for other in others:
            for one, two in ((coming, other), (other, coming)):
                if self._excludes(one, two):
                    return (
                        f"{one.name} is of the exclusive group {one.group!r}, and {two.name} is"
                        f" not; {other.name} is awake"
                    )
        return None

    def _full_device(self, coming: Model, others: list[Model]) -> str | None:
        for name, mine in coming.claims.items():
            device = self.devices.get(name)
            claims = {model.name: model.claims[name] for model in others if name in model.claims}
            if device is None or not mine.all_bytes or device.holds((mine, *claims.values())):
                continue
            holders = sorted(
                (*claims.items(), *device.others.items()), key=lambda item: -item[1].all_bytes
            )
            held = [f"{who} has {claim}" for who, claim in holders if claim.all_bytes]
            more = len(held) - _NAMED_HOLDERS
            return (
                f"it needs {mine} of {name.rpartition('/')[2]}, which has {device}"
                + "".join(f"; {text}" for text in held[:_NAMED_HOLDERS])
                + (f"; and {more} more" if more > 0 else "")
            )
        return None


def _order(model: Model, coming: Model) -> tuple[int, int, bool, float, float]:
    """Sort key of the models to remove. A model that was held back has waiting requests."""
    if model.may_leave_now:
        return 0, model.priority, model.yields, 0.0, -model.idle_s
    step = 1 if not model.is_busy or model.may_be_held_back_for(coming) else 2
    return step, model.priority, not model.yields, model.stays_s, -model.idle_s
