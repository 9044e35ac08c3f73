"""The commands that put an instance to sleep and wake it: sleep, wake.

A sleeping instance hands out no block and holds no memory; its limit stays what it is. The commands
write the wish, wait for the answer as long as --wait says, and say what has become of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvelastic.cli.arguments import NameType, wait_option
from kvelastic.cli.endings import EXIT_FAILED, EXIT_TIMED_OUT, fall_short
from kvelastic.cli.finding import readable, sweep

if TYPE_CHECKING:
    from kvelastic.segment import Answer, SegmentInfo


@click.command("sleep", short_help="Have an instance hold no memory until it is woken.")
@click.argument("name", type=NameType())
@wait_option("nothing is held")
def sleep_command(name: str, wait_s: float | None) -> None:
    """Put an instance to sleep: it hands out no block and gives all its memory back.

    What is cached is evicted. What requests still use goes when they end (exit code 3 if that is
    not so within --wait). The limit stays, and nothing is handed out again before `kvctl wake`.
    """
    before = readable(name, sweep())
    answer = _wish(name, asleep=True, wait_s=wait_s)
    if answer is not None:
        _report_sleep(before, answer, wait_s)


@click.command("wake", short_help="Wake an instance that sleeps.")
@click.argument("name", type=NameType())
@wait_option("it is awake")
def wake_command(name: str, wait_s: float | None) -> None:
    """Wake an instance: it hands out blocks again, within the limit that it has.

    Memory comes with the next request.
    """
    before = readable(name, sweep())
    answer = _wish(name, asleep=False, wait_s=wait_s)
    if answer is not None:
        _report_wake(before, answer, wait_s)


def _wish(name: str, *, asleep: bool, wait_s: float | None) -> Answer | None:
    """Wish it; None where it is said already that it has not come true."""
    from kvelastic.cli.rows import printable
    from kvelastic.segment import wish

    answer = wish(name, asleep=asleep, wait_s=wait_s)
    verb, is_now = "sleep" if asleep else "wake", "asleep" if answer.asleep else "awake"
    if answer.state == "none":
        message = f"{name}: {verb} is wished; the instance has not answered"
        fall_short(message, wait_s, EXIT_TIMED_OUT)
        return None
    if answer.state == "failed":
        why = f"{name} has failed: {printable(answer.reason)}"
    elif answer.asleep == asleep:
        return answer  # a later wish, for something else, changes nothing about it
    elif not answer.is_to_the_wish:
        why = f"{name}: {verb} was overtaken by a later wish; it is {is_now}"
    elif answer.state == "refused":
        why = f"{name}: {verb} is refused: {printable(answer.reason)}"
    else:
        why = f"{name}: {verb} is not taken by the instance; it is {is_now}"
    fall_short(why, wait_s, EXIT_FAILED)
    return None


def _report_sleep(before: SegmentInfo, answer: Answer, wait_s: float | None) -> None:
    from kvelastic.cli.rows import printable
    from kvelastic.sizes import format_size

    name, already = before.name, " already" if before.usage["asleep"] else ""
    mapped = format_size(answer.mapped_bytes)
    if answer.mapped_bytes:
        in_use = format_size(_in_use_bytes(name))
        why = f" ({printable(answer.reason)})" if answer.reason else ""
        message = (
            f"{name} hands out nothing{already}; {mapped} are held still{why}, {in_use} of that in"
            " blocks that requests use, and go when those end"
        )
        if wait_s is not None:
            message += "; it was not asleep"
        fall_short(message, wait_s, EXIT_TIMED_OUT)
        return
    given_bytes = max(0, before.usage["mapped_bytes"] - answer.mapped_bytes)
    given = f" {format_size(given_bytes)} ({given_bytes} bytes) were given back;"
    click.echo(f"{name} is asleep{already};{given if given_bytes else ''} {mapped} are mapped.")


def _in_use_bytes(name: str) -> int:
    from kvelastic.errors import SegmentError
    from kvelastic.segment import inspect

    try:
        in_use_bytes: int = inspect(name).usage.get("in_use_bytes", 0)
    except SegmentError:  # it has ended meanwhile
        return 0
    return in_use_bytes


def _report_wake(before: SegmentInfo, answer: Answer, wait_s: float | None) -> None:
    from kvelastic.sizes import format_size

    already = "" if before.usage["asleep"] else " already"
    limit = format_size(answer.effective_limit_bytes)
    message = f"{before.name} is awake{already}; its limit is {limit}"
    if answer.state == "shrinking":
        over = format_size(answer.over_bytes)
        message += f", and {over} are still to be given back"
        fall_short(message, wait_s, EXIT_TIMED_OUT)
        return
    click.echo(f"{message}, and {format_size(answer.mapped_bytes)} are mapped.")
