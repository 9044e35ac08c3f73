"""What kvctl says of one segment: a flat row of plain values, the same for people and programs.

The keys of `Row` are the schema of `kvctl list --json` (docs/kvctl.md); none is ever left out, and
what is not known is None.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from kvelastic.segment import SegmentInfo


class Row(TypedDict):
    """One segment."""

    name: str
    ipc: str
    """The same as `name`, as programs written for kvcached read it."""
    alive: bool
    state: str
    """applied, shrinking, refused, failed or pending (a wish not answered) while it lives; else
    closing, dead, unknown or unreadable."""
    asleep: bool | None
    """Whether it sleeps: it hands out nothing, and holds nothing that is not in use."""
    reason: str
    """Why the state is refused, failed or unreadable; empty otherwise."""
    limit_bytes: int | None
    """The limit in force, as it was wished for; of one that sleeps, the one that it wakes with
    (not known if it was never wished for)."""
    effective_limit_bytes: int | None
    """What the instance makes of it: whole pages, within its device; 0 while it sleeps."""
    wished_limit_bytes: int | None
    """The newest wish, answered or not; None if there was none."""
    used_bytes: int | None
    """Mapped and not parked."""
    mapped_bytes: int | None
    in_use_bytes: int | None
    cached_bytes: int | None
    parked_bytes: int | None
    over_bytes: int | None
    """Still to be given back to meet the limit."""
    min_bytes: int | None
    """The guarantee in force: nobody takes it below that."""
    priority: int | None
    """In force; higher keeps its memory longer."""
    capacity_bytes: int | None
    """Of the instance's device: what a percentage is taken of."""
    page_bytes: int | None
    revision: int | None
    """Of the newest wish."""
    answered_revision: int | None
    engine: str | None
    model: str | None
    device: str | None
    pid: int | None
    uid: int | None
    uuid: str | None
    created: str | None
    """UTC, ISO 8601."""
    counters: dict[str, int] | None


def row_of(info: SegmentInfo) -> Row:
    """Make the row of a segment as it was found."""
    header, usage, answer, wish = info.header, info.usage, info.answer, info.wish
    known = bool(header)
    return Row(
        name=info.name,
        ipc=info.name,
        alive=info.is_alive,
        state=_state(info),
        asleep=bool(usage.get("asleep")) if known else None,
        reason=info.problem or answer.get("reason", ""),
        limit_bytes=_limit_in_force(answer, wish, asleep=bool(usage.get("asleep"))),
        effective_limit_bytes=answer.get("effective_limit_bytes"),
        wished_limit_bytes=wish.get("limit_bytes"),
        used_bytes=max(0, usage["mapped_bytes"] - usage["parked_bytes"]) if known else None,
        mapped_bytes=usage.get("mapped_bytes"),
        in_use_bytes=usage.get("in_use_bytes"),
        cached_bytes=usage.get("cached_bytes"),
        parked_bytes=usage.get("parked_bytes"),
        over_bytes=answer.get("over_bytes"),
        min_bytes=answer.get("min_bytes"),
        priority=answer.get("priority"),
        capacity_bytes=usage.get("capacity_bytes"),
        page_bytes=usage.get("page_bytes"),
        revision=wish.get("revision"),
        answered_revision=answer.get("revision"),
        engine=header.get("engine"),
        model=header.get("model"),
        device=header.get("device"),
        pid=header.get("pid"),
        uid=header.get("uid"),
        uuid=_uuid_text(header["uuid"]) if known else None,
        created=_utc_text(header["created_realtime_ns"]) if known else None,
        counters=dict(info.counters) if known else None,
    )


def shown_state(row: Row) -> str:
    """What tables show as its state: `asleep` for one that sleeps and has nothing left to do."""
    return "asleep" if row["asleep"] and row["state"] == "applied" else row["state"]


def _state(info: SegmentInfo) -> str:
    if info.status != "alive":
        return info.status
    if info.answer["revision"] != info.wish["revision"]:
        return "pending"
    state: str = info.answer["state"]
    return "pending" if state == "none" else state


def _limit_in_force(answer: dict[str, Any], wish: dict[str, Any], *, asleep: bool) -> int | None:
    """The wish, once it is answered and not refused; before that what the instance keeps to.

    One that sleeps keeps to nothing at all, which says nothing of its limit.
    """
    wished, effective = wish.get("limit_bytes"), answer.get("effective_limit_bytes")
    is_obeyed = (
        answer.get("state") in {"applied", "shrinking"}
        and answer["revision"] == wish["revision"]
        and wished is not None
    )
    return wished if is_obeyed else None if asleep else effective


def _uuid_text(raw: bytes) -> str:
    digits = raw.hex()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _utc_text(realtime_ns: int) -> str | None:
    try:
        moment = datetime.fromtimestamp(realtime_ns // 1_000_000_000, tz=timezone.utc)
    except (OverflowError, ValueError, OSError):
        return None
    return moment.isoformat().replace("+00:00", "Z")


def printable(text: str) -> str:
    """Text that another user may have chosen, without the characters that steer a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else "\ufffd" for c in text)
