"""The commands of `kvctl --address`, which call a controller.

Arguments, output and exit codes are those of the local commands. `sleep` and `wake` differ: the
controller puts the engine to sleep, or wakes it, together with its memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import click

from kvelastic.cli.commands import limits, listing, sleeping
from kvelastic.cli.controller_calls import RemoteController
from kvelastic.cli.rendering.exit_codes import fail
from kvelastic.cli.rendering.printing import print_json, print_lines

if TYPE_CHECKING:
    from kvelastic.instance.row import Row


def command(name: str) -> click.Command | None:
    """Return the command `name` that calls the controller, or None if it exists only locally."""
    known = _COMMANDS.get(name)
    if known is None:
        return None
    local, run = known
    return type(local)(
        name,
        params=[each for each in local.params if (name, each.name) not in _LOCAL_ONLY],
        callback=click.pass_context(run),
        help=local.help,
        short_help=local.short_help,
    )


def _there(context: click.Context) -> RemoteController:
    return RemoteController(context.find_root().params["address"])


def _list(context: click.Context, names: tuple[str, ...], as_json: bool) -> None:
    found = _there(context).rows(names)
    if as_json:
        print_json(found)
    else:
        listing.show(list(found))


def _watch(
    context: click.Context,
    names: tuple[str, ...],
    interval_s: float,
    count: int | None,
    as_json: bool,
) -> None:
    there = _there(context)

    def look() -> list[Row]:
        return list(there.rows(names))

    listing.watch(look, interval_s, count, as_json=as_json)


def _limit(context: click.Context, name: str, size: int, wait_s: float | None) -> None:
    _ask(context, name, wait_s, limit_bytes=size)


def _limit_percent(context: click.Context, name: str, percent: float, wait_s: float | None) -> None:
    (row,) = _there(context).rows((name,))
    if not row["capacity_bytes"]:
        fail(f"{name} has not said yet how large its device is; use `limit` with a size.")
    _ask(context, name, wait_s, limit_bytes=int(row["capacity_bytes"] * percent / 100))


def _set(
    context: click.Context,
    name: str,
    min_bytes: int | None,
    limit_bytes: int | None,
    priority: int | None,
    wait_s: float | None,
) -> None:
    if limit_bytes is None and min_bytes is None and priority is None:
        raise click.UsageError("say what to set: --min, --limit or --priority.")
    _ask(context, name, wait_s, limit_bytes=limit_bytes, min_bytes=min_bytes, priority=priority)


def _trim(context: click.Context, name: str, wait_s: float | None) -> None:
    _ask(context, name, wait_s, trim=True)


def _ask(context: click.Context, name: str, wait_s: float | None, **wanted: Any) -> None:
    from kvelastic.shared.segment import Request

    request = Request(**wanted)
    limits.report(name, request, *_there(context).request(name, request, wait_s), wait_s)


def _sleep(context: click.Context, name: str) -> None:
    _set_asleep(context, name, True)


def _wake(context: click.Context, name: str) -> None:
    _set_asleep(context, name, False)


def _set_asleep(context: click.Context, name: str, asleep: bool) -> None:
    is_done, message = _there(context).set_asleep(name, asleep)
    if not is_done:
        fail(f"{name}: {message}")
    print_lines(f"{name}: {message}")


_COMMANDS: Final[dict[str, tuple[click.Command, Callable[..., None]]]] = {
    "limit": (limits.limit_command, _limit),
    "limit-percent": (limits.limit_percent_command, _limit_percent),
    "list": (listing.list_command, _list),
    "set": (limits.set_command, _set),
    "sleep": (sleeping.sleep_command, _sleep),
    "trim": (limits.trim_command, _trim),
    "wake": (sleeping.wake_command, _wake),
    "watch": (listing.watch_command, _watch),
}
NAMES: Final = tuple(_COMMANDS)
_LOCAL_ONLY: Final = {("sleep", "wait_s"), ("wake", "wait_s")}
"""Parameters only of local commands: the controller itself waits for sleep and wake."""
