"""kvctl: look at the instances of this machine and change their limits while they run.

Exit codes: 0 done; 1 no such segment, refused, or not possible; 2 wrong usage, nothing changed;
3 the time of --wait was over. What takes long to import is imported where it is used: every
command is a process of its own.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NoReturn

import click

from kvelastic import __version__
from kvelastic.cli.arguments import NameType, PercentType, SecondsType, SizeType, ValueCommand
from kvelastic.errors import InvalidArgumentError, KvelasticError, SegmentNotFoundError

if TYPE_CHECKING:
    from kvelastic.segment import Answer

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_TIMED_OUT = 3


class KvctlGroup(click.Group):
    """Turns the errors of kvelastic into a line on stderr and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except SegmentNotFoundError as error:
            _fail(f"{error}. {_known_names()}")
        except InvalidArgumentError as error:
            _fail(str(error), EXIT_USAGE)
        except KvelasticError as error:
            _fail(str(error))


@click.group(
    cls=KvctlGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog='Shell completion: eval "$(_KVCTL_COMPLETE=bash_source kvctl)" (or zsh, fish).',
)
@click.version_option(__version__, message="kvctl %(version)s")
def main() -> None:
    """Look at kvelastic's instances and change their memory limits while they run."""


@main.command("list", short_help="Show every instance.")
@click.argument("names", metavar="[NAME]...", nargs=-1, type=NameType())
@click.option("--json", "as_json", is_flag=True, help="Print an array of objects (docs/kvctl.md).")
def list_command(names: tuple[str, ...], as_json: bool) -> None:
    """Show every instance: its limit, and where its memory is."""
    _reap()
    rows = _rows(names)
    if as_json:
        import json

        click.echo(json.dumps(rows, indent=2))
        return
    from kvelastic.cli.screen import show

    show(rows)


@main.command("limit", cls=ValueCommand, short_help="Set the memory limit of an instance.")
@click.argument("name", type=NameType())
@click.argument("size", type=SizeType())
@click.option("--wait", "wait_s", type=SecondsType(0), metavar="SECONDS", help="Until applied.")
def limit_command(name: str, size: int, wait_s: float | None) -> None:
    """Set the memory limit of an instance to SIZE (512M, 1.5GiB, 2g, or bytes).

    Without --wait it is enough that the wish is written; with it, the instance must have applied
    the limit in that time (exit code 3 if not, 1 if it refuses).
    """
    _limit(name, size, wait_s)


@main.command("limit-percent", cls=ValueCommand, short_help="The same, in percent of its device.")
@click.argument("name", type=NameType())
@click.argument("percent", type=PercentType())
@click.option("--wait", "wait_s", type=SecondsType(0), metavar="SECONDS", help="Until applied.")
def limit_percent_command(name: str, percent: float, wait_s: float | None) -> None:
    """Set the memory limit of an instance to PERCENT of its own device's capacity."""
    reaped = _reap()
    capacity_bytes = _capacity_bytes(name, reaped)
    _limit(name, int(capacity_bytes * percent / 100), wait_s)


@main.command("delete")
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
        _fail(f"{error}. Nothing was removed; --force removes the name all the same.")
    click.echo(f"Deleted {name}.")


@main.command("gc", short_help="Remove what dead instances have left.")
def gc_command() -> None:
    """Remove what dead instances have left behind, and say what."""
    from kvelastic.cli.rows import printable
    from kvelastic.segment import list_segments, reap

    for name in reap():
        click.echo(f"Removed {printable(name)}.")
    for info in list_segments():
        if info.status == "dead":
            click.echo(f"Left {printable(info.name)}: dead, but not yours to remove.")
        elif info.status == "unreadable":
            click.echo(f"Left {printable(info.name)}: {info.problem}.")


@main.command("watch", short_help="List again and again, until Ctrl-C.")
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
def watch_command(names: tuple[str, ...], interval_s: float, count: int | None) -> None:
    """Show the instances again and again, until Ctrl-C.

    On a terminal the table stays in place; in a pipe one plain table an interval is printed.
    """
    from kvelastic.cli.screen import watch

    _reap()
    _rows(names)  # an unknown name is an error now, not an empty table for ever

    def look() -> list[Any]:
        _reap(quiet=True)
        wanted = set(names)
        return [row for row in _rows(()) if not wanted or row["name"] in wanted]

    watch(look, interval_s, count)


@main.command("serve", short_help="Run the controller: one HTTP front over many models.")
@click.option("--config", "-c", "path", required=True, metavar="FILE", help="docs/controller.md")
def serve_command(path: str) -> None:
    """Run the controller with the configuration FILE, until SIGTERM (kvelastic[controller])."""
    from kvelastic.controller.__main__ import main as controller

    controller.main(["--config", path], prog_name="kvctl serve")


@main.command("version")
def version_command() -> None:
    """Print the version."""
    click.echo(f"kvctl {__version__}")


# ------------------------------------------------------------------------------- behind the verbs


def _limit(name: str, limit_bytes: int, wait_s: float | None) -> None:
    from kvelastic.segment import wish

    reaped = _reap()
    try:
        answer = wish(name, limit_bytes=limit_bytes, wait_s=wait_s)
    except SegmentNotFoundError:
        _explain_reaped(name, reaped)
        raise
    _report(name, limit_bytes, answer, wait_s)


def _report(name: str, limit_bytes: int, answer: Answer, wait_s: float | None) -> None:
    """Say what the instance answered, and leave with the exit code for it."""
    from kvelastic.cli.rows import printable
    from kvelastic.sizes import format_size

    limit = f"limit {format_size(limit_bytes)} ({limit_bytes} bytes)"
    if answer.state == "none":
        _end(f"{name}: {limit} is wished; the instance has not answered", wait_s, EXIT_TIMED_OUT)
    elif not answer.is_to_the_wish:
        _end(
            f"{name}: {limit} was overtaken by a later wish; the limit is now"
            f" {format_size(answer.effective_limit_bytes)}",
            wait_s,
            EXIT_FAILED,
        )
    elif answer.state == "shrinking":
        _end(
            f"{name}: {limit} is accepted; {format_size(answer.over_bytes)} are still to be given"
            " back",
            wait_s,
            EXIT_TIMED_OUT,
        )
    elif answer.state == "refused":
        _end(f"{name}: {limit} is refused: {printable(answer.reason)}", wait_s, EXIT_FAILED)
    else:
        click.echo(f"{name}: {limit} applied; {format_size(answer.mapped_bytes)} are mapped.")


def _end(message: str, wait_s: float | None, code: int) -> None:
    """Not what was hoped for: an error only to those who waited for the outcome."""
    if wait_s is None:
        click.echo(f"{message}.")
        return
    waited = f" within {wait_s:g} s" if code == EXIT_TIMED_OUT else ""
    _fail(f"{message}{waited}.", code)


def _capacity_bytes(name: str, reaped: list[str]) -> int:
    from kvelastic.errors import SegmentFormatError
    from kvelastic.segment import inspect

    try:
        info = inspect(name)
    except SegmentNotFoundError:
        _explain_reaped(name, reaped)
        raise
    if info.status == "unreadable":
        raise SegmentFormatError(info.problem)
    capacity_bytes: int = info.usage["capacity_bytes"]
    if capacity_bytes == 0:
        _fail(f"{name} has not said yet how large its device is; use `kvctl limit` with a size.")
    return capacity_bytes


def _rows(names: tuple[str, ...]) -> list[Any]:
    """The rows of all segments, or of those named; one that is not there is an error."""
    from kvelastic.cli.rows import row_of
    from kvelastic.segment import list_segments

    rows = [row_of(info) for info in list_segments()]
    if not names:
        return rows
    by_name = {row["name"]: row for row in rows}
    missing = [name for name in names if name not in by_name]
    if missing:
        raise SegmentNotFoundError(f"no segment is called {', '.join(map(repr, missing))}")
    return [by_name[name] for name in dict.fromkeys(names)]


def _reap(*, quiet: bool = False) -> list[str]:
    """Remove what dead instances have left; every command that looks does it first."""
    from kvelastic.cli.rows import printable
    from kvelastic.segment import reap

    reaped = reap()
    for name in reaped if not quiet else ():
        click.echo(f"Removed {printable(name)}, whose instance has ended.", err=True)
    return reaped


def _explain_reaped(name: str, reaped: list[str]) -> None:
    if name in reaped:
        _fail(f"the instance of {name!r} has ended; its segment was removed just now.")


def _known_names() -> str:
    from kvelastic.cli.rows import printable
    from kvelastic.segment import list_segments

    names = [printable(info.name) for info in list_segments()]
    return f"Known names: {', '.join(names)}." if names else "There are no segments."


def _fail(message: str, code: int = EXIT_FAILED) -> NoReturn:
    click.echo(f"Error: {message}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main(prog_name="kvctl")
