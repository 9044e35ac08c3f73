"""kvctl doctor and kvctl explain: problems of this machine, and an instance's memory use.

Both print findings (`kvelastic.doctor`), as text or as JSON.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import click

from kvelastic.cli.arguments import NameType
from kvelastic.cli.finding import readable, sweep
from kvelastic.cli.rendering.saying import say_json, say_styled
from kvelastic.instance.row import printable, use_rows

if TYPE_CHECKING:
    from kvelastic.doctor.finding import Finding
    from kvelastic.instance.status import InstanceStatus
    from kvelastic.shared.ledger_facts import LedgerInfo

_TITLES = {
    "gpu": "GPU",
    "host": "Host memory",
    "limits": "Limits",
    "shm": "Shared memory",
    "segments": "Segments",
    "ledgers": "Ledgers",
    "instances": "Instances",
    "permissions": "Permissions",
    "config": "Configuration",
    "engines": "Engines",
    "python": "Python",
}
_COLOURS = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "red"}
_STATE_CELLS = max(map(len, _COLOURS))
_FEWEST_CELLS = 30
"""Minimum width for wrapping the doctor's text; on a narrower terminal it is not wrapped."""
_LEAST_COLUMNS: Final = 12
"""Minimum width of an explanation's sentence, on any terminal."""
_NOT_SHOWN: Final = frozenset(
    {
        "shown_tiers", "uuid", "uid", "is_known", "created", "counters", "shares", "uses",
        "pages_mapped", "pages_parked",
    }
)  # fmt: skip


@click.command("doctor", short_help="Check this machine and print advice.")
@click.option("--json", "as_json", is_flag=True, help="Print an array of objects (docs/doctor.md).")
@click.option("--probe", is_flag=True, help="Also load kvelastic into each engine (a minute).")
def doctor_command(as_json: bool, probe: bool) -> None:
    """Check this machine and print advice for each fault.

    Checks the GPUs and their driver, memory, limits, shared memory, kvelastic's variables and
    the installed engines; with --probe also whether these are built as expected, without
    starting one. Changes nothing. Exit code 1 if there is a problem, else 0.
    """
    from kvelastic.doctor.gather import gather
    from kvelastic.doctor.judge import judge

    findings = judge(gather(probe=probe))
    if as_json:
        say_json([_as_json(finding, "check", "state", "what", "do") for finding in findings])
    else:
        say_styled(report(findings, in_colour=_is_in_colour(), columns=_columns()))
    if any(finding.state == "problem" for finding in findings):
        sys.exit(1)


@click.command("explain", short_help="Explain an instance's current memory use.")
@click.argument("name", type=NameType())
@click.option("--json", "as_json", is_flag=True, help="Print one object (docs/kvctl.md).")
def explain_command(name: str, as_json: bool) -> None:
    """Explain an instance's memory use and blocked requests, with advice.

    Reads the instance's segment, its tiers and the ledgers of its devices. Changes nothing.
    """
    import time

    from kvelastic.cli.ledgers import choose_ledger
    from kvelastic.doctor.judge_instance import explain
    from kvelastic.instance.status import status_of
    from kvelastic.shared.ledger import list_ledgers
    from kvelastic.shared.tier_status import tiers_of

    info = readable(name, sweep())
    found = list_ledgers()
    ledger = choose_ledger(found, info.header["uuid"], info.header["device"])
    shown = tiers_of([info]).get(info.name)
    status = status_of(info, found, now_ns=time.monotonic_ns(), shown_tiers=shown)
    findings = explain(status, ledger)
    if as_json:
        say_json(explanation_json(status, ledger, findings))
    else:
        text = explanation_text(status, findings, columns=_columns(), in_colour=_is_in_colour())
        say_styled(text)


def report(findings: Sequence[Finding], *, in_colour: bool, columns: int | None = None) -> str:
    """Return the findings by topic: one line each, with the remedy below it.

    With `columns`, longer lines are wrapped with a hanging indent.
    """
    lines: list[str] = []
    width = max(len(finding.check) for finding in findings)
    for topic in dict.fromkeys(finding.topic for finding in findings):
        title = _TITLES.get(topic, topic)
        lines.append(click.style(title, bold=True) if in_colour else title)
        for finding in findings:
            if finding.topic != topic:
                continue
            state = finding.state.ljust(_STATE_CELLS)
            first = f"  {state}  {finding.check.ljust(width)}  "
            shown = _wrap(finding.what, first, columns, fewest=_FEWEST_CELLS)
            if in_colour:
                shown[0] = shown[0].replace(
                    state, click.style(state, fg=_COLOURS[finding.state]), 1
                )
            lines += shown
            if finding.do:
                arrow = f"  {'':{_STATE_CELLS}}  -> "
                lines += _wrap(finding.do, arrow, columns, fewest=_FEWEST_CELLS)
        lines.append("")
    counts = {state: sum(finding.state == state for finding in findings) for state in _COLOURS}
    lines.append(", ".join(_count(state, counts[state]) for state in reversed(_COLOURS)))
    return "\n".join(lines)


def _count(state: str, count: int) -> str:
    return f"{count} {state}{'' if count == 1 or state == 'ok' else 's'}"


def explanation_text(
    status: InstanceStatus,
    findings: Sequence[Finding],
    *,
    columns: int | None = None,
    in_colour: bool = False,
) -> str:
    """Return the topic and sentence of each finding, with the remedy below it.

    With `columns`, sentences are wrapped; without it, each stays on one line.
    """
    on = " and ".join(use.device for use in status.uses)
    who = [status.engine, status.model, on and f"on {on}"]
    title = ", ".join([status.name, *filter(None, who), f"process {status.pid}"])
    width = max(len(finding.about) for finding in findings)
    lines = _wrap(title, "", columns, more="  ")
    for finding in findings:
        about = f"  {finding.about.ljust(width)}  "
        shown = _wrap(finding.what, about, columns)
        if in_colour:
            colour = "yellow" if finding.is_blocked else None
            shown[0] = click.style(about, fg=colour, bold=True) + shown[0][len(about) :]
        lines += shown
        if finding.do:
            lines += _wrap(finding.do, f"{'':{len(about)}}-> ", columns)
    return "\n".join(lines)


def explanation_json(
    status: InstanceStatus, ledger: LedgerInfo | None, findings: list[Finding]
) -> dict[str, Any]:
    """Return the object of `kvctl explain --json` (docs/kvctl.md). No key is ever omitted."""
    from kvelastic.doctor.judge_ledger import member_of

    me = member_of(status, ledger)
    members = () if ledger is None else ledger.members
    return {
        **{key: value for key, value in asdict(status).items() if key not in _NOT_SHOWN},
        "devices": use_rows(status),
        "is_limit_too_low": status.is_limit_too_low,
        "slack_bytes": status.slack_bytes,
        "room_bytes": status.room_bytes,
        "granted_bytes": None if me is None else status.granted_bytes,
        "reserved_bytes": status.reserved_bytes,
        "pledged_bytes": None if me is None else me.pledged_bytes,
        "ask_bytes": None if me is None else status.asked_bytes,
        "ask_s": None if me is None else me.ask_s,
        "wanted_bytes": None if me is None else me.wanted_bytes,
        "device_free_bytes": None if ledger is None or me is None else ledger.free_bytes,
        "device_reserved_bytes": None if ledger is None or me is None else ledger.reserved_bytes,
        "askers": [
            {
                "name": member.name,
                "pid": member.pid,
                "priority": member.priority,
                "granted_bytes": member.granted_bytes,
                "ask_bytes": member.ask_bytes,
                "ask_s": member.ask_s,
            }
            for member in members
            if member is not me and member.ask_bytes and member.status != "dead"
        ],
        "lines": [_as_json(one, "about", "what", "do", "is_blocked") for one in findings],
    }


def _as_json(finding: Finding, *keys: str) -> dict[str, Any]:
    return {key: getattr(finding, key) for key in keys}


def _wrap(
    text: str, first: str, columns: int | None, *, more: str | None = None, fewest: int = 0
) -> list[str]:
    """Return the lines of a text: the first begins with `first`, the others with an equal indent.

    Returns one line without `columns`, or if fewer than `fewest` columns are left for the text.
    """
    # Text of other users (a segment's name) must not control the terminal.
    text, more = printable(text), " " * len(first) if more is None else more
    if columns is None or columns - len(more) < fewest:
        return [first + text]
    # Do not break long names or commands: users may copy them.
    return textwrap.wrap(
        text,
        max(columns, len(more) + _LEAST_COLUMNS),
        initial_indent=first,
        subsequent_indent=more,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _columns() -> int | None:
    """Return the terminal's width; None in a pipe, where lines are not wrapped."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _is_in_colour() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
