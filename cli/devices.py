"""`kvctl devices`: what memory the machine has, and which instances hold how much of it.

The keys of `DeviceRow` are the schema of `kvctl devices --json` (docs/kvctl.md); none is ever left
out, and what is not known is None.
"""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, TypedDict

import click

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvelastic.cli.rows import Row
    from kvelastic.devices import DeviceFacts
    from kvelastic.ledger_facts import LedgerInfo


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


@click.command("devices", short_help="Show the memory of the host and of every GPU.")
@click.option("--json", "as_json", is_flag=True, help="Print an array of objects (docs/kvctl.md).")
def devices_command(as_json: bool) -> None:
    """Show the memory of the host and of every GPU, and who holds it.

    No GPU is opened for it: nothing of its memory is taken. Why a GPU or all of them cannot be
    asked is said on stderr, or in the device's problem; the command does not fail.
    """
    from kvelastic.cli.rows import row_of
    from kvelastic.devices import list_devices
    from kvelastic.instance.look import look_at_all
    from kvelastic.ledger import list_ledgers

    found = list_devices()
    segments = [row_of(status) for status in look_at_all()]
    devices = with_ledgers(found.devices, list_ledgers(), _own_group())
    rows = device_rows(devices, segments)
    if as_json:
        import json

        click.echo(json.dumps(rows, indent=2))
    else:
        _show(rows)
    if found.gpu_problem:
        click.echo(f"GPUs: {found.gpu_problem}.", err=True)


def with_ledgers(
    devices: Iterable[DeviceFacts], ledgers: Iterable[LedgerInfo], group: str | None
) -> list[DeviceFacts]:
    """The devices with the capacity that their instances go by, where there are any.

    Of several groups of instances on one device, that of `group` counts; else none does.
    """
    from dataclasses import replace

    from kvelastic.devices import device_key

    by_key: dict[str, dict[str, int]] = {}
    for ledger in ledgers:
        if ledger.status == "readable":
            of_device = by_key.setdefault(device_key(ledger.device), {})
            of_device[ledger.group] = ledger.capacity_bytes
    found = []
    for facts in devices:
        capacities = by_key.get(facts.key, {})
        counts = group if group in capacities else next(iter(capacities), None)
        is_clear = counts == group or len(capacities) == 1
        if counts is not None and is_clear:
            found.append(replace(facts, capacity_bytes=capacities[counts]))
        else:
            found.append(facts)
    return found


def _own_group() -> str | None:
    """`KVELASTIC_LEDGER`; None where the environment cannot be read, which the host's row says."""
    from kvelastic.config import load
    from kvelastic.errors import ConfigError

    try:
        return load().ledger
    except (ConfigError, OSError):
        return None


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


def _show(rows: list[DeviceRow]) -> None:
    """Print the tables to stdout, in colour where that is a terminal."""
    from kvelastic.cli.device_tables import plain_tables, rich_tables

    if isinstance(sys.stdout, io.TextIOWrapper):
        # A name may hold what the terminal's encoding lacks: a question mark, and not the end.
        sys.stdout.reconfigure(errors="replace")
    if not sys.stdout.isatty():
        click.echo(plain_tables(rows))
        return
    from rich.console import Console

    console = Console(highlight=False)
    console.print(rich_tables(rows, console.width))
