"""A device and who holds its memory, as a row of plain values.

The keys of `DeviceRow` are the schema of `kvctl devices --json` (docs/kvctl.md); none is ever left
out, and what is not known is None.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvelastic.devices import DeviceFacts
    from kvelastic.instance.row import Row


class ProcessRow(TypedDict):
    """A process on a GPU."""

    pid: int
    name: str | None
    used_bytes: int | None


class InstanceRow(TypedDict):
    """An instance on a device; each key as in `kvctl list`."""

    name: str
    pid: int | None
    engine: str | None
    model: str | None
    state: str
    mapped_bytes: int | None
    limit_bytes: int | None


class DeviceRow(TypedDict):
    """One device."""

    kind: str
    """host, gpu, mig, or unknown: instances name it and it is not to be seen here."""
    name: str | None
    index: int | None
    uuid: str | None
    parent: str | None
    parent_index: int | None
    total_bytes: int | None
    used_bytes: int | None
    free_bytes: int | None
    capacity_bytes: int | None
    mapped_bytes: int
    """What its instances hold of it, as far as they say."""
    driver_version: str | None
    problem: str
    instances: list[InstanceRow]
    processes: list[ProcessRow] | None


def device_rows(devices: Iterable[DeviceFacts], segments: Sequence[Row]) -> list[DeviceRow]:
    """The rows of the devices with their instances, and of those that only instances know."""
    from kvelastic.devices import DeviceFacts, device_key

    by_key: dict[str, list[Row]] = {}
    for segment in segments:
        # A dead instance's memory is back with the device, whatever its segment still says.
        if segment["device"] and segment["state"] != "dead":
            by_key.setdefault(device_key(segment["device"]), []).append(segment)
    rows = [_row(facts, facts.kind, by_key.pop(facts.key, [])) for facts in devices]
    for there in by_key.values():
        facts = DeviceFacts(
            kind="gpu",
            name=None,
            uuid=there[0]["device"],
            problem="instances are on it, and it is not to be seen from here",
        )
        rows.append(_row(facts, "unknown", there))
    return rows


def _row(facts: DeviceFacts, kind: str, segments: Sequence[Row]) -> DeviceRow:
    return DeviceRow(
        kind=kind,
        name=facts.name,
        index=facts.index,
        uuid=facts.uuid,
        parent=facts.parent,
        parent_index=facts.parent_index,
        total_bytes=facts.total_bytes,
        used_bytes=facts.used_bytes,
        free_bytes=facts.free_bytes,
        capacity_bytes=_capacity_bytes(facts, segments),
        mapped_bytes=sum(segment["mapped_bytes"] or 0 for segment in segments),
        driver_version=facts.driver_version,
        problem=facts.problem,
        instances=[
            InstanceRow(
                name=segment["name"],
                pid=segment["pid"],
                engine=segment["engine"],
                model=segment["model"],
                state=segment["state"],
                mapped_bytes=segment["mapped_bytes"],
                limit_bytes=segment["limit_bytes"],
            )
            for segment in segments
        ],
        processes=None
        if facts.processes is None
        else [
            ProcessRow(pid=process.pid, name=process.name, used_bytes=process.used_bytes)
            for process in facts.processes
        ],
    )


def _capacity_bytes(facts: DeviceFacts, segments: Sequence[Row]) -> int | None:
    """Of an instance that is in no ledger, what it says itself: not what this environment says."""
    alone = [
        segment["capacity_bytes"] or 0
        for segment in segments
        if segment["granted_bytes"] is None and segment["alive"]
    ]
    has_ledger = any(segment["granted_bytes"] is not None for segment in segments)
    return facts.capacity_bytes if has_ledger or not any(alone) else max(alone)
