"""`kvctl devices`: what memory the machine has, and which instances hold how much of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvelastic.cli.saying import say, say_json

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvelastic.devices import DeviceFacts
    from kvelastic.ledger_facts import LedgerInfo


@click.command("devices", short_help="Show the memory of the host and of every GPU.")
@click.option("--json", "as_json", is_flag=True, help="Print an array of objects (docs/kvctl.md).")
def devices_command(as_json: bool) -> None:
    """Show the memory of the host and of every GPU, and who holds it.

    No GPU is opened for it: nothing of its memory is taken. Why a GPU or all of them cannot be
    asked is said on stderr, or in the device's problem; the command does not fail.
    """
    from kvelastic.cli.device_rows import device_rows
    from kvelastic.cli.device_tables import plain_tables, rich_tables
    from kvelastic.cli.fitting_table import show
    from kvelastic.devices import list_devices
    from kvelastic.instance.look import look_at_all
    from kvelastic.instance.row import row_of
    from kvelastic.ledger import list_ledgers

    ledgers = list_ledgers()
    found = list_devices()
    segments = [row_of(status) for status in look_at_all()]
    devices = with_ledgers(found.devices, ledgers, _own_group())
    rows = device_rows(devices, segments, ledgers)
    if as_json:
        say_json(rows)
    else:
        show(lambda: plain_tables(rows), lambda width: rich_tables(rows, width))
    if found.gpu_problem:
        say(f"GPUs: {found.gpu_problem}.", err=True)


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
