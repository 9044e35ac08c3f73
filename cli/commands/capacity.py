"""`kvctl capacity`: changes the capacity of a device for all its instances together."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import click

from kvelastic.cli.arguments import SIZE, ValueCommand, wait_option
from kvelastic.cli.rendering.exit_codes import EXIT_FAILED, EXIT_TIMED_OUT, fail, fall_short
from kvelastic.cli.rendering.printing import print_lines

if TYPE_CHECKING:
    from kvelastic.shared.ledger_facts import LedgerInfo

_LOOK_S: Final = 0.01
_BRIEF_LOOK_S: Final = 0.2
"""Wait without --wait, in which most memory is released."""


@click.command(
    "capacity", cls=ValueCommand, short_help="Set the capacity of a device for its instances."
)
@click.argument("device")
@click.argument("size", type=SIZE)
@click.option("--group", metavar="NAME", help="Their KVELASTIC_LEDGER, if the device has several.")
@wait_option("the use is within the capacity")
def capacity_command(device: str, size: int, group: str | None, wait_s: float | None) -> None:
    """Set the capacity of DEVICE (host, or a GPU's UUID) for its instances to SIZE.

    It holds at once, while any of them is alive. If they hold more, they release the rest down
    to their guarantees; a capacity below the sum of the guarantees is refused. --wait waits for
    the release (exit code 3 if that takes longer).
    """
    from kvelastic.cli.segment_lookup import sweep
    from kvelastic.shared.ledger import set_capacity
    from kvelastic.units import format_size

    sweep()
    found = _choose(device, group)
    before_bytes = set_capacity(found.device, group=found.group, capacity_bytes=size)
    message = (
        f"{found.device}: the capacity is {format_size(size)} ({size} bytes)"
        f" after {format_size(before_bytes)}"
    )
    deadline = time.monotonic() + (_BRIEF_LOOK_S if wait_s is None else wait_s)
    while True:
        now = _look(found)
        if now is not None and now.capacity_bytes != size:
            other = format_size(now.capacity_bytes)
            fall_short(f"{found.device}: it was changed again, to {other}", wait_s, EXIT_FAILED)
            return
        if now is None or now.granted_bytes <= size:
            break
        if time.monotonic() >= deadline:
            over = format_size(now.granted_bytes - size)
            fall_short(f"{message}; {over} are still to be given back", wait_s, EXIT_TIMED_OUT)
            return
        time.sleep(_LOOK_S)
    granted_bytes = 0 if now is None else now.granted_bytes
    print_lines(f"{message}; {format_size(granted_bytes)} are held.")


def _choose(device: str, group: str | None) -> LedgerInfo:
    """Return the ledger of a device. End the command with an error unless exactly one matches."""
    from kvelastic.device.machine import device_key
    from kvelastic.shared.ledger import list_ledgers

    key = device_key(device)
    found, others = [], []
    for info in list_ledgers():
        if info.status != "readable":
            # An unreadable ledger has only its file name: group, underscore, device.
            name = device_key(info.device.rpartition("_")[2])
            wanted = group is None or info.device.startswith(f"{group}_")
            others += [info] if name == key and wanted else []
        elif device_key(info.device) == key and group in {None, info.group}:
            found.append(info)
    if len(found) > 1:
        from kvelastic.instance.row import printable

        groups = ", ".join(sorted(printable(info.group) for info in found))
        raise click.UsageError(f"{device} has several groups of instances ({groups}): say --group.")
    if not found and others:
        fail(others[0].problem)
    if not found:
        of_group = "" if group is None else f" with KVELASTIC_LEDGER={group}"
        fail(
            f"no instance{of_group} is on {device}, so there is nothing to change; the first"
            " instance sets the capacity from KVELASTIC_HOST_MEMORY or KVELASTIC_GPU_UTILIZATION."
            " `kvctl devices`"
            " shows the devices."
        )
    return found[0]


def _look(found: LedgerInfo) -> LedgerInfo | None:
    """Read a ledger again; return None if all its instances have ended."""
    from kvelastic.shared.ledger import list_ledgers

    return next(
        (
            info
            for info in list_ledgers()
            if (info.device, info.group) == (found.device, found.group)
        ),
        None,
    )
