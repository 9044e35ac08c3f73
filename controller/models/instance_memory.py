"""Reads and changes the memory of instances, through segments and ledgers only.

The functions map files and block for milliseconds, so call them in threads. They share no state
with the event loop. `request` is a coroutine, because it may wait for minutes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, TypeVar

from kvelastic import config
from kvelastic.controller.models.admission import Claim
from kvelastic.controller.models.sleep_policy import MemoryRequest
from kvelastic.device.host_memory import machine_memory_bytes
from kvelastic.errors import SegmentBusyError, SegmentFormatError, SegmentNotFoundError
from kvelastic.instance.outcome import outcome_of
from kvelastic.instance.reading import ledgers, look_at, look_at_all
from kvelastic.instance.row import row_of
from kvelastic.instance.status import DeviceUse, InstanceStatus, member_uses, uuid_text
from kvelastic.shared import ledger, segment
from kvelastic.shared.ledger_facts import LedgerInfo, Member
from kvelastic.shared.segment import Request
from kvelastic.shared.segment_listing import LOCK_WAIT_S
from kvelastic.shared.status_file import POLL_S

_Found = TypeVar("_Found")

_DEVICE_KEYS: Final = (
    "device", "group", "status", "problem", "capacity_bytes", "others_bytes",
    "others_of_capacity_bytes", "reserved_bytes", "reserved_of_capacity_bytes", "total_bytes",
    "granted_bytes", "guaranteed_bytes", "asked_bytes", "free_bytes",
)  # fmt: skip
"""The reported values of a device: attributes of `LedgerInfo`."""
_HELD_KEYS: Final = (
    "mapped_bytes", "in_use_bytes", "cached_bytes", "parked_bytes", "slack_bytes",
)  # fmt: skip


def row(name: str) -> dict[str, Any]:
    """Return one instance's row of `kvctl list --json`. Raises `SegmentError`."""
    return dict(row_of(look_at(name)))


def rows_and_devices() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return `row` of every instance of this machine, and `devices`, from one read."""
    infos = ledgers()
    statuses = look_at_all(infos)
    return [dict(row_of(status)) for status in statuses], _devices(infos, statuses)


def devices() -> list[dict[str, Any]]:
    """Return every device that instances share, with its members. Raises `LedgerError`."""
    infos = ledger.list_ledgers()
    return _devices(infos, look_at_all(infos))


def _devices(
    infos: Sequence[LedgerInfo], statuses: Sequence[InstanceStatus]
) -> list[dict[str, Any]]:
    return [
        {key: getattr(info, key) for key in _DEVICE_KEYS}
        | {"members": [_member(*each) for each in member_uses(info, statuses)]}
        for info in infos
    ]


def _member(member: Member, use: DeviceUse) -> dict[str, Any]:
    held = {key: getattr(use, key) for key in _HELD_KEYS}
    return {**asdict(member), "uuid": uuid_text(member.uuid), **held}


async def request(
    name: str,
    request: Request,
    *,
    wait_s: float | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Make a request and return its outcome, after at most `wait_s` or when `is_over()` is true.

    Raises the errors of `segment.request`.

    In the result, `state` is the verdict (see `kvelastic.instance.outcome`). `asleep` is true if
    the instance sleeps; its limit is applied when it wakes.
    """
    with await _post(name, request) as requested:
        wait_s = segment.ACK_GLANCE_S if wait_s is None else wait_s
        answer = await polled(requested.settled, wait_s, is_over) or requested.now()
    outcome = outcome_of(request, answer)
    facts = asdict(answer)
    facts.pop("acknowledged_ns")
    return {
        **facts,
        "state": outcome.verdict.value,
        "beyond_device_bytes": outcome.beyond_device_bytes,
    }


async def polled(
    look: Callable[[], _Found | None], wait_s: float, is_over: Callable[[], bool]
) -> _Found | None:
    """Return the first value of `look`; None after `wait_s` seconds, or once `is_over()`."""
    deadline_s = time.monotonic() + wait_s
    while (found := look()) is None and time.monotonic() < deadline_s and not is_over():
        await asyncio.sleep(POLL_S)
    return found


async def _post(name: str, request: Request) -> segment.Requested:
    """Post a request. Mapping the file is fast, so it is done in the loop.

    A busy lock is awaited without blocking, for at most `LOCK_WAIT_S`.
    """
    deadline_s = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            return segment.post(name, request, lock_wait_s=0.0)
        except SegmentBusyError:
            if time.monotonic() >= deadline_s:
                raise
        await asyncio.sleep(POLL_S)


def look(name: str) -> InstanceStatus | None:
    """Return a running instance, or None if none of this name runs. Raises `SegmentError`."""
    try:
        status = look_at(name)
    except SegmentNotFoundError:
        return None
    if status.life == "unreadable":
        raise SegmentFormatError(status.reason)
    return None if status.life == "dead" else status


def pressure(
    older_than_s: float,
) -> tuple[list[MemoryRequest], dict[str, tuple[frozenset[str], int]]]:
    """Return the memory requests of at least this age, and the devices and bytes of each segment.

    Raises `LedgerError`.
    """
    requests: list[MemoryRequest] = []
    held: dict[str, tuple[frozenset[str], int]] = {}
    for info in ledger.list_ledgers():
        key = f"{info.group}/{info.device}"
        for member in info.members:
            keys, held_bytes = held.get(member.name, (frozenset(), 0))
            held[member.name] = (keys | {key}, held_bytes + member.granted_bytes)
            if member.ask_bytes and member.ask_s >= older_than_s and member.status == "alive":
                requests.append(MemoryRequest(key, member.ask_bytes, member.priority))
    return requests, held


@dataclass
class DeviceClaims:
    """The claims of the members of one device's ledger, by instance name."""

    capacity_bytes: int
    total_bytes: int
    counted: dict[str, Claim] = field(default_factory=dict)
    """The claims that count now. Sleeping members claim nothing."""
    full: dict[str, Claim] = field(default_factory=dict)
    """The claims of each member while it is awake."""
    priorities: dict[str, int] = field(default_factory=dict)


def claims() -> dict[str, DeviceClaims]:
    """Return the claims of every readable ledger, by `GROUP/DEVICE`. Raises `LedgerError`."""
    found = {}
    for info in ledger.list_ledgers():
        if info.status != "readable":
            continue
        device = DeviceClaims(info.capacity_bytes, info.total_bytes)
        for member in info.members:
            if member.status == "dead":
                continue
            full = Claim(max(member.reserve_bytes, member.pledged_bytes), member.min_bytes)
            counted = Claim(member.pledged_bytes, member.guaranteed_bytes)
            device.full[member.name] = _sum(full, device.full.get(member.name))
            device.counted[member.name] = _sum(counted, device.counted.get(member.name))
            device.priorities[member.name] = member.priority
        found[f"{info.group}/{info.device}"] = device
    return found


def remove_left_behind() -> None:
    """Remove the segments and ledger entries of this user's dead processes.

    The start of an instance and every kvctl command do so as well.
    """
    segment.reap()
    ledger.reap()


def own_host() -> tuple[str, DeviceClaims]:
    """Return the configured ledger group, and the host's claims while it has no ledger.

    They come from this process's `KVELASTIC_LEDGER` and `KVELASTIC_HOST_MEMORY`, which launched
    engines inherit. Raises `ConfigError`.
    """
    own = config.load()
    return own.ledger, DeviceClaims(own.host_memory_bytes, machine_memory_bytes())


def _sum(one: Claim, other: Claim | None) -> Claim:
    """Return the sum. While an engine starts, its instance and its worker are two members."""
    if other is None:
        return one
    return Claim(
        one.reserved_bytes + other.reserved_bytes, one.guaranteed_bytes + other.guaranteed_bytes
    )
