"""What kvtop shows, as plain values: instances and devices as they were found at one moment.

    scene = scene_of(list_segments(), list_ledgers(), at_s=time.monotonic())

Devices come from their ledgers, and what is held there from the same records as the instances. One
without a readable ledger is what its instances say of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvelastic.instance.device import member_uses
from kvelastic.instance.row import printable
from kvelastic.instance.status import InstanceStatus, status_of

if TYPE_CHECKING:
    from kvelastic.ledger_facts import LedgerInfo
    from kvelastic.segment import SegmentInfo
    from kvelastic.tier_status import TierFigures, TiersFigures

_DEFAULT_GROUP = "default"
_TEXTS: Final = ("reason", "device", "engine", "model")
_FIGURES: Final = (
    "pid", "limit_bytes", "min_bytes", "priority", "capacity_bytes", "mapped_bytes", "in_use_bytes",
    "cached_bytes", "parked_bytes", "over_bytes",
)  # fmt: skip
"""Fields of `Instance` that are those of `InstanceStatus`."""
_PARTS: Final = ("in_use_bytes", "cached_bytes", "parked_bytes", "slack_bytes")
_OF_LEDGER: Final = (
    "capacity_bytes", "reserved_bytes", "reserved_of_capacity_bytes", "others_bytes",
    "others_of_capacity_bytes", "free_bytes", "guaranteed_bytes", "asked_bytes",
)  # fmt: skip
"""Fields of `Device`: sums over instances, and those of `LedgerInfo`."""


@dataclass(frozen=True)
class Instance:
    """One instance. What is not known is None; texts hold nothing that steers a terminal."""

    key: str
    """Tells it from an earlier one of the same name."""
    name: str
    """Of its segment, as commands take it; it may hold anything that a file name may."""
    label: str
    """The same, to be shown."""
    state: str = "applied"
    """As in the table of `kvctl list`."""
    asleep: bool = False
    reason: str = ""
    device: str = ""
    engine: str = ""
    model: str = ""
    pid: int | None = None
    limit_bytes: int | None = None
    min_bytes: int | None = None
    priority: int | None = None
    capacity_bytes: int | None = None
    mapped_bytes: int | None = None
    in_use_bytes: int | None = None
    cached_bytes: int | None = None
    parked_bytes: int | None = None
    over_bytes: int | None = None
    """Still to be given back to meet the limit."""
    reserved_bytes: int | None = None
    """Held besides its KV cache while it is awake; None where it is in no ledger."""
    pages_in: int | None = None
    """Mapped since its start; `pages_out` were unmapped."""
    pages_out: int | None = None
    blocks_evicted: int | None = None
    tiers: tuple[TierFigures, ...] = ()
    """Nearest first; empty where it has none, or none that can be read."""
    # What only a comparison with earlier looks can tell, filled in by the model:
    pages_in_per_s: float | None = None
    pages_out_per_s: float | None = None
    evicted_per_s: float | None = None
    history_bytes: tuple[int, ...] = ()
    """Mapped at the latest looks, the newest last."""

    @property
    def slack_bytes(self) -> int:
        """Mapped, and neither in use, cached nor parked: free blocks of pages in use, padding."""
        parts_bytes = (self.in_use_bytes, self.cached_bytes, self.parked_bytes)
        return max(0, (self.mapped_bytes or 0) - sum(part or 0 for part in parts_bytes))

    @property
    def tiers_bytes(self) -> int | None:
        """What all its tiers hold together; None where it has none."""
        return sum(tier.used_bytes for tier in self.tiers) if self.tiers else None


@dataclass(frozen=True)
class Device:
    """One device, or that part of it that a group of instances shares."""

    name: str
    """`host` or a GPU's UUID, with the group where that is not the default."""
    capacity_bytes: int = 0
    in_use_bytes: int = 0
    cached_bytes: int = 0
    parked_bytes: int = 0
    slack_bytes: int = 0
    """Mapped, and none of the three."""
    reserved_bytes: int = 0
    """Held besides KV caches by instances that are awake; `reserved_of_capacity_bytes` of it come
    out of the capacity, the rest lies outside."""
    reserved_of_capacity_bytes: int = 0
    others_bytes: int = 0
    """Used by other processes; `others_of_capacity_bytes` as of what is reserved."""
    others_of_capacity_bytes: int = 0
    free_bytes: int = 0
    guaranteed_bytes: int = 0
    asked_bytes: int = 0
    """What instances wait for."""
    has_ledger: bool = False
    problem: str = ""
    """Why nothing is known of it; empty where that is not so."""

    @property
    def held_bytes(self) -> int:
        """What the instances hold."""
        return self.in_use_bytes + self.cached_bytes + self.parked_bytes + self.slack_bytes


@dataclass(frozen=True)
class Scene:
    """All that was found at one moment."""

    at_s: float
    """Of CLOCK_MONOTONIC."""
    devices: tuple[Device, ...] = ()
    instances: tuple[Instance, ...] = ()


def scene_of(
    segments: Iterable[SegmentInfo],
    ledgers: Iterable[LedgerInfo],
    at_s: float,
    names: Sequence[str] = (),
    all_shown: Mapping[str, TiersFigures] | None = None,
) -> Scene:
    """Make the scene of what was found; with `names`, of those instances and their devices.

    `all_shown` are those of tiers, by the names of segments.
    """
    ledgers, all_shown = list(ledgers), all_shown or {}
    statuses = [status_of(info, ledgers, shown_tiers=all_shown.get(info.name)) for info in segments]
    found = [instance_of(status) for status in statuses]
    if not names:
        return Scene(at_s, tuple(_devices(found, ledgers, statuses)), tuple(found))
    instances = tuple(one for one in found if one.name in names)
    chosen = _ledgers_of(instances, ledgers)
    there = [one for one in found if one.device in {named.device for named in instances}]
    return Scene(at_s, tuple(_devices(there, chosen, statuses)), instances)


def _ledgers_of(instances: Sequence[Instance], ledgers: list[LedgerInfo]) -> list[LedgerInfo]:
    """Those that the instances are members of, not another group's on the same device."""
    names = {one.name for one in instances}
    return [ledger for ledger in ledgers if any(member.name in names for member in ledger.members)]


def instance_of(status: InstanceStatus) -> Instance:
    """Make an instance of its status."""
    counters, known = status.counters, status.is_known
    same: dict[str, Any] = {text: printable(getattr(status, text)) for text in _TEXTS}
    same |= {figure: getattr(status, figure) if known else None for figure in _FIGURES}
    return Instance(
        key=status.uuid_text or status.name,
        name=status.name,
        label=printable(status.name),
        state=status.word,
        asleep=status.asleep,
        **same,
        reserved_bytes=status.reserved_bytes,
        pages_in=counters.get("pages_mapped"),
        pages_out=counters.get("pages_unmapped"),
        blocks_evicted=counters.get("blocks_evicted"),
        tiers=() if status.shown_tiers is None else status.shown_tiers.tiers,
    )


def _devices(
    instances: list[Instance], ledgers: list[LedgerInfo], statuses: list[InstanceStatus]
) -> list[Device]:
    """Each ledger is a device, and so is what only instances know; unknown ones come last."""
    readable = [ledger for ledger in ledgers if ledger.status == "readable"]
    found = [_from_ledger(ledger, statuses) for ledger in readable]
    found += [
        Device(printable(ledger.device), problem=printable(ledger.problem) or ledger.status)
        for ledger in ledgers
        if ledger.status != "readable"
    ]
    known = {printable(ledger.device) for ledger in readable}
    by_device: dict[str, list[Instance]] = {}
    for instance in instances:
        # A dead instance's memory is back with the device, whatever its segment still says.
        if instance.device not in {"", *known} and instance.state != "dead":
            by_device.setdefault(instance.device, []).append(instance)
    found += [_from_instances(name, there) for name, there in by_device.items()]
    return sorted(found, key=lambda device: (device.problem != "", device.name))


def _from_ledger(ledger: LedgerInfo, statuses: list[InstanceStatus]) -> Device:
    name = printable(ledger.device)
    if ledger.group not in {"", _DEFAULT_GROUP}:
        name = f"{name} ({printable(ledger.group)})"
    uses = member_uses(ledger, statuses)
    return Device(
        name=name,
        has_ledger=True,
        **{part: sum(getattr(use, part) for use in uses) for part in _PARTS},
        **{figure: getattr(ledger, figure) for figure in _OF_LEDGER},
    )


def _from_instances(name: str, there: list[Instance]) -> Device:
    capacity_bytes = max(one.capacity_bytes or 0 for one in there)
    held_bytes = sum(one.mapped_bytes or 0 for one in there)
    parts: dict[str, Any] = {part: sum(getattr(one, part) or 0 for one in there) for part in _PARTS}
    return Device(
        name=name,
        capacity_bytes=capacity_bytes,
        **parts,
        free_bytes=max(0, capacity_bytes - held_bytes),
        guaranteed_bytes=sum(one.min_bytes or 0 for one in there),
    )


# ---------------------------------------------------------------- which are shown, in what order

_Value = Callable[[Instance], "int | float | None"]

_NUMBERS: Final[dict[str, _Value]] = {
    "mapped": lambda one: one.mapped_bytes,
    "in use": lambda one: one.in_use_bytes,
    "limit": lambda one: one.limit_bytes,
    "min": lambda one: one.min_bytes,
    "prio": lambda one: one.priority,
    "in/s": lambda one: one.pages_in_per_s,
    "out/s": lambda one: one.pages_out_per_s,
    "evict/s": lambda one: one.evicted_per_s,
    "tiers": lambda one: one.tiers_bytes,
}
ORDERS: Final = ("name", "state", *_NUMBERS)
"""What one can sort by; numbers come largest first, and an unknown one last."""


def ordered(
    instances: Iterable[Instance], by: str, *, is_reversed: bool = False, wanted: str = ""
) -> list[Instance]:
    """The instances in which `wanted` occurs, sorted; equal ones by name."""
    shown = sorted((one for one in instances if _has(one, wanted)), key=lambda one: one.label)
    if by == "name":
        return shown[::-1] if is_reversed else shown
    if by == "state":
        return sorted(shown, key=lambda one: one.state, reverse=is_reversed)
    value = _NUMBERS[by]
    known = [(number, one) for one in shown if (number := value(one)) is not None]
    known.sort(key=lambda each: each[0], reverse=not is_reversed)
    return [one for _, one in known] + [one for one in shown if value(one) is None]


def _has(instance: Instance, wanted: str) -> bool:
    texts = (instance.label, instance.model, instance.engine, instance.device, instance.state)
    return any(wanted.casefold() in text.casefold() for text in texts)
