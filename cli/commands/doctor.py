"""kvctl doctor: problems of this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from kvelastic.cli.rendering.findings import columns_of_terminal, is_in_colour, json_of, wrap
from kvelastic.cli.rendering.printing import print_json, print_styled

if TYPE_CHECKING:
    from kvelastic.doctor.finding import Finding

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
        print_json([json_of(finding, "check", "state", "what", "do") for finding in findings])
    else:
        print_styled(report(findings, in_colour=is_in_colour(), columns=columns_of_terminal()))
    if any(finding.state == "problem" for finding in findings):
        sys.exit(1)


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
            shown = wrap(finding.what, first, columns, fewest=_FEWEST_CELLS)
            if in_colour:
                shown[0] = shown[0].replace(
                    state, click.style(state, fg=_COLOURS[finding.state]), 1
                )
            lines += shown
            if finding.do:
                arrow = f"  {'':{_STATE_CELLS}}  -> "
                lines += wrap(finding.do, arrow, columns, fewest=_FEWEST_CELLS)
        lines.append("")
    counts = {state: sum(finding.state == state for finding in findings) for state in _COLOURS}
    lines.append(", ".join(_count(state, counts[state]) for state in reversed(_COLOURS)))
    return "\n".join(lines)


def _count(state: str, count: int) -> str:
    return f"{count} {state}{'' if count == 1 or state == 'ok' else 's'}"
