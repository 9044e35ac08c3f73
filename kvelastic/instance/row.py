"""One instance as a flat row of plain values, for tables and for JSON.

The keys of `Row` are the schema of `kvctl list --json` (docs/kvctl.md); none is ever omitted, and
unknown values are None.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypedDict, cast

from msgspec.structs import asdict

if TYPE_CHECKING:
    from kvelastic.instance.status import InstanceStatus
    from kvelastic.shared.tier_status import TiersStatus


class DeviceUseRow(TypedDict):
    """An instance's memory on one device; values are None without a ledger there."""

    device: str
    copies: int
    """Copies of each page on this device: one per rank."""
    mapped_bytes: int
    granted_bytes: int | None
    reserved_bytes: int | None
    ask_bytes: int | None


TierRow = dict[str, Any]
"""One tier: the fields of `TierStatus`, and its `state`."""


class Row(TypedDict):
    """One instance. The keys mean the same as in `InstanceStatus`."""

    name: str
    ipc: str
    """Name of the instance's kvcached segment, or `name`; programs for kvcached read this key."""
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
    """The name of the first of `devices`."""
    devices: list[DeviceUseRow] | None
    tiers: list[TierRow] | None
    """Its tiers, nearest first; empty without readable tiers."""
    tier_policy: str | None
    """When blocks are copied to the tiers; None if `tiers` is empty."""
    tier_blocks: dict[str, int] | None
    """Counts of its blocks since the tiers were opened (`BlockCounts`)."""
    pid: int | None
    uid: int | None
    uuid: str | None
    created: str | None
    counters: dict[str, int] | None


_ATTRIBUTES: Final = {
    "ipc": "kvcached_name",
    "alive": "is_alive",
    "ask_bytes": "requested_bytes",
    "uuid": "uuid_text",
}
"""Keys that differ from the name of the attribute of `InstanceStatus`."""
_ALWAYS_KNOWN: Final = {"name", "ipc", "alive", "state", "reason"}


def row_of(status: InstanceStatus) -> Row:
    """Return the row of an instance's status."""
    shown = status.shown_tiers
    values = {
        "devices": use_rows(status),
        "tiers": tier_rows(shown),
        "tier_policy": None if shown is None else shown.policy,
        "tier_blocks": None if shown is None else asdict(shown.blocks),
        "counters": dict(status.counters),
    }
    row = {
        key: (values[key] if key in values else getattr(status, _ATTRIBUTES.get(key, key)))
        if status.is_known or key in _ALWAYS_KNOWN
        else None
        for key in Row.__annotations__
    }
    return cast(Row, row)  # mypy cannot follow it; a test compares the keys


def use_rows(status: InstanceStatus) -> list[DeviceUseRow]:
    """Return the instance's memory on each of its devices."""
    return [
        DeviceUseRow(
            device=use.device,
            copies=use.copies,
            mapped_bytes=use.mapped_bytes,
            granted_bytes=None if use.share is None else use.share.member.granted_bytes,
            reserved_bytes=None if use.share is None else use.share.member.reserve_bytes,
            ask_bytes=None if use.share is None else use.share.member.ask_bytes,
        )
        for use in status.uses
    ]


def tier_rows(shown: TiersStatus | None) -> list[TierRow]:
    """Return the rows of an instance's tiers, nearest first; empty for None."""
    tiers = () if shown is None else shown.tiers
    return [
        {"tier": tier.tier, "kind": tier.kind, "state": tier.state, **asdict(tier)}
        for tier in tiers
    ]


def shown_state(row: Row) -> str:
    """Return the state for tables; see `InstanceStatus.word`."""
    from kvelastic.instance.status import state_word

    return state_word(
        row["state"],
        sleeps=bool(row["asleep"] or row["engine_asleep"]),
        is_limit_too_low=bool(row["is_limit_too_low"]),
    )


def printable(text: str) -> str:
    """Return text of another user without the characters that control a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else "\ufffd" for c in text)
