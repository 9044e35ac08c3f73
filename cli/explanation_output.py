"""How an explanation is shown: for people, one sentence a line, and as JSON."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import click

from kvelastic.cli.explanation_ledger import member_of
from kvelastic.cli.explanation_line import Line
from kvelastic.cli.saying import say_styled
from kvelastic.instance.row import printable, use_rows

if TYPE_CHECKING:
    from kvelastic.instance.status import InstanceStatus
    from kvelastic.ledger_facts import LedgerInfo

_NOT_SHOWN: Final = frozenset(
    {"board", "uuid", "uid", "is_known", "created", "counters", "shares", "uses"}
)
_LEAST_COLUMNS: Final = 12
"""For a sentence, on a terminal of however few."""


def explanation_text(
    status: InstanceStatus,
    lines: list[Line],
    *,
    columns: int | None = None,
    in_colour: bool = False,
) -> str:
    """What each line is about, its sentence, and under it what to do.

    With `columns` sentences are wrapped to fit; without, each stays on one line.
    """
    on = " and ".join(use.device for use in status.uses)
    who = [status.engine, status.model, on and f"on {on}"]
    title = ", ".join([status.name, *filter(None, who), f"process {status.pid}"])
    width = max(len(line.about) for line in lines)
    shown = _wrap(printable(title), "", "  ", columns)
    for line in lines:
        about = f"  {line.about.ljust(width)}  "
        first, *more = _wrap(printable(line.what), about, " " * len(about), columns)
        if in_colour:
            colour = "yellow" if line.is_blocked else None
            first = click.style(about, fg=colour, bold=True) + first[len(about) :]
        shown += [first, *more]
        if line.do:
            arrow = f"{'':{len(about)}}-> "
            shown += _wrap(printable(line.do), arrow, " " * len(arrow), columns)
    return "\n".join(shown)


def show_explanation(status: InstanceStatus, lines: list[Line]) -> None:
    """Print it to stdout: wrapped on a terminal, and in colour unless `NO_COLOR` is set."""
    is_terminal = sys.stdout.isatty()
    text = explanation_text(
        status,
        lines,
        columns=shutil.get_terminal_size().columns if is_terminal else None,
        in_colour=is_terminal and not os.environ.get("NO_COLOR"),
    )
    say_styled(text)


def _wrap(text: str, first: str, more: str, columns: int | None) -> list[str]:
    """The lines of a text whose first one begins with `first` and the others with `more`."""
    if columns is None:
        return [first + text]
    width = max(columns, len(more) + _LEAST_COLUMNS)
    # A name or a command that is longer than a line is not broken: it may be copied from there.
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=more,
        break_long_words=False,
        break_on_hyphens=False,
    )


def explanation_json(
    status: InstanceStatus, ledger: LedgerInfo | None, lines: list[Line]
) -> dict[str, Any]:
    """The object of `kvctl explain --json` (docs/kvctl.md); no key is ever left out."""
    me = member_of(status, ledger)
    members = () if ledger is None else ledger.members
    return {
        **{key: value for key, value in asdict(status).items() if key not in _NOT_SHOWN},
        "status": status.life,
        "wished_limit_bytes": status.requested_limit_bytes,
        "devices": use_rows(status),
        "is_limit_too_low": status.is_limit_too_low,
        "slack_bytes": status.slack_bytes,
        "overhead_bytes": status.slack_bytes,
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
        "lines": [
            {
                "about": line.about,
                "what": line.what,
                "do": line.do,
                "is_blocked": line.is_blocked,
            }
            for line in lines
        ],
    }
