"""The commands that wish something of an instance: limit, limit-percent, set, trim.

They write the wish, wait for the answer as long as --wait says, and say what the answer was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from kvelastic.cli.arguments import NameType, PercentType, SizeType, ValueCommand, wait_option
from kvelastic.cli.endings import EXIT_FAILED, EXIT_TIMED_OUT, fail, fall_short
from kvelastic.cli.finding import explain_reaped, readable, sweep
from kvelastic.errors import SegmentNotFoundError
from kvelastic.sizes import MAX_PRIORITY

if TYPE_CHECKING:
    from kvelastic.segment import Answer


@dataclass(frozen=True)
class Wished:
    """What is asked for in one step; None leaves a thing as it is."""

    limit_bytes: int | None = None
    min_bytes: int | None = None
    priority: int | None = None

    @property
    def is_nothing(self) -> bool:
        """Whether there is nothing to wish for."""
        return self == Wished()

    @property
    def is_one(self) -> bool:
        """Whether it is one thing and no more: `is`, not `are`."""
        return sum(x is not None for x in (self.limit_bytes, self.min_bytes, self.priority)) == 1

    def __str__(self) -> str:
        from kvelastic.sizes import format_size

        parts = []
        if self.limit_bytes is not None:
            parts.append(f"limit {format_size(self.limit_bytes)} ({self.limit_bytes} bytes)")
        if self.min_bytes is not None:
            parts.append(f"guarantee {format_size(self.min_bytes)} ({self.min_bytes} bytes)")
        if self.priority is not None:
            parts.append(f"priority {self.priority}")
        return ", ".join(parts)


# ---------------------------------------------------------------------------------- the commands


@click.command("limit", cls=ValueCommand, short_help="Set the memory limit of an instance.")
@click.argument("name", type=NameType())
@click.argument("size", type=SizeType())
@wait_option("applied")
def limit_command(name: str, size: int, wait_s: float | None) -> None:
    """Set the memory limit of an instance to SIZE (512M, 1.5GiB, 2g, or bytes).

    Without --wait it is enough that the wish is written; with it, the instance must have applied
    the limit in that time (exit code 3 if not, 1 if it refuses).
    """
    _wish(name, Wished(limit_bytes=size), wait_s)


@click.command("limit-percent", cls=ValueCommand, short_help="The same, in percent of its device.")
@click.argument("name", type=NameType())
@click.argument("percent", type=PercentType())
@wait_option("applied")
def limit_percent_command(name: str, percent: float, wait_s: float | None) -> None:
    """Set the memory limit of an instance to PERCENT of its own device's capacity."""
    capacity_bytes: int = readable(name, sweep()).usage["capacity_bytes"]
    if capacity_bytes == 0:
        fail(f"{name} has not said yet how large its device is; use `kvctl limit` with a size.")
    _wish(name, Wished(limit_bytes=int(capacity_bytes * percent / 100)), wait_s)


@click.command("set", cls=ValueCommand, short_help="Set guarantee, limit and priority in one step.")
@click.argument("name", type=NameType())
@click.option("--min", "min_bytes", type=SizeType(), metavar="SIZE", help="Never taken from it.")
@click.option("--limit", "limit_bytes", type=SizeType(), metavar="SIZE", help="Never exceeded.")
@click.option(
    "--priority",
    type=click.IntRange(-MAX_PRIORITY, MAX_PRIORITY),
    metavar="N",
    help=f"{-MAX_PRIORITY} to {MAX_PRIORITY}; higher keeps its memory longer.",
)
@wait_option("applied")
def set_command(
    name: str,
    min_bytes: int | None,
    limit_bytes: int | None,
    priority: int | None,
    wait_s: float | None,
) -> None:
    """Set the guarantee, the limit and the priority of an instance, all of them in one step.

    What is not named stays as it is. The instance takes all of it or, where it refuses (guarantees
    that add up to more than the device), nothing. --wait and exit codes are those of `limit`.
    """
    wished = Wished(limit_bytes, min_bytes, priority)
    if wished.is_nothing:
        raise click.UsageError("say what to set: --min, --limit or --priority.")
    _wish(name, wished, wait_s)


@click.command("trim", short_help="Give parked pages back.")
@click.argument("name", type=NameType())
@wait_option("it is done")
def trim_command(name: str, wait_s: float | None) -> None:
    """Have an instance give back its parked pages: free ones, kept mapped for the next use.

    Says how much came back. Nothing that holds contents is touched, and the limit stays.
    """
    from kvelastic.segment import wish

    before = readable(name, sweep())
    answer = wish(name, trim=True, wait_s=wait_s)
    _report_trim(name, before.usage["mapped_bytes"], answer, wait_s)


# ----------------------------------------------------------------------------- what is said of it


def _wish(name: str, wished: Wished, wait_s: float | None) -> None:
    from kvelastic.segment import wish

    reaped = sweep()
    try:
        answer = wish(
            name,
            limit_bytes=wished.limit_bytes,
            min_bytes=wished.min_bytes,
            priority=wished.priority,
            wait_s=wait_s,
        )
    except SegmentNotFoundError:
        explain_reaped(name, reaped)
        raise
    _report(name, wished, answer, wait_s)


def _report(name: str, wished: Wished, answer: Answer, wait_s: float | None) -> None:
    """Say what the instance answered, and leave with the exit code for it."""
    from kvelastic.cli.rows import printable
    from kvelastic.sizes import format_size

    are, were = ("is", "was") if wished.is_one else ("are", "were")
    if answer.state == "none":
        message = f"{name}: {wished} {are} wished; the instance has not answered"
        fall_short(message, wait_s, EXIT_TIMED_OUT)
    elif not answer.is_to_the_wish:
        now = _in_force(wished, answer)
        fall_short(f"{name}: {wished} {were} overtaken by a later wish; {now}", wait_s, EXIT_FAILED)
    elif answer.state == "failed":
        fall_short(f"{name} has failed: {printable(answer.reason)}", wait_s, EXIT_FAILED)
    elif answer.state == "refused":
        fall_short(
            f"{name}: {wished} {are} refused: {printable(answer.reason)}", wait_s, EXIT_FAILED
        )
    elif not _is_taken(wished, answer):
        # `applied` is the instance's word for the limit; a guarantee that it does not keep is not.
        now = _in_force(wished, answer)
        fall_short(f"{name}: {wished} {are} not taken by the instance; {now}", wait_s, EXIT_FAILED)
    elif answer.state == "shrinking":
        asleep = "it is asleep, and " if answer.asleep else ""
        over = format_size(answer.over_bytes)
        message = f"{name}: {wished} {are} accepted; {asleep}{over} are still to be given back"
        fall_short(message, wait_s, EXIT_TIMED_OUT)
    elif answer.asleep:
        click.echo(f"{name}: {wished} applied; it is asleep until `kvctl wake {name}`.")
    else:
        click.echo(f"{name}: {wished} applied; {format_size(answer.mapped_bytes)} are mapped.")


def _report_trim(name: str, mapped_before_bytes: int, answer: Answer, wait_s: float | None) -> None:
    from kvelastic.cli.rows import printable
    from kvelastic.errors import SegmentError
    from kvelastic.segment import inspect
    from kvelastic.sizes import format_size

    if answer.state == "none":
        message = f"{name}: the trim is wished; the instance has not answered"
        fall_short(message, wait_s, EXIT_TIMED_OUT)
        return
    if answer.state == "failed":
        fall_short(f"{name} has failed: {printable(answer.reason)}", wait_s, EXIT_FAILED)
        return
    if answer.state == "refused" and answer.is_to_the_wish:
        fall_short(f"{name}: the trim is refused: {printable(answer.reason)}", wait_s, EXIT_FAILED)
        return
    given_bytes = max(0, mapped_before_bytes - answer.mapped_bytes)
    message = (
        f"{name}: {format_size(given_bytes)} ({given_bytes} bytes) were given back;"
        f" {format_size(answer.mapped_bytes)} are mapped"
    )
    if answer.state == "shrinking":
        over = format_size(answer.over_bytes)
        why = "of one that is asleep" if answer.asleep else "of that over the limit"
        message += f", {over} {why} and still to be given back"
        fall_short(message, wait_s, EXIT_TIMED_OUT)
        return
    try:
        parked_bytes = inspect(name).usage.get("parked_bytes", 0)
    except SegmentError:  # it has ended meanwhile, and with it all that was parked
        parked_bytes = 0
    if parked_bytes:
        why = f": {printable(answer.reason)}" if answer.reason else ""
        message += f", {format_size(parked_bytes)} of that parked again or still{why}"
    click.echo(f"{message}.")


def _is_taken(wished: Wished, answer: Answer) -> bool:
    """Whether what the instance keeps to is what was asked; a guarantee may be rounded up."""
    is_guaranteed = wished.min_bytes is None or answer.min_bytes >= wished.min_bytes
    return is_guaranteed and wished.priority in {None, answer.priority}


def _in_force(wished: Wished, answer: Answer) -> str:
    """What holds instead, of the things that were asked for."""
    from kvelastic.sizes import format_size

    parts = []
    if wished.limit_bytes is not None:
        limit = format_size(answer.effective_limit_bytes)
        parts.append("it is asleep" if answer.asleep else f"the limit is now {limit}")
    if wished.min_bytes is not None:
        parts.append(f"the guarantee is now {format_size(answer.min_bytes)}")
    if wished.priority is not None:
        parts.append(f"the priority is now {answer.priority}")
    return ", ".join(parts)
