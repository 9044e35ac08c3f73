"""kvctl list and kvctl watch."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable

import click

from kvelastic.cli.arguments import NameType, SecondsType, remote_controller
from kvelastic.cli.rendering.fitting_table import show
from kvelastic.cli.rendering.printing import print_json, print_lines
from kvelastic.cli.rendering.tables import plain_table, rich_table
from kvelastic.cli.segment_lookup import own_names, rows, sweep
from kvelastic.instance.row import Row


@click.command("list", short_help="Show every instance.")
@click.argument("names", metavar="[NAME]...", nargs=-1, type=NameType())
@click.option("--json", "as_json", is_flag=True, help="Print an array of objects (docs/kvctl.md).")
def list_command(names: tuple[str, ...], as_json: bool) -> None:
    """Show every instance: its limit and its memory."""
    there = remote_controller()
    if there is None:
        sweep()
    found: list[Row] = rows(names) if there is None else list(there.rows(names))
    if as_json:
        print_json(found)
        return
    show(
        lambda: plain_table(found),
        lambda width: rich_table(found, width, ascii_only=_is_ascii()),
    )


@click.command("watch", short_help="Repeat the list until Ctrl-C.")
@click.argument("names", metavar="[NAME]...", nargs=-1, type=NameType())
@click.option(
    "-n",
    "--interval",
    "interval_s",
    type=SecondsType(0.1),
    default=1.0,
    metavar="SECONDS",
    show_default=True,
    help="Time between two refreshes.",
)
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="Stop after N refreshes.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print the array of `list`, one line for each refresh."
)
def watch_command(
    names: tuple[str, ...], interval_s: float, count: int | None, as_json: bool
) -> None:
    """Show the instances repeatedly, until Ctrl-C.

    On a terminal the table stays in place; in a pipe each interval prints a plain table.
    """
    there = remote_controller()
    if there is None:
        sweep()
        names = own_names(names)  # an unknown name is an error now, instead of an empty table

    def look() -> list[Row]:
        if there is not None:
            return list(there.rows(names))
        sweep(quiet=True)
        return [row for row in rows(()) if not names or row["name"] in names]

    watch(look, interval_s, count, as_json=as_json)


def watch(
    look: Callable[[], list[Row]],
    interval_s: float,
    count: int | None = None,
    *,
    as_json: bool = False,
) -> None:
    """Show the result of `look` every `interval_s` seconds, `count` times or until Ctrl-C."""
    try:
        if as_json:
            _watch_json(look, interval_s, count)
        elif sys.stdout.isatty():
            _watch_terminal(look, interval_s, count)
        else:
            _watch_pipe(look, interval_s, count)
    except KeyboardInterrupt:
        pass  # Ctrl-C is the normal end


def _watch_json(look: Callable[[], list[Row]], interval_s: float, count: int | None) -> None:
    def once() -> None:
        print_json(look(), indent=None)
        sys.stdout.flush()

    _repeat(once, interval_s, count)


def _watch_pipe(look: Callable[[], list[Row]], interval_s: float, count: int | None) -> None:
    def once() -> None:
        print_lines(f"# {time.strftime('%H:%M:%S')}", *plain_table(look()).split("\n"), "")
        sys.stdout.flush()

    _repeat(once, interval_s, count)


def _watch_terminal(look: Callable[[], list[Row]], interval_s: float, count: int | None) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    ascii_only = _is_ascii()  # before Live replaces stdout
    with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:

        def once() -> None:
            # Read the width each time: the window may have been resized.
            table = rich_table(look(), shutil.get_terminal_size().columns, ascii_only=ascii_only)
            live.update(table, refresh=True)

        _repeat(once, interval_s, count)


def _repeat(once: Callable[[], None], interval_s: float, count: int | None) -> None:
    """Call `once` at a fixed interval, independent of its duration."""
    start, done = time.monotonic(), 0
    while True:
        once()
        done += 1
        if count is not None and done >= count:
            return
        passed_s = time.monotonic() - start
        time.sleep(max(interval_s - passed_s % interval_s, 0.0))


def _is_ascii() -> bool:
    """Return True if the terminal's encoding lacks the glyphs of the bars."""
    try:
        "█▓▒·".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return True
    return False
