"""kvctl explain: an instance's memory use, and why its requests wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import click

from kvelastic.cli.arguments import NameType
from kvelastic.cli.rendering.findings import columns_of_terminal, is_in_colour, json_of, wrap
from kvelastic.cli.rendering.printing import print_json, print_styled
from kvelastic.cli.segment_lookup import readable, sweep
from kvelastic.instance.row import use_rows

if TYPE_CHECKING:
    from kvelastic.doctor.finding import Finding
    from kvelastic.instance.status import InstanceStatus
    from kvelastic.shared.ledger_facts import LedgerInfo

_NOT_SHOWN: Final = frozenset(
    {
        "shown_tiers", "uuid", "uid", "is_known", "created", "counters", "shares", "uses",
        "pages_mapped", "pages_parked",
    }
)  # fmt: skip


@click.command("explain", short_help="Explain an instance's current memory use.")
@click.argument("name", type=NameType())
@click.option("--json", "as_json", is_flag=True, help="Print one object (docs/kvctl.md).")
def explain_command(name: str, as_json: bool) -> None:
    """Explain an instance's memory use and blocked requests, with advice.

    Reads the instance's segment, its tiers and the ledgers of its devices. Changes nothing.
    """
    import time

    from kvelastic.doctor.judge_instance import explain
    from kvelastic.instance.status import status_of
    from kvelastic.shared.ledger import list_ledgers
    from kvelastic.shared.link_status import nodes
    from kvelastic.shared.tier_status import tiers_of

    info = readable(name, sweep())
    found = list_ledgers()
    ledger = choose_ledger(found, info.header["uuid"], info.header["device"])
    shown = tiers_of([info]).get(info.name)
    status = status_of(info, found, now_ns=time.monotonic_ns(), shown_tiers=shown)
    findings = explain(status, ledger, [node for node in nodes() if node.pid == status.pid])
    if as_json:
        print_json(explanation_json(status, ledger, findings))
    else:
        text = explanation_text(
            status, findings, columns=columns_of_terminal(), in_colour=is_in_colour()
        )
        print_styled(text)


def choose_ledger(ledgers: list[LedgerInfo], uuid: bytes, device: str) -> LedgerInfo | None:
    """Return the ledger with a member of that segment, else an unreadable one of the device.

    Returns None without either. An unreadable ledger may or may not contain the instance. For an
    instance on several devices, return the ledger where it waits for the most memory, else the
    fullest one: memory that is missing there limits the instance on all devices.
    """
    own = [
        (-member.ask_bytes, ledger.free_bytes, index)
        for index, ledger in enumerate(ledgers)
        for member in ledger.members
        if member.uuid == uuid
    ]
    if own:
        return ledgers[min(own)[-1]]
    for ledger in ledgers:
        # An unreadable ledger has only its file name: group, underscore, device.
        is_of_device = ledger.device == device or ledger.device.endswith(f"_{device}")
        if is_of_device and ledger.status != "readable":
            return ledger
    return None


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
    lines = wrap(title, "", columns, more="  ")
    for finding in findings:
        about = f"  {finding.about.ljust(width)}  "
        shown = wrap(finding.what, about, columns)
        if in_colour:
            colour = "yellow" if finding.is_blocked else None
            shown[0] = click.style(about, fg=colour, bold=True) + shown[0][len(about) :]
        lines += shown
        if finding.do:
            lines += wrap(finding.do, f"{'':{len(about)}}-> ", columns)
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
        "ask_bytes": None if me is None else status.requested_bytes,
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
        "lines": [json_of(one, "about", "what", "do", "is_blocked") for one in findings],
    }
