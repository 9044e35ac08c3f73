"""Tables of devices and of who holds their memory: plain columns for pipes, drawn for terminals."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvelastic.cli.columns import aligned
from kvelastic.instance.row import printable
from kvelastic.sizes import format_size

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

    from kvelastic.cli.device_rows import DeviceRow

_SIZE_CELLS = len("1023.99 MiB")
_EDGE_CELLS, _GAP_CELLS = 2, 3


class _Column(NamedTuple):
    """One column, for both kinds of table."""

    title: str
    cells: list[str]
    rank: int
    """What a terminal too narrow for all shows first; 0 always."""
    is_left: bool = False
    most_cells: int = _SIZE_CELLS
    """The width on a terminal beyond which a text is folded."""


def plain_tables(rows: list[DeviceRow]) -> str:
    """Columns of text: the devices, who holds their memory, and what is wrong with them."""
    parts = [_plain(_device_columns(rows)), _plain(_holder_columns(rows)), "\n".join(_wrongs(rows))]
    return "\n\n".join(part for part in parts if part)


def rich_tables(rows: list[DeviceRow], width: int) -> Group:
    """The same for a terminal of `width` columns: the narrower it is, the fewer are shown."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [_rich(_device_columns(rows), width)]
    holders = _holder_columns(rows)
    if holders[0].cells:
        parts.append(_rich(holders, width))
    parts += [Text(line, style="yellow") for line in _wrongs(rows)]
    return Group(*parts)


def label(row: DeviceRow) -> str:
    """A short name of a device in tables: `host`, `gpu:0`, `mig:0:1`, or `-`."""
    if row["kind"] == "mig":
        return f"mig:{_or_dash(row['parent_index'])}:{_or_dash(row['index'])}"
    if row["kind"] == "gpu":
        return f"gpu:{_or_dash(row['index'])}"
    return "host" if row["kind"] == "host" else "-"


def _device_columns(rows: list[DeviceRow]) -> list[_Column]:
    return [
        _Column("Device", [label(row) for row in rows], 0, is_left=True),
        _Column("Total", [_size(row["total_bytes"]) for row in rows], 3),
        _Column("Used", [_size(row["used_bytes"]) for row in rows], 4),
        _Column("Free", [_size(row["free_bytes"]) for row in rows], 1),
        _Column("Capacity", [_size(row["capacity_bytes"]) for row in rows], 7),
        _Column("Mapped", [_size(row["mapped_bytes"]) for row in rows], 2),
        _Column("Reserved", [_size(row["reserved_bytes"]) for row in rows], 8),
        _Column("Driver", [printable(row["driver_version"] or "-") for row in rows], 9, True),
        _Column("UUID", [printable(row["uuid"] or "-") for row in rows], 6, True, 40),
        _Column("Name", [printable(row["name"] or "-") for row in rows], 5, True, 24),
    ]


def _holder_columns(rows: list[DeviceRow]) -> list[_Column]:
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
        _Column("Device", columns[0], 3, is_left=True),
        _Column("Holder", columns[1], 2, is_left=True),
        _Column("Pid", columns[2], 4),
        _Column("Bytes", columns[3], 1),
        _Column("Reserved", columns[4], 6),
        _Column("Limit", columns[5], 5),
        _Column("Name", columns[6], 0, is_left=True, most_cells=48),
    ]


def _wrongs(rows: list[DeviceRow]) -> list[str]:
    return [
        f"{printable(row['uuid'] or '-') if row['kind'] == 'unknown' else label(row)}:"
        f" {printable(row['problem'])}."
        for row in rows
        if row["problem"]
    ]


def _plain(columns: list[_Column]) -> str:
    if not columns[0].cells:
        return ""
    cells = ([column.title.upper(), *column.cells] for column in columns)
    left = {index for index, column in enumerate(columns) if column.is_left}
    return "\n".join(aligned(zip(*cells, strict=True), left))


def _rich(columns: list[_Column], width: int) -> RenderableType:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    # Where the terminal cannot show its line, rich itself takes another box.
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown = _that_fit(columns, width)
    for column in shown:
        table.add_column(
            column.title,
            justify="left" if column.is_left else "right",
            overflow="fold",
            max_width=column.most_cells,
        )
    for line in zip(*(column.cells for column in shown), strict=True):
        # Text, not markup: a name may hold brackets.
        table.add_row(*(Text(cell, style="" if at else "bold") for at, cell in enumerate(line)))
    return table


def _that_fit(columns: list[_Column], width: int) -> list[_Column]:
    """Those for which there is room, by rank, in the order in which they are drawn."""
    left = width - _EDGE_CELLS
    chosen: set[int] = set()
    for column in sorted(columns, key=lambda each: each.rank):
        widest = max(map(len, (column.title, *column.cells)))
        left -= min(widest, column.most_cells) + _GAP_CELLS
        if left < 0 and len(chosen) > 1:  # two are shown in any case, folded
            break
        chosen.add(column.rank)
    return [column for column in columns if column.rank in chosen]


def _size(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else format_size(size_bytes)


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)
