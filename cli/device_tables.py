"""Tables of devices and of who holds their memory: plain columns for pipes, drawn for terminals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvelastic.cli.fitting_table import Column, plain, rich_table
from kvelastic.instance.row import printable
from kvelastic.sizes import format_size

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

    from kvelastic.cli.device_rows import DeviceRow


def plain_tables(rows: list[DeviceRow]) -> str:
    """Columns of text: the devices, who holds their memory, and what is wrong with them."""
    parts = [plain(_device_columns(rows)), plain(_holder_columns(rows)), "\n".join(_wrongs(rows))]
    return "\n\n".join(part for part in parts if part)


def rich_tables(rows: list[DeviceRow], width: int) -> Group:
    """The same for a terminal of `width` columns: the narrower it is, the fewer are shown."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [rich_table(_device_columns(rows), width)]
    holders = _holder_columns(rows)
    if holders[0].cells:
        parts.append(rich_table(holders, width))
    parts += [Text(line, style="yellow") for line in _wrongs(rows)]
    return Group(*parts)


def label(row: DeviceRow) -> str:
    """A short name of a device in tables: `host`, `gpu:0`, `mig:0:1`, or `-`."""
    if row["kind"] == "mig":
        return f"mig:{_or_dash(row['parent_index'])}:{_or_dash(row['index'])}"
    if row["kind"] == "gpu":
        return f"gpu:{_or_dash(row['index'])}"
    return "host" if row["kind"] == "host" else "-"


def _device_columns(rows: list[DeviceRow]) -> list[Column]:
    return [
        Column("Device", [label(row) for row in rows], 0, is_left=True),
        Column("Total", [_size(row["total_bytes"]) for row in rows], 3),
        Column("Used", [_size(row["used_bytes"]) for row in rows], 4),
        Column("Free", [_size(row["free_bytes"]) for row in rows], 1),
        Column("Capacity", [_size(row["capacity_bytes"]) for row in rows], 7),
        Column("Mapped", [_size(row["mapped_bytes"]) for row in rows], 2),
        Column("Reserved", [_size(row["reserved_bytes"]) for row in rows], 8),
        Column("Driver", [printable(row["driver_version"] or "-") for row in rows], 9, True),
        Column("UUID", [printable(row["uuid"] or "-") for row in rows], 6, True, 40),
        Column("Name", [printable(row["name"] or "-") for row in rows], 5, True, 24),
    ]


def _holder_columns(rows: list[DeviceRow]) -> list[Column]:
    """Instances first: they are what a limit can make smaller."""
    lines: list[tuple[str, ...]] = []
    for row in rows:
        lines += [
            (
                label(row),
                "instance",
                _or_dash(instance["pid"]),
                _size(instance["mapped_bytes"]),
                _size(instance["reserved_bytes"]),
                _size(instance["limit_bytes"]),
                printable(instance["name"]),
            )
            for instance in row["instances"]
        ]
        lines += [
            (
                label(row),
                "process",
                str(process["pid"]),
                _size(process["used_bytes"]),
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


def _size(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else format_size(size_bytes)


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)
