"""kvctl doctor: what is wrong with this machine, and what to do about it."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING

import click

from kvelastic.cli.saying import say_json, say_styled

if TYPE_CHECKING:
    from kvelastic.doctor import Finding

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
"""Of a text that is wrapped: on a narrower terminal it is left as it is."""


@click.command("doctor", short_help="Check this machine, and say what to do.")
@click.option("--json", "as_json", is_flag=True, help="Print an array of objects (docs/doctor.md).")
@click.option("--probe", is_flag=True, help="Also load kvelastic into each engine (a minute).")
def doctor_command(as_json: bool, probe: bool) -> None:
    """Check this machine, and say what to do where something is wrong.

    Looks at the GPUs and their driver, memory, limits, shared memory, the variables of kvelastic
    and the engines that are installed; with --probe also whether these are built as kvelastic
    expects, without starting one. Changes nothing. Ends with 1 if there is a problem, with 0
    if there are at most warnings.
    """
    from kvelastic.doctor import gather, judge

    findings = judge(gather(probe=probe))
    if as_json:
        from dataclasses import asdict

        say_json([asdict(finding) for finding in findings])
    else:
        text = report(findings, in_colour=_is_in_colour(), columns=_columns())
        say_styled(text)
    if any(finding.state == "problem" for finding in findings):
        sys.exit(1)


def report(findings: list[Finding], *, in_colour: bool, columns: int | None = None) -> str:
    """The findings by topic: one line each, and under it what to do.

    With `columns` what is longer goes on below its beginning.
    """
    from kvelastic.instance.row import printable

    lines: list[str] = []
    width = max(len(finding.check) for finding in findings)
    topics = dict.fromkeys(finding.topic for finding in findings)
    for topic in topics:
        title = _TITLES.get(topic, topic)
        lines.append(click.style(title, bold=True) if in_colour else title)
        for finding in findings:
            if finding.topic != topic:
                continue
            state = finding.state.ljust(_STATE_CELLS)
            if in_colour:
                state = click.style(state, fg=_COLOURS[finding.state])
            # Texts of others (a segment's name) must not steer the terminal.
            indent = _STATE_CELLS + width + 6
            what = _wrapped(printable(finding.what), indent, columns)
            lines.append(f"  {state}  {finding.check.ljust(width)}  {what}")
            if finding.do:
                do = _wrapped(printable(finding.do), _STATE_CELLS + 7, columns)
                lines.append(f"  {'':{_STATE_CELLS}}  -> {do}")
        lines.append("")
    counts = {state: sum(finding.state == state for finding in findings) for state in _COLOURS}
    lines.append(", ".join(_count(state, counts[state]) for state in reversed(_COLOURS)))
    return "\n".join(lines)


def _wrapped(text: str, indent: int, columns: int | None) -> str:
    """In lines of `columns` cells, all but the first indented."""
    if columns is None or columns - indent < _FEWEST_CELLS:
        return text
    return f"\n{'':{indent}}".join(textwrap.wrap(text, columns - indent, break_long_words=False))


def _columns() -> int | None:
    """Of the terminal; None: this is a pipe, which gets one line each."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _count(state: str, count: int) -> str:
    return f"{count} {state}{'' if count == 1 or state == 'ok' else 's'}"


def _is_in_colour() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
