"""The commands that send a request to an instance: limit, limit-percent, set, trim.

They write the request, wait for the reply for up to --wait, and print the outcome.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kvelastic.cli.arguments import (
    LIMIT,
    PERCENT,
    SIZE,
    NameType,
    ValueCommand,
    remote_controller,
    wait_option,
)
from kvelastic.cli.rendering.exit_codes import EXIT_FAILED, EXIT_TIMED_OUT, fail, fall_short
from kvelastic.cli.rendering.printing import print_lines
from kvelastic.cli.segment_lookup import explain_reaped, readable, sweep
from kvelastic.errors import SegmentNotFoundError
from kvelastic.units import MAX_PRIORITY

if TYPE_CHECKING:
    from kvelastic.instance.outcome import Outcome
    from kvelastic.shared.segment import Ack, Request


@click.command("limit", cls=ValueCommand, short_help="Set the memory limit of an instance.")
@click.argument("name", type=NameType())
@click.argument("size", type=LIMIT)
@wait_option("the request is applied")
def limit_command(name: str, size: int, wait_s: float | None) -> None:
    """Set the memory limit of an instance to SIZE (512M, 1.5GiB, 2g, or bytes).

    `none` removes the limit: the instance may use its whole device. --wait waits until the
    limit is applied (exit code 3 if that takes longer). A refused request ends with exit code
    1.
    """
    _ask(name, wait_s, limit_bytes=size)


@click.command(
    "limit-percent",
    cls=ValueCommand,
    short_help="Set the limit as a percentage of the device's capacity.",
)
@click.argument("name", type=NameType())
@click.argument("percent", type=PERCENT)
@wait_option("the request is applied")
def limit_percent_command(name: str, percent: float, wait_s: float | None) -> None:
    """Set the memory limit of an instance to PERCENT of its own device's capacity."""
    there = remote_controller()
    capacity_bytes: int | None = (
        there.rows((name,))[0]["capacity_bytes"]
        if there is not None
        else readable(name, sweep()).usage["capacity_bytes"]
    )
    if not capacity_bytes:
        fail(f"{name} has not said yet how large its device is; use `kvctl limit` with a size.")
    _ask(name, wait_s, limit_bytes=int(capacity_bytes * percent / 100))


@click.command("set", cls=ValueCommand, short_help="Set guarantee, limit and priority in one step.")
@click.argument("name", type=NameType())
@click.option(
    "--min",
    "min_bytes",
    type=SIZE,
    metavar="SIZE",
    help="Guarantee: no other instance takes memory below it.",
)
@click.option("--limit", "limit_bytes", type=LIMIT, metavar="SIZE", help="Limit, or `none`.")
@click.option(
    "--priority",
    type=click.IntRange(-MAX_PRIORITY, MAX_PRIORITY),
    metavar="N",
    help=f"{-MAX_PRIORITY} to {MAX_PRIORITY}; higher keeps its memory longer.",
)
@wait_option("the request is applied")
def set_command(
    name: str,
    min_bytes: int | None,
    limit_bytes: int | None,
    priority: int | None,
    wait_s: float | None,
) -> None:
    """Set guarantee, limit and priority of an instance in one step.

    Other values stay. The instance accepts the whole request or refuses it (guarantees that add
    up to more than the capacity). --wait and exit codes are those of `limit`.
    """
    if limit_bytes is None and min_bytes is None and priority is None:
        raise click.UsageError("say what to set: --min, --limit or --priority.")
    _ask(name, wait_s, limit_bytes=limit_bytes, min_bytes=min_bytes, priority=priority)


@click.command("trim", short_help="Release parked pages.")
@click.argument("name", type=NameType())
@wait_option("it is done")
def trim_command(name: str, wait_s: float | None) -> None:
    """Make an instance release its parked pages: free pages, kept mapped for the next use.

    Prints the released size. Contents and limit stay.
    """
    from kvelastic.shared.segment import Request

    if remote_controller() is not None:
        _ask(name, wait_s, trim=True)
        return
    before = readable(name, sweep())
    outcome, answer = send(name, Request(trim=True), wait_s)
    _end_trim(name, before.usage["mapped_bytes"], outcome, answer, wait_s)


def _ask(name: str, wait_s: float | None, **wanted: Any) -> None:
    """Send a request, print its outcome, and end the command with the matching exit code."""
    from kvelastic.shared.segment import Request

    request = Request(**wanted)
    report(name, request, *send(name, request, wait_s), wait_s)


def send(name: str, request: Request, wait_s: float | None) -> tuple[Outcome, Ack]:
    """Send a request; return its outcome and answer. End the command if the instance has ended."""
    there = remote_controller()
    if there is not None:
        return there.request(name, request, wait_s)
    from kvelastic.instance.outcome import outcome_of
    from kvelastic.shared import segment

    reaped = sweep()
    try:
        answer = segment.request(name, **vars(request), wait_s=wait_s)
    except SegmentNotFoundError:
        explain_reaped(name, reaped)
        raise
    return outcome_of(request, answer), answer


def report(
    name: str, request: Request, outcome: Outcome, answer: Ack, wait_s: float | None
) -> None:
    """Print the outcome of a request in the words that all requests share. Ends as `end` does."""
    from kvelastic.cli.rendering.outcome_text import outcome_text
    from kvelastic.instance.row import printable

    end(outcome_text(printable(name), request, outcome, answer), outcome, wait_s)


def end(message: str, outcome: Outcome, wait_s: float | None) -> None:
    """Print the outcome of a request.

    Success goes to stdout, and without --wait a pending result too. Everything else is an error
    with its exit code (raises SystemExit).
    """
    from kvelastic.instance.outcome import HOLDS, MAY_HOLD

    if outcome.verdict in HOLDS:
        print_lines(f"{message}.")
    elif outcome.verdict in MAY_HOLD:
        fall_short(message, wait_s, EXIT_TIMED_OUT)
    else:
        fail(f"{message}.", EXIT_FAILED)


def _end_trim(
    name: str, mapped_before_bytes: int, outcome: Outcome, answer: Ack, wait_s: float | None
) -> None:
    from kvelastic.errors import SegmentError
    from kvelastic.instance.outcome import HOLDS, Verdict
    from kvelastic.instance.row import printable
    from kvelastic.shared.segment import Request, inspect
    from kvelastic.units import format_size

    if outcome.verdict not in HOLDS | {Verdict.SHRINKING}:
        report(name, Request(trim=True), outcome, answer, wait_s)
        return
    given_bytes = max(0, mapped_before_bytes - answer.mapped_bytes)
    message = (
        f"{name}: {format_size(given_bytes)} ({given_bytes} bytes) were given back;"
        f" {format_size(answer.mapped_bytes)} are mapped"
    )
    if answer.over_bytes:
        over = format_size(answer.over_bytes)
        why = "of one that is asleep" if answer.asleep else "of that over the limit"
        message += f", {over} {why} and still to be given back"
    else:
        try:
            parked_bytes = inspect(name).usage.get("parked_bytes", 0)
        except SegmentError:  # it has ended, and its parked pages are released
            parked_bytes = 0
        if parked_bytes:
            why = f": {printable(answer.reason)}" if answer.reason else ""
            message += f", {format_size(parked_bytes)} of that parked again or still{why}"
    end(message, outcome, wait_s)
