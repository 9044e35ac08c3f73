"""A device and the holders of its memory, as a row of plain values.

The keys of `DeviceRow` are the schema of `kvctl devices --json` (docs/kvctl.md). No key is ever
omitted, and unknown values are None.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict, cast

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvelastic.device.machine import DeviceFacts
    from kvelastic.instance.row import DeviceUseRow, Row
    from kvelastic.shared.ledger_facts import LedgerInfo


class ProcessRow(TypedDict):
    """A process on a GPU."""

    pid: int
    name: str | None
    used_bytes: int | None


class InstanceRow(TypedDict):
    """An instance on a device. Keys are those of `kvctl list`; bytes are those on this device."""

    name: str
    pid: int | None
    engine: str | None
    model: str | None
    state: str
    mapped_bytes: int | None
    reserved_bytes: int | None
    """Reserved memory on this device; None without a ledger entry."""
    limit_bytes: int | None


class DeviceRow(TypedDict):
    """One device."""

    kind: str
    """host, gpu, mig, or unknown (named by instances but not visible to this process)."""
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
    """Memory that its instances report as mapped."""
    reserved_bytes: int | None
    """Memory of awake instances besides KV caches; None without a ledger."""
    driver_version: str | None
    problem: str
    instances: list[InstanceRow]
    processes: list[ProcessRow] | None


def device_rows(
    devices: Iterable[DeviceFacts], segments: Sequence[Row], ledgers: Iterable[LedgerInfo] = ()
) -> list[DeviceRow]:
    """Return a row for each device with its instances, including devices that only they name."""
    from kvelastic.device.machine import DeviceFacts, device_key

    by_key: dict[str, list[tuple[Row, DeviceUseRow]]] = {}
    of_device: dict[str, list[LedgerInfo]] = {}
    for ledger in ledgers:
        if ledger.status == "readable":
            of_device.setdefault(device_key(ledger.device), []).append(ledger)
    for segment in segments:
        # A dead instance's memory is released, even if its segment still reports it.
        if segment["state"] != "dead":
            for use in segment["devices"] or []:
                by_key.setdefault(device_key(use["device"]), []).append((segment, use))
    rows = [
        _row(facts, facts.kind, by_key.pop(facts.key, []), of_device.get(facts.key, []))
        for facts in devices
    ]
    for key, there in by_key.items():
        facts = DeviceFacts(
            kind="gpu",
            name=None,
            uuid=there[0][1]["device"],
            problem="instances are on it, and it is not to be seen from here",
        )
        rows.append(_row(facts, "unknown", there, of_device.get(key, [])))
    return rows


def _row(
    facts: DeviceFacts,
    kind: str,
    there: Sequence[tuple[Row, DeviceUseRow]],
    ledgers: Sequence[LedgerInfo],
) -> DeviceRow:
    from kvelastic.instance.status import uuid_text

    reserved = {
        uuid_text(member.uuid): member.reserve_bytes
        for ledger in ledgers
        for member in ledger.members
    }
    values: dict[str, Any] = {
        "kind": kind,
        "capacity_bytes": _capacity_bytes(facts, there),
        "mapped_bytes": sum(use["mapped_bytes"] for _, use in there),
        "reserved_bytes": sum(ledger.reserved_bytes for ledger in ledgers) if ledgers else None,
        "instances": [
            InstanceRow(
                name=segment["name"],
                pid=segment["pid"],
                engine=segment["engine"],
                model=segment["model"],
                state=segment["state"],
                mapped_bytes=use["mapped_bytes"],
                reserved_bytes=reserved.get(segment["uuid"] or ""),
                limit_bytes=segment["limit_bytes"],
            )
            for segment, use in there
        ],
        "processes": None
        if facts.processes is None
        else [
            ProcessRow(pid=process.pid, name=process.name, used_bytes=process.used_bytes)
            for process in facts.processes
        ],
    }
    row = {
        key: values[key] if key in values else getattr(facts, key)
        for key in DeviceRow.__annotations__
    }
    return cast(DeviceRow, row)  # mypy cannot follow it; a test compares the keys


def _capacity_bytes(facts: DeviceFacts, there: Sequence[tuple[Row, DeviceUseRow]]) -> int | None:
    """Return the capacity. Instances without a ledger report it; this environment may differ."""
    alone = [
        (segment["capacity_bytes"] or 0) * use["copies"] // _copies(segment)
        for segment, use in there
        if use["granted_bytes"] is None and segment["alive"]
    ]
    has_ledger = any(use["granted_bytes"] is not None for _, use in there)
    return facts.capacity_bytes if has_ledger or not any(alone) else max(alone)


def _copies(segment: Row) -> int:
    """Return the number of copies of each page of an instance on all its devices."""
    return max(1, sum(use["copies"] for use in segment["devices"] or []))
