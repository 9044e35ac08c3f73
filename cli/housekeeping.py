"""The commands that remove what nobody needs: delete, gc."""

from __future__ import annotations

import click

from kvelastic.cli.arguments import NameType
from kvelastic.cli.exit_codes import fail
from kvelastic.cli.saying import say, say_json


@click.command("delete", short_help="Remove a segment's name.")
@click.argument("name", type=NameType())
@click.option("--force", is_flag=True, help="Also of a live instance, which goes on without it.")
def delete_command(name: str, force: bool) -> None:
    """Remove a segment's name.

    Only the name: a live instance (--force) keeps its memory and its limit, but nobody can see or
    limit it any more.
    """
    from kvelastic.errors import SegmentBusyError
    from kvelastic.segment import delete

    try:
        delete(name, force=force)
    except SegmentBusyError as error:
        fail(f"{error}. Nothing was removed; --force removes the name all the same.")
    say(f"Deleted {name}.")


@click.command("gc", short_help="Remove what dead instances have left.")
@click.option("--json", "as_json", is_flag=True, help="Print one object (docs/kvctl.md).")
def gc_command(as_json: bool) -> None:
    """Remove what dead instances have left behind, and say what.

    Removed are segments of the dead, their places in ledgers, and ledgers that nobody is a member
    of any more; never what belongs to others.
    """
    from kvelastic.cli.ledgers import reap_ledgers
    from kvelastic.segment import list_segments, reap
    from kvelastic.sizes import format_size

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
        say_json(report)
        return
    for name in removed:
        say(f"Removed {name}.")
    for place in places:
        freed = f"{format_size(place.granted_bytes)} of {place.device}"
        say(f"Freed {freed}, which {place.name} had when it died.")
    for path in ledgers:
        say(f"Removed {path}, a ledger without members.")
    for name, why in left:
        say(f"Left {name}: {why}.")
