"""`kvctl tiers`: shows the tiers of cached blocks, and sends requests to them.

    kvctl tiers [NAME]                        show
    kvctl tiers limit|trim|clear|erase|verify NAME ...

The commands of the second line write a request to the instance's tier status file and wait for the
answer to that request. Several operators may send requests concurrently; each gets its own answer.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import click

from kvelastic.cli.arguments import AGE, SIZE, NameType, TierType, ValueCommand, wait_option
from kvelastic.cli.rendering.exit_codes import fail, print_pending
from kvelastic.cli.rendering.printing import print_json, print_lines
from kvelastic.cli.rendering.show_group import ShowingGroup
from kvelastic.cli.segment_lookup import readable, sweep

if TYPE_CHECKING:
    from kvelastic.shared.tier_status import TierAck, TierRequest, TiersStatus

_GLANCE_S: Final = 2.0
"""Maximum wait for an answer if --wait is not given. Stores take part, and may be slow."""
_VERIFY_S: Final = 60.0


_json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print objects (docs/kvctl.md)."
)


@click.group("tiers", cls=ShowingGroup, short_help="Show and control the tiers of cached blocks.")
def tiers_command() -> None:
    """Show the tiers of every instance, or of NAME; or change them.

    `kvctl tiers [NAME] [--json]` shows them. Use `kvctl tiers show NAME` for an instance with
    the name of a command.
    """


@tiers_command.command("show")
@click.argument("name", type=NameType(), required=False)
@_json_option
def show_command(name: str | None, as_json: bool) -> None:
    """Show each tier's contents, work and cost, nearest first."""
    from kvelastic.cli.rendering.fitting_table import show
    from kvelastic.cli.rendering.tier_tables import as_object, plain_tables, rich_tables

    all_shown = _all_shown() if name is None else {name: _shown_of(name)}
    if as_json:
        print_json([as_object(*one) for one in all_shown.items()])
    else:
        show(lambda: plain_tables(all_shown), lambda width: rich_tables(all_shown, width))


@tiers_command.command("limit", cls=ValueCommand, short_help="Set the limit of a tier.")
@click.argument("name", type=NameType())
@click.argument("tier", type=TierType())
@click.argument("size", type=SIZE)
@wait_option("the tier is within the limit")
@_json_option
def limit_command(name: str, tier: str, size: int, wait_s: float | None, as_json: bool) -> None:
    """Set the limit of TIER to SIZE; the tier evicts records over it by its policy.

    A disk's limit belongs to its folders, for every engine. A restart uses KVELASTIC_TIERS
    again.
    """
    from kvelastic.shared.tier_status import TierRequest
    from kvelastic.units import format_size

    answer = _ask(name, TierRequest("limit", tier=tier, size_bytes=size), wait_s)
    held = _held(answer)
    message = f"{name}: {tier} holds at most {format_size(size)} now, and {held}"
    _end(message, answer, name, wait_s, as_json)


@tiers_command.command("trim", cls=ValueCommand)
@click.argument("name", type=NameType())
@click.argument("tier", type=TierType())
@click.argument("size", type=SIZE)
@wait_option("it is done")
@_json_option
def trim_command(name: str, tier: str, size: int, wait_s: float | None, as_json: bool) -> None:
    """Evict records of TIER down to SIZE, once; its limit stays."""
    from kvelastic.shared.tier_status import TierRequest
    from kvelastic.units import format_size

    answer = _ask(name, TierRequest("trim", tier=tier, size_bytes=size), wait_s)
    message = f"{name}: {tier} was trimmed to {format_size(size)}, and {_held(answer)}"
    _end(message, answer, name, wait_s, as_json)


@tiers_command.command("clear", short_help="Erase the records of its model and settings.")
@click.argument("name", type=NameType())
@click.option("--yes", is_flag=True, help="Do not ask.")
@wait_option("it is done")
@_json_option
def clear_command(name: str, yes: bool, wait_s: float | None, as_json: bool) -> None:
    """Erase every record of this instance's model and settings, in all its tiers.

    Other engines of the same namespace lose the shared records. Caches stay.
    """
    from kvelastic.instance.row import printable
    from kvelastic.shared.tier_status import TierRequest

    _shown_of(name)
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("stdin is not a terminal: add --yes.")
        click.confirm(f"Erase all that the tiers of {printable(name)} keep?", abort=True)
    answer = _ask(name, TierRequest("clear"), wait_s)
    _end(f"{name}: {_erased(name, answer)}", answer, name, wait_s, as_json)


@tiers_command.command("erase", cls=ValueCommand)
@click.argument("name", type=NameType())
@click.option("--model", metavar="MODEL", help="Only of this model, as engines call it.")
@click.option(
    "--older-than",
    "age_s",
    type=AGE,
    metavar="AGE",
    help="Only records older than this (90s, 15m, 12h, 7d).",
)
@wait_option("it is done")
@_json_option
def erase_command(
    name: str, model: str | None, age_s: float | None, wait_s: float | None, as_json: bool
) -> None:
    """Erase records in all its tiers by model, by age, or both.

    Includes other engines' records in these tiers; `clear` erases all of the instance's own.
    """
    from kvelastic.shared.tier_status import TierRequest

    if model is None and age_s is None:
        raise click.UsageError("say what to erase: --model or --older-than (`clear` erases all).")
    answer = _ask(name, TierRequest("erase", model=model, older_than_s=age_s), wait_s)
    _end(f"{name}: {_erased(name, answer)}", answer, name, wait_s, as_json)


@tiers_command.command("verify", short_help="Compare index, account and medium of each tier.")
@click.argument("name", type=NameType())
@wait_option("the check ends")
@_json_option
def verify_command(name: str, wait_s: float | None, as_json: bool) -> None:
    """Compare each tier's index with its account and its medium, and count records.

    Demotion pauses during the check. Exit code 1 at any difference. Waits a minute without
    --wait.
    """
    from kvelastic.shared.tier_status import TierRequest

    answer = _ask(name, TierRequest("verify"), _VERIFY_S if wait_s is None else wait_s)
    message = f"{name}: index, account and medium agree; {_by_tier(name, answer)}"
    _end(message, answer, name, _VERIFY_S if wait_s is None else wait_s, as_json)


def _all_shown() -> dict[str, TiersStatus]:
    from kvelastic.shared.segment import list_segments
    from kvelastic.shared.tier_status import tiers_of

    sweep()
    return dict(tiers_of(list_segments()))


def _shown_of(name: str) -> TiersStatus:
    from kvelastic.shared.tier_status import read

    info = readable(name, sweep())
    shown = read(info)
    if shown is None:
        fail(f"{name} has no tiers; KVELASTIC_TIERS gives an engine some when it starts.")
    return shown


def _ask(name: str, request: TierRequest, wait_s: float | None) -> TierAck | None:
    from kvelastic.shared.tier_status import ask

    shown = _shown_of(name)
    tiers = [one.tier for one in shown.tiers]
    if request.tier and request.tier not in tiers:
        fail(f"{name} has no tier {request.tier!r}; it has {', '.join(tiers)}.")
    info = readable(name, [])
    return ask(info, request, _GLANCE_S if wait_s is None else wait_s)


def _held(answer: TierAck | None) -> str:
    counts = [] if answer is None else [count for count in answer.counts if count is not None]
    return f"{counts[0]} records" if counts else "its contents are unknown"


def _erased(name: str, answer: TierAck | None) -> str:
    total = 0 if answer is None else sum(count or 0 for count in answer.counts)
    return f"{total} records erased ({_by_tier(name, answer)})"


def _by_tier(name: str, answer: TierAck | None) -> str:
    if answer is None:
        return ""
    tiers = [one.tier for one in _shown_of(name).tiers]
    return ", ".join(
        f"{tier} {'-' if count is None else count}"
        for tier, count in zip(tiers, answer.counts, strict=False)
    )


def _end(
    message: str, answer: TierAck | None, name: str, wait_s: float | None, as_json: bool
) -> None:
    """Print the outcome of a request, and end the command with its exit code."""
    if as_json:
        print_json(_answer_object(name, answer))
    if answer is None:
        print_pending(name, wait_s, as_json=as_json)
    elif answer.state == "done":
        if not as_json:
            but = f"; {answer.reason}" if answer.reason else ""
            print_lines(f"{message}{but}.")
    else:
        what = "refused it" if answer.state == "refused" else "failed to do it all"
        fail(f"{name} {what}: {answer.reason}.")


def _answer_object(name: str, answer: TierAck | None) -> dict[str, Any]:
    if answer is None:
        return {"name": name, "state": "pending", "records": None, "reason": ""}
    tiers = [one.tier for one in _shown_of(name).tiers]
    return {
        "name": name,
        "state": answer.state,
        "records": dict(zip(tiers, answer.counts, strict=False)),
        "reason": answer.reason,
    }
