"""The commands that remove files: delete, gc."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from kvelastic.cli.arguments import NameType
from kvelastic.cli.rendering.exit_codes import fail
from kvelastic.cli.rendering.printing import print_json, print_lines

if TYPE_CHECKING:
    from kvelastic.shared.ledger_facts import LedgerInfo


@click.command("delete", short_help="Remove a segment's name.")
@click.argument("name", type=NameType())
@click.option(
    "--force",
    is_flag=True,
    help="Remove it even if the instance is running; the instance continues.",
)
def delete_command(name: str, force: bool) -> None:
    """Remove a segment's name.

    Without --force a live instance is refused. With it the instance keeps its memory and its
    limit, but can no longer be seen or limited.
    """
    from kvelastic.errors import SegmentBusyError
    from kvelastic.shared.segment import delete

    try:
        delete(name, force=force)
    except SegmentBusyError as error:
        fail(f"{error}. Nothing was removed; --force removes the name anyway.")
    print_lines(f"Deleted {name}.")


@click.command("gc", short_help="Remove files of dead instances.")
@click.option("--json", "as_json", is_flag=True, help="Print one object (docs/kvctl.md).")
def gc_command(as_json: bool) -> None:
    """Remove and list the files of dead instances.

    Removes segments of dead instances, their grants in ledgers, and ledgers without members;
    never another user's files.
    """
    from kvelastic.shared.segment import list_segments, reap
    from kvelastic.units import format_size

    removed = reap()
    ledgers, places = reap_ledgers()
    left = []
    for info in list_segments():
        if info.status == "dead":
            left.append((info.name, "dead, but not yours to remove"))
        elif info.status == "unreadable":
            left.append((info.name, info.problem))
    if as_json:
        from dataclasses import asdict

        report = {
            "removed": removed,
            "places": [asdict(place) for place in places],
            "ledgers": ledgers,
            "left": [{"name": name, "why": why} for name, why in left],
        }
        print_json(report)
        return
    for name in removed:
        print_lines(f"Removed {name}.")
    for place in places:
        freed = f"{format_size(place.granted_bytes)} of {place.device}"
        print_lines(f"Freed {freed}, which {place.name} had when it died.")
    for path in ledgers:
        print_lines(f"Removed {path}, a ledger without members.")
    for name, why in left:
        print_lines(f"Left {name}: {why}.")


@dataclass(frozen=True)
class FreedSlot:
    """The removed ledger entry of a dead instance."""

    name: str
    """Name of the instance's segment."""
    device: str
    granted_bytes: int


def reap_ledgers() -> tuple[list[str], list[FreedSlot]]:
    """Remove the entries of dead instances, and ledgers without members.

    Returns the removed files, and the entries removed from the remaining ledgers.
    """
    from kvelastic.shared.ledger import list_ledgers, reap

    before = _dead_slots(list_ledgers())
    removed = [str(path) for path in reap()]
    left = set(_dead_slots(list_ledgers()))
    return removed, [place for key, place in before.items() if key not in left]


def _dead_slots(ledgers: list[LedgerInfo]) -> dict[tuple[str, str, bytes], FreedSlot]:
    return {
        (ledger.group, ledger.device, member.uuid): FreedSlot(
            member.name, ledger.device, member.granted_bytes
        )
        for ledger in ledgers
        for member in ledger.members
        if member.status == "dead"
    }
