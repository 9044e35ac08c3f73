"""One instance as a flat row of plain values, the same for people and programs.

The keys of `Row` are the schema of `kvctl list --json` (docs/kvctl.md); none is ever left out, and
what is not known is None.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict, cast

from msgspec.structs import asdict

if TYPE_CHECKING:
    from kvelastic.instance.status import InstanceStatus
    from kvelastic.tier_status import TiersFigures


class DeviceUseRow(TypedDict):
    """What an instance has on one of its devices; None where it is in no ledger there."""

    device: str
    copies: int
    """Of each page: one for each rank whose pages lie there."""
    mapped_bytes: int
    granted_bytes: int | None
    reserved_bytes: int | None
    ask_bytes: int | None


class TierRow(TypedDict):
    """One tier; the meanings are those of `TierFigures`."""

    tier: str
    kind: str
    state: str
    used_bytes: int
    limit_bytes: int | None
    records: int
    puts: int
    refused: int
    hits: int
    misses: int
    torn: int
    evicted: int
    errors: int
    bytes_written: int
    bytes_read: int
    load_us: int | None
    write_budget_bytes: int | None
    write_left_bytes: int | None
    waiting_bytes: int
    is_stuck: bool
    is_current: bool
    problem: str


class Row(TypedDict):
    """One instance; the meanings are those of `InstanceStatus`."""

    name: str
    ipc: str
    """The same as `name`, as programs written for kvcached read it."""
    alive: bool
    state: str
    asleep: bool | None
    engine_asleep: bool | None
    reason: str
    limit_bytes: int | None
    is_limited: bool | None
    effective_limit_bytes: int | None
    requested_limit_bytes: int | None
    is_squeezed: bool | None
    used_bytes: int | None
    mapped_bytes: int | None
    in_use_bytes: int | None
    set_aside_bytes: int | None
    cached_bytes: int | None
    parked_bytes: int | None
    slack_bytes: int | None
    over_bytes: int | None
    min_bytes: int | None
    priority: int | None
    capacity_bytes: int | None
    page_bytes: int | None
    requests_waiting: int | None
    first_needs_bytes: int | None
    first_may_need_bytes: int | None
    is_limit_too_low: bool | None
    revision: int | None
    answered_revision: int | None
    granted_bytes: int | None
    reserved_bytes: int | None
    ask_bytes: int | None
    engine: str | None
    model: str | None
    device: str | None
    """The first of `devices`."""
    devices: list[DeviceUseRow] | None
    tiers: list[TierRow] | None
    """Nearest first; empty where it has none, or none that can be read."""
    tier_policy: str | None
    """When blocks are copied to them; None where `tiers` is empty."""
    tier_blocks: dict[str, int] | None
    """What became of its blocks since they were opened (`BlockCounts`)."""
    pid: int | None
    uid: int | None
    uuid: str | None
    created: str | None
    counters: dict[str, int] | None


def row_of(status: InstanceStatus) -> Row:
    """Lay an instance's status out flat."""
    known = status.is_known

    def figure(value: int) -> int | None:
        return value if known else None

    def text(value: str) -> str | None:
        return value if known else None

    return Row(
        name=status.name,
        ipc=status.name,
        alive=status.is_alive,
        state=status.state,
        asleep=status.asleep if known else None,
        engine_asleep=status.engine_asleep,
        reason=status.reason,
        limit_bytes=figure(status.limit_bytes),
        is_limited=status.is_limited if known else None,
        effective_limit_bytes=figure(status.effective_limit_bytes),
        requested_limit_bytes=status.requested_limit_bytes,
        is_squeezed=status.is_squeezed if known else None,
        used_bytes=figure(status.used_bytes),
        mapped_bytes=figure(status.mapped_bytes),
        in_use_bytes=figure(status.in_use_bytes),
        set_aside_bytes=figure(status.set_aside_bytes),
        cached_bytes=figure(status.cached_bytes),
        parked_bytes=figure(status.parked_bytes),
        slack_bytes=figure(status.slack_bytes),
        over_bytes=figure(status.over_bytes),
        min_bytes=figure(status.min_bytes),
        priority=figure(status.priority),
        capacity_bytes=figure(status.capacity_bytes),
        page_bytes=figure(status.page_bytes),
        requests_waiting=status.requests_waiting,
        first_needs_bytes=figure(status.first_needs_bytes),
        first_may_need_bytes=figure(status.first_may_need_bytes),
        is_limit_too_low=status.is_limit_too_low if known else None,
        revision=figure(status.revision),
        answered_revision=figure(status.answered_revision),
        granted_bytes=status.granted_bytes,
        reserved_bytes=status.reserved_bytes,
        ask_bytes=status.asked_bytes,
        engine=text(status.engine),
        model=text(status.model),
        device=text(status.device),
        devices=use_rows(status) if known else None,
        tiers=tier_rows(status.board) if known else None,
        tier_policy=None if status.board is None else status.board.policy,
        tier_blocks=None if status.board is None else asdict(status.board.blocks),
        pid=figure(status.pid),
        uid=figure(status.uid),
        uuid=status.uuid_text,
        created=status.created,
        counters=dict(status.counters) if known else None,
    )


def use_rows(status: InstanceStatus) -> list[DeviceUseRow]:
    """What it has on each of its devices."""
    return [
        DeviceUseRow(
            device=use.device,
            copies=use.copies,
            mapped_bytes=use.mapped_bytes,
            granted_bytes=None if use.share is None else use.share.granted_bytes,
            reserved_bytes=None if use.share is None else use.share.reserved_bytes,
            ask_bytes=None if use.share is None else use.share.asked_bytes,
        )
        for use in status.uses
    ]


def tier_rows(board: TiersFigures | None) -> list[TierRow]:
    """Its tiers, nearest first; None has none."""
    tiers = () if board is None else board.tiers
    return [
        cast(  # mypy cannot follow asdict; a test compares the keys
            TierRow,
            {"tier": tier.tier, "kind": tier.kind, "state": tier.state, **asdict(tier)},
        )
        for tier in tiers
    ]


def shown_state(row: Row) -> str:
    """What tables show as its state; see `InstanceStatus.word`."""
    from kvelastic.instance.status import state_word

    return state_word(
        row["state"],
        sleeps=bool(row["asleep"] or row["engine_asleep"]),
        is_limit_too_low=bool(row["is_limit_too_low"]),
    )


def printable(text: str) -> str:
    """Text that another user may have chosen, without the characters that steer a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else "\ufffd" for c in text)
