"""The commands that put an instance to sleep and wake it: sleep, wake.

A sleeping instance allocates no block and holds no memory. Its limit does not change. The commands
write the request, wait for the reply for up to --wait, and print the outcome. With `--address` the
controller puts the engine to sleep, or wakes it, together with its memory, and waits itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from kvelastic.cli.arguments import NameType, remote_controller, wait_option
from kvelastic.cli.commands.limits import end, report, send
from kvelastic.cli.rendering.exit_codes import EXIT_TIMED_OUT, fail, fall_short
from kvelastic.cli.rendering.printing import print_lines
from kvelastic.cli.segment_lookup import readable, sweep

_STATISTICS_S: Final = 2.0
"""Maximum wait for tier statistics newer than the sleep. They are published every 0.5 s."""
_LOOK_S: Final = 0.05

if TYPE_CHECKING:
    from kvelastic.instance.outcome import Outcome
    from kvelastic.shared.segment import Ack, SegmentInfo


@click.command("sleep", short_help="Release an instance's memory until it is woken.")
@click.argument("name", type=NameType())
@wait_option("all memory is released")
def sleep_command(name: str, wait_s: float | None = None) -> None:
    """Put an instance to sleep: it allocates no block and releases its memory.

    Cached blocks are evicted. With tiers they are copied first: to the nearest tier before the
    command ends, to farther ones afterwards. Blocks in use are released when their requests end
    (exit code 3 if that takes longer than --wait). The limit stays. `kvctl wake` ends the
    sleep.
    """
    _ask(name, wait_s, asleep=True)


@click.command("wake", short_help="Wake a sleeping instance.")
@click.argument("name", type=NameType())
@wait_option("it is awake")
def wake_command(name: str, wait_s: float | None = None) -> None:
    """Wake an instance: it allocates blocks again, within its limit.

    Memory comes with the next request.
    """
    _ask(name, wait_s, asleep=False)


def _ask(name: str, wait_s: float | None, *, asleep: bool) -> None:
    from kvelastic.instance.outcome import HOLDS, Verdict
    from kvelastic.shared.segment import Request

    there = remote_controller()
    if there is not None:
        is_done, message = there.set_asleep(name, asleep)
        if not is_done:
            fail(f"{name}: {message}")
        print_lines(f"{name}: {message}")
        return
    before = readable(name, sweep())
    request = Request(asleep=asleep)
    outcome, answer = send(name, request, wait_s)
    if outcome.verdict not in HOLDS | {Verdict.SHRINKING}:
        report(name, request, outcome, answer, wait_s)
    elif asleep:
        _end_sleep(before, answer, wait_s)
    else:
        _end_wake(before, outcome, answer, wait_s)


def _end_sleep(before: SegmentInfo, answer: Ack, wait_s: float | None) -> None:
    from kvelastic.units import format_size

    name, already = before.name, " already" if before.usage["asleep"] else ""
    mapped = format_size(answer.mapped_bytes)
    if answer.mapped_bytes:
        in_use = format_size(_in_use_bytes(name))
        why = f" ({answer.reason})" if answer.reason else ""
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
    print_lines(
        f"{name} is asleep{already};{given if given_bytes else ''} {mapped} are mapped."
        + _still_written(before)
    )


def _still_written(info: SegmentInfo) -> str:
    """Return text on pending writes to farther tiers. Waits up to 2 s for current statistics."""
    import time

    from kvelastic.errors import SegmentError
    from kvelastic.shared.tier_status import read
    from kvelastic.units import format_size

    asked_ns, until_s = time.time_ns(), time.monotonic() + _STATISTICS_S
    try:
        shown = read(info)
        while shown is not None and shown.published_realtime_ns < asked_ns:
            if time.monotonic() > until_s:
                break
            time.sleep(_LOOK_S)
            shown = read(info)
    except SegmentError:  # it has ended, or is of another version
        return ""
    left = ", ".join(
        f"{format_size(tier.waiting_bytes)} to {tier.tier}"
        for tier in (() if shown is None else shown.tiers)
        if tier.waiting_bytes
    )
    if not left:
        return ""
    return f" Still being written: {left}; `kvctl tiers {info.name}` shows what is left."


def _in_use_bytes(name: str) -> int:
    from kvelastic.errors import SegmentError
    from kvelastic.shared.segment import inspect

    try:
        in_use_bytes: int = inspect(name).usage.get("in_use_bytes", 0)
    except SegmentError:  # it has ended
        return 0
    return in_use_bytes


def _end_wake(before: SegmentInfo, outcome: Outcome, answer: Ack, wait_s: float | None) -> None:
    from kvelastic.cli.rendering.outcome_text import ENGINE_SLEEPS
    from kvelastic.units import format_limit, format_size

    already = "" if before.usage["asleep"] else " already"
    limit = format_limit(answer.limit_bytes, answer.page_bytes)
    message = f"{before.name} is awake{already}; its limit is {limit}"
    if answer.over_bytes:
        message += f", and {format_size(answer.over_bytes)} are still to be given back"
    else:
        message += f", and {format_size(answer.mapped_bytes)} are mapped"
    if outcome.engine_asleep:
        message += f"; {ENGINE_SLEEPS}"
    end(message, outcome, wait_s)
