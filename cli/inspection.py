"""The commands that look and change nothing: list, watch, stats."""

from __future__ import annotations

import click

from kvelastic.cli.arguments import NameType, SecondsType
from kvelastic.cli.finding import rows, sweep
from kvelastic.cli.saying import say, say_json
from kvelastic.instance.row import Row


@click.command("list", short_help="Show every instance.")
@click.argument("names", metavar="[NAME]...", nargs=-1, type=NameType())
@click.option("--json", "as_json", is_flag=True, help="Print an array of objects (docs/kvctl.md).")
def list_command(names: tuple[str, ...], as_json: bool) -> None:
    """Show every instance: its limit, and where its memory is."""
    sweep()
    found = rows(names)
    if as_json:
        say_json(found)
        return
    from kvelastic.cli.screen import show

    show(found)


@click.command("watch", short_help="List again and again, until Ctrl-C.")
@click.argument("names", metavar="[NAME]...", nargs=-1, type=NameType())
@click.option(
    "-n",
    "--interval",
    "interval_s",
    type=SecondsType(0.1),
    default=1.0,
    metavar="SECONDS",
    show_default=True,
    help="Time between two looks.",
)
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="Stop after N looks.")
@click.option("--json", "as_json", is_flag=True, help="Print the array of `list`, one line a look.")
def watch_command(
    names: tuple[str, ...], interval_s: float, count: int | None, as_json: bool
) -> None:
    """Show the instances again and again, until Ctrl-C.

    On a terminal the table stays in place; in a pipe one plain table an interval is printed.
    """
    from kvelastic.cli.screen import watch

    sweep()
    rows(names)  # an unknown name is an error now, not an empty table for ever

    def look() -> list[Row]:
        sweep(quiet=True)
        wanted = set(names)
        return [row for row in rows(()) if not wanted or row["name"] in wanted]

    watch(look, interval_s, count, as_json=as_json)


@click.command("stats", short_help="Every figure of one instance.")
@click.argument("name", type=NameType())
@click.option(
    "--interval",
    "interval_s",
    type=SecondsType(0.01),
    metavar="SECONDS",
    help="Look twice, so far apart, and say how fast the counters grow.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one object (docs/kvctl.md).")
def stats_command(name: str, interval_s: float | None, as_json: bool) -> None:
    """Show every figure of one instance: limits, memory, blocks, pages, counters.

    With --interval the counters also come as rates: so many a second in that time.
    """
    from kvelastic.cli.stats import look, stats_of, stats_text

    first = look(name, sweep())
    if interval_s is None:
        stats = stats_of(first)
    else:
        import time

        time.sleep(interval_s)
        stats = stats_of(look(name, []), before=first)
    if as_json:
        say_json(stats)
    else:
        say(*stats_text(stats).split("\n"))
