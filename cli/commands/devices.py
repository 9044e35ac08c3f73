"""`kvctl devices`: shows the memory of the machine's devices and the instances that hold it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvelastic.cli.rendering.columns import or_dash, size_or_dash
from kvelastic.cli.rendering.fitting_table import Column, plain, rich_table
from kvelastic.cli.rendering.printing import print_json, print_lines
from kvelastic.instance.row import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Group, RenderableType

    from kvelastic.cli.rendering.device_rows import DeviceRow
    from kvelastic.device.machine import DeviceFacts
    from kvelastic.shared.ledger_facts import LedgerInfo


@click.command("devices", short_help="Show the memory of the host and of every GPU.")
@click.option("--json", "as_json", is_flag=True, help="Print an array of objects (docs/kvctl.md).")
def devices_command(as_json: bool) -> None:
    """Show the memory of the host and of every GPU, and its holders.

    Opens no GPU and uses none of its memory. If a GPU cannot be queried, stderr or the device's
    problem has the reason; the command does not fail.
    """
    from kvelastic.cli.rendering.device_rows import device_rows
    from kvelastic.cli.rendering.fitting_table import show
    from kvelastic.device.machine import list_devices
    from kvelastic.instance.reading import look_at_all
    from kvelastic.instance.row import row_of
    from kvelastic.shared.ledger import list_ledgers

    ledgers = list_ledgers()
    group, host_capacity_bytes, problem = _configured()
    found = list_devices(host_capacity_bytes, problem)
    segments = [row_of(status) for status in look_at_all()]
    devices = with_ledgers(found.devices, ledgers, group)
    rows = device_rows(devices, segments, ledgers)
    if as_json:
        print_json(rows)
    else:
        show(lambda: plain_tables(rows), lambda width: rich_tables(rows, width))
    if found.gpu_problem:
        print_lines(f"GPUs: {found.gpu_problem}.", err=True)


def with_ledgers(
    devices: Iterable[DeviceFacts], ledgers: Iterable[LedgerInfo], group: str | None
) -> list[DeviceFacts]:
    """Return the devices with the capacity that their instances use, if there are any.

    If a device has several groups of instances, the capacity of `group` is used, else none.
    """
    from dataclasses import replace

    from kvelastic.device.machine import device_key

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


def _configured() -> tuple[str | None, int | None, str]:
    """Return the group of ledgers, the host's capacity, and why the environment is invalid."""
    from kvelastic.config import load
    from kvelastic.errors import ConfigError

    try:
        settings = load()
        return settings.ledger, settings.host_memory_bytes, ""
    except (ConfigError, OSError) as error:
        return None, None, str(error)


def plain_tables(rows: list[DeviceRow]) -> str:
    """Return columns of text: the devices, the holders of their memory, and their problems."""
    parts = [plain(_device_columns(rows)), plain(_holder_columns(rows)), "\n".join(_wrongs(rows))]
    return "\n\n".join(part for part in parts if part)


def rich_tables(rows: list[DeviceRow], width: int) -> Group:
    """Return the tables for a terminal of `width` columns, with fewer columns if it is narrow."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [rich_table(_device_columns(rows), width)]
    holders = _holder_columns(rows)
    if holders[0].cells:
        parts.append(rich_table(holders, width))
    parts += [Text(line, style="yellow") for line in _wrongs(rows)]
    return Group(*parts)


def label(row: DeviceRow) -> str:
    """Return a device's short name for tables: `host`, `gpu:0`, `mig:0:1`, or `-`."""
    if row["kind"] == "mig":
        return f"mig:{or_dash(row['parent_index'])}:{or_dash(row['index'])}"
    if row["kind"] == "gpu":
        return f"gpu:{or_dash(row['index'])}"
    return "host" if row["kind"] == "host" else "-"


def _device_columns(rows: list[DeviceRow]) -> list[Column]:
    return [
        Column("Device", [label(row) for row in rows], 0, is_left=True),
        Column("Total", [size_or_dash(row["total_bytes"]) for row in rows], 3),
        Column("Used", [size_or_dash(row["used_bytes"]) for row in rows], 4),
        Column("Free", [size_or_dash(row["free_bytes"]) for row in rows], 1),
        Column("Capacity", [size_or_dash(row["capacity_bytes"]) for row in rows], 7),
        Column("Mapped", [size_or_dash(row["mapped_bytes"]) for row in rows], 2),
        Column("Reserved", [size_or_dash(row["reserved_bytes"]) for row in rows], 8),
        Column("Driver", [printable(row["driver_version"] or "-") for row in rows], 9, True),
        Column("UUID", [printable(row["uuid"] or "-") for row in rows], 6, True, 40),
        Column("Name", [printable(row["name"] or "-") for row in rows], 5, True, 24),
    ]


def _holder_columns(rows: list[DeviceRow]) -> list[Column]:
    """Return the columns of holders. Instances come first, because a limit can shrink them."""
    lines: list[tuple[str, ...]] = []
    for row in rows:
        lines += [
            (
                label(row),
                "instance",
                or_dash(instance["pid"]),
                size_or_dash(instance["mapped_bytes"]),
                size_or_dash(instance["reserved_bytes"]),
                size_or_dash(instance["limit_bytes"]),
                printable(instance["name"]),
            )
            for instance in row["instances"]
        ]
        lines += [
            (
                label(row),
                "process",
                str(process["pid"]),
                size_or_dash(process["used_bytes"]),
                "-",
                "-",
                printable(process["name"] or "-"),
            )
            for process in row["processes"] or ()
        ]
    columns = [list(column) for column in zip(*lines, strict=True)] or [[] for _ in range(7)]
    return [
        Column("Device", columns[0], 3, is_left=True),
        Column("Holder", columns[1], 2, is_left=True),
        Column("Pid", columns[2], 4),
        Column("Bytes", columns[3], 1),
        Column("Reserved", columns[4], 6),
        Column("Limit", columns[5], 5),
        Column("Name", columns[6], 0, is_left=True, most_cells=48),
    ]


def _wrongs(rows: list[DeviceRow]) -> list[str]:
    return [
        f"{printable(row['uuid'] or '-') if row['kind'] == 'unknown' else label(row)}:"
        f" {printable(row['problem'])}."
        for row in rows
        if row["problem"]
    ]
