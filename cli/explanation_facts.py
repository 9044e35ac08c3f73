"""The plain values that an explanation is made from, and how they are had from a segment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvelastic.segment import SegmentInfo


@dataclass(frozen=True)
class InstanceFacts:
    """One instance at one moment, as its segment says."""

    name: str
    status: str
    """alive, closing, dead or unknown."""
    state: str
    """Of the newest wish: applied, shrinking, refused or pending."""
    uuid: bytes = b""
    engine: str = ""
    model: str = ""
    device: str = ""
    pid: int = 0
    reason: str = ""
    capacity_bytes: int = 0
    mapped_bytes: int = 0
    in_use_bytes: int = 0
    reserved_bytes: int = 0
    """Set aside for requests to come, and in use by none."""
    cached_bytes: int = 0
    parked_bytes: int = 0
    page_bytes: int = 0
    asleep: bool = False
    """It hands out nothing, and holds nothing that is not in use."""
    limit_bytes: int = 0
    """In effect: whole pages, within the device; 0 while it sleeps."""
    wished_limit_bytes: int | None = None
    over_bytes: int = 0
    min_bytes: int = 0
    priority: int = 0
    pending_s: float = 0.0
    """Since the newest wish was written, where it is not answered."""

    @property
    def overhead_bytes(self) -> int:
        """Mapped, and none of in use, reserved, cached, parked."""
        return max(0, self.mapped_bytes - self.in_use_bytes - self.spare_bytes)

    @property
    def spare_bytes(self) -> int:
        """What makes way when memory is needed."""
        return self.parked_bytes + self.reserved_bytes + self.cached_bytes

    @property
    def room_bytes(self) -> int:
        """What the limit still allows."""
        return max(0, self.limit_bytes - self.mapped_bytes)


@dataclass(frozen=True)
class Line:
    """One thing that an explanation says."""

    about: str
    """What it is about, in a word or two: holds, limit, asked, ..."""
    what: str
    """A sentence."""
    do: str = ""
    """What to do about it; empty where nothing has to be done."""
    is_blocked: bool = False
    """Whether it says what something waits for."""


def facts_of(info: SegmentInfo, *, now_ns: int) -> InstanceFacts:
    """The facts of a segment that can be read; `now_ns` is CLOCK_MONOTONIC."""
    from kvelastic.cli.rows import row_of

    header, usage, answer, wish = info.header, info.usage, info.answer, info.wish
    is_pending = answer["revision"] != wish["revision"]
    state = row_of(info)["state"]
    # The segment counts what is set aside as in use, by bytes; by blocks it tells them apart.
    taken = usage["blocks_in_use"] + usage["blocks_reserved"]
    reserved_bytes = usage["in_use_bytes"] * usage["blocks_reserved"] // max(taken, 1)
    return InstanceFacts(
        name=info.name,
        status=info.status,
        state=state if info.status == "alive" else "pending" if is_pending else answer["state"],
        uuid=header["uuid"],
        engine=header["engine"],
        model=header["model"],
        device=header["device"],
        pid=header["pid"],
        reason=answer["reason"],
        capacity_bytes=usage["capacity_bytes"],
        mapped_bytes=usage["mapped_bytes"],
        in_use_bytes=usage["in_use_bytes"] - reserved_bytes,
        reserved_bytes=reserved_bytes,
        cached_bytes=usage["cached_bytes"],
        parked_bytes=usage["parked_bytes"],
        page_bytes=usage["page_bytes"],
        asleep=bool(usage["asleep"]),
        limit_bytes=answer["effective_limit_bytes"],
        wished_limit_bytes=wish["limit_bytes"],
        over_bytes=answer["over_bytes"],
        min_bytes=answer["min_bytes"],
        priority=answer["priority"],
        pending_s=max(0, now_ns - wish["written_ns"]) / 1e9 if is_pending else 0.0,
    )
