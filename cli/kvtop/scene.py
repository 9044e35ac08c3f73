"""The values that kvtop shows: instances and devices read at one moment.

    scene = scene_of(list_segments(), list_ledgers(), at_s=time.monotonic())

Devices come from their ledgers, and the memory held there from the instances' control blocks. A
device without a readable ledger is derived from its instances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvelastic.instance.row import printable
from kvelastic.instance.status import InstanceStatus, member_uses, status_of

if TYPE_CHECKING:
    from kvelastic.shared.ledger_facts import LedgerInfo
    from kvelastic.shared.segment import SegmentInfo
    from kvelastic.shared.tier_status import TiersStatus, TierStatus

_DEFAULT_GROUP = "default"
_TEXTS: Final = ("reason", "device", "engine", "model")
_STATISTICS: Final = (
    "pid", "limit_bytes", "min_bytes", "priority", "capacity_bytes", "mapped_bytes", "in_use_bytes",
    "cached_bytes", "parked_bytes", "over_bytes",
)  # fmt: skip
"""Fields that `Instance` has in common with `InstanceStatus`."""
_PARTS: Final = ("in_use_bytes", "cached_bytes", "parked_bytes", "slack_bytes")
_OF_LEDGER: Final = (
    "capacity_bytes", "reserved_bytes", "reserved_of_capacity_bytes", "others_bytes",
    "others_of_capacity_bytes", "free_bytes", "guaranteed_bytes", "asked_bytes",
)  # fmt: skip
"""Fields of `Device`: `_PARTS` are sums over instances, `_OF_LEDGER` are those of `LedgerInfo`."""


@dataclass(frozen=True)
class Instance:
    """One instance. Unknown values are None. Texts other than `name` are printable."""

    key: str
    """Unique key; differs from that of an earlier instance of the same name."""
    name: str
    """Name of its segment, for commands. It may contain any character of a file name."""
    label: str
    """The name in printable form."""
    state: str = "applied"
    """The state shown by `kvctl list`."""
    asleep: bool = False
    reason: str = ""
    device: str = ""
    engine: str = ""
    model: str = ""
    pid: int | None = None
    limit_bytes: int | None = None
    """The capacity, if `is_limited` is False."""
    is_limited: bool = True
    min_bytes: int | None = None
    priority: int | None = None
    capacity_bytes: int | None = None
    mapped_bytes: int | None = None
    in_use_bytes: int | None = None
    cached_bytes: int | None = None
    parked_bytes: int | None = None
    over_bytes: int | None = None
    """Memory that must still be released to meet the limit."""
    reserved_bytes: int | None = None
    """Memory held besides its KV cache while awake; None without a ledger."""
    pages_in: int | None = None
    """Pages mapped since its start; `pages_out` were unmapped."""
    pages_out: int | None = None
    blocks_evicted: int | None = None
    tiers: tuple[TierStatus, ...] = ()
    """Its tiers, nearest first; empty without readable tiers."""
    # Values that need earlier reads, set by the model:
    pages_in_per_s: float | None = None
    pages_out_per_s: float | None = None
    evicted_per_s: float | None = None
    history_bytes: tuple[int, ...] = ()
    """Mapped memory at the latest reads, the newest last."""

    @property
    def slack_bytes(self) -> int:
        """Mapped memory not used, cached or parked: free blocks of used pages, and padding."""
        parts_bytes = (self.in_use_bytes, self.cached_bytes, self.parked_bytes)
        return max(0, (self.mapped_bytes or 0) - sum(part or 0 for part in parts_bytes))

    @property
    def tiers_bytes(self) -> int | None:
        """Memory used in all its tiers together; None without tiers."""
        return sum(tier.used_bytes for tier in self.tiers) if self.tiers else None


@dataclass(frozen=True)
class Device:
    """One device, or the part of it that a group of instances shares."""

    name: str
    """`host` or a GPU's UUID, with the group unless it is the default."""
    capacity_bytes: int = 0
    in_use_bytes: int = 0
    cached_bytes: int = 0
    parked_bytes: int = 0
    slack_bytes: int = 0
    """Mapped memory not used, cached or parked."""
    reserved_bytes: int = 0
    """Memory of awake instances besides KV caches. `reserved_of_capacity_bytes` of it count against
    the capacity; the rest is outside of it."""
    reserved_of_capacity_bytes: int = 0
    others_bytes: int = 0
    """Memory of other processes. `others_of_capacity_bytes` of it count against the capacity."""
    others_of_capacity_bytes: int = 0
    free_bytes: int = 0
    guaranteed_bytes: int = 0
    asked_bytes: int = 0
    """Memory that instances have requested and wait for."""
    has_ledger: bool = False
    problem: str = ""
    """Why its values are unknown; empty if they are known."""

    @property
    def held_bytes(self) -> int:
        """Memory held by the instances."""
        return self.in_use_bytes + self.cached_bytes + self.parked_bytes + self.slack_bytes


@dataclass(frozen=True)
class Scene:
    """All instances and devices at one moment."""

    at_s: float
    """Time of the read (CLOCK_MONOTONIC)."""
    devices: tuple[Device, ...] = ()
    instances: tuple[Instance, ...] = ()


def scene_of(
    segments: Iterable[SegmentInfo],
    ledgers: Iterable[LedgerInfo],
    at_s: float,
    names: Sequence[str] = (),
    all_shown: Mapping[str, TiersStatus] | None = None,
) -> Scene:
    """Return the scene of every segment, or of the instances in `names` and their devices.

    `all_shown` has the statistics of tiers by the names of segments.
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
    """Return the instances' ledgers, without those of other groups on the same device."""
    names = {one.name for one in instances}
    return [ledger for ledger in ledgers if any(member.name in names for member in ledger.members)]


def instance_of(status: InstanceStatus) -> Instance:
    """Return the instance for a status."""
    counters, known = status.counters, status.is_known
    same: dict[str, Any] = {text: printable(getattr(status, text)) for text in _TEXTS}
    same |= {field: getattr(status, field) if known else None for field in _STATISTICS}
    return Instance(
        key=status.uuid_text or status.name,
        name=status.name,
        label=printable(status.name),
        state=status.word,
        asleep=status.asleep,
        is_limited=status.is_limited,
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
    """Return a device per ledger, and those only known from instances; unreadable ones last."""
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
        # A dead instance's memory is released, even if its segment still reports it.
        if instance.device not in {"", *known} and instance.state != "dead":
            by_device.setdefault(instance.device, []).append(instance)
    found += [_from_instances(name, there) for name, there in by_device.items()]
    return sorted(found, key=lambda device: (device.problem != "", device.name))


def _from_ledger(ledger: LedgerInfo, statuses: list[InstanceStatus]) -> Device:
    name = printable(ledger.device)
    if ledger.group not in {"", _DEFAULT_GROUP}:
        name = f"{name} ({printable(ledger.group)})"
    uses = [use for _, use in member_uses(ledger, statuses)]
    return Device(
        name=name,
        has_ledger=True,
        **{part: sum(getattr(use, part) for use in uses) for part in _PARTS},
        **{field: getattr(ledger, field) for field in _OF_LEDGER},
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


# ---------------------------------------------------------------- filter and sort order

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
"""The sort orders. Numbers are sorted largest first, unknown values last."""


def ordered(
    instances: Iterable[Instance], by: str, *, is_reversed: bool = False, wanted: str = ""
) -> list[Instance]:
    """Return the instances that contain the text `wanted`, sorted; equal ones by name."""
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
