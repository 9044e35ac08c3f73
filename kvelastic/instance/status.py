"""An instance's status, read from its segment and its ledger entries.

    status = status_of(segment.inspect("kvelastic_vLLM_4711"), ledger.list_ledgers())
    status.state, status.limit_bytes, status.slack_bytes

kvctl, kvtop, the metrics, the controller and the dashboard show these values unchanged. Pure: the
result depends only on the arguments.

The parts of the mapped memory, and its limits::

    mapped   [ in use | set aside | cached | parked | slack ]
    limit    the value set by the operator, unchanged by sleep
    effective limit   the limit in effect now: whole pages, within the device, lower under memory
                      pressure (others must get memory, or the machine has too little left), 0
                      while the instance sleeps
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvelastic import _vmm
from kvelastic.shared.segment_listing import kvcached_name
from kvelastic.units import whole_pages

if TYPE_CHECKING:
    from kvelastic.shared.ledger_facts import LedgerInfo, Member
    from kvelastic.shared.segment_listing import SegmentInfo
    from kvelastic.shared.tier_status import TiersStatus

UNLIMITED_BYTES: Final = _vmm.UNLIMITED_BYTES
"""The limit of an instance without one; it may use its whole device."""

ENDED: Final = frozenset({"dead", "unreadable"})
"""Values of `life` that are final."""


_PARTS: Final = ("mapped_bytes", "in_use_bytes", "cached_bytes", "parked_bytes")
_USAGE: Final = (
    *_PARTS, "capacity_bytes", "page_bytes", "mappings_per_page", "blocks_total", "blocks_in_use",
    "blocks_cached", "blocks_available", "blocks_reserved", "pages_mapped", "pages_parked",
    "first_needs_bytes", "first_may_need_bytes",
)  # fmt: skip
"""Fields of `InstanceStatus` with the same name in the usage of the control block."""
_ACKNOWLEDGED: Final = ("effective_limit_bytes", "over_bytes", "min_bytes", "priority")
_IDENTITY: Final = ("engine", "model", "device", "pid", "uid", "uuid")
"""Fields with the same name in the header; `_ACKNOWLEDGED` has those of the acknowledgement."""


class DeviceShare(NamedTuple):
    """An instance's entry in the ledger of one device."""

    device: str
    group: str
    member: Member


@dataclass(frozen=True)
class DeviceUse:
    """An instance's memory on one device."""

    device: str
    copies: int
    """Copies of each page on this device: one per rank."""
    mapped_bytes: int
    in_use_bytes: int = 0
    cached_bytes: int = 0
    parked_bytes: int = 0
    share: DeviceShare | None = None
    """Its entry in the device's ledger; None without a readable ledger."""

    @property
    def slack_bytes(self) -> int:
        """Mapped memory not used, cached or parked: free blocks of used pages, and padding."""
        rest_bytes = self.in_use_bytes + self.cached_bytes + self.parked_bytes
        return max(0, self.mapped_bytes - rest_bytes)


@dataclass(frozen=True)
class InstanceStatus:
    """One instance at one moment. If `is_known` is False, numbers are 0 and texts empty."""

    name: str
    """Name of its segment, as used in commands."""
    life: str
    """alive, closing, dead, unknown (liveness cannot be determined here), unreadable."""
    state: str
    """State of the newest request: applied, shrinking, refused, pending, or failed (its memory has
    failed). If the instance is not alive: its `life`."""
    request_state: str = "applied"
    """Equal to `state`, but independent of `life`."""
    reason: str = ""
    """Why the state is refused, failed or unreadable."""
    is_known: bool = True
    """True if its control block could be read."""

    asleep: bool = False
    """It allocates no blocks, and holds only memory in use."""
    engine_asleep: bool | None = None
    """True if the engine itself sleeps, so requests wait even if its memory is awake. None:
    unknown."""
    limit_bytes: int = 0
    """The operator's limit; `capacity_bytes` without a limit."""
    is_limited: bool = True
    effective_limit_bytes: int = 0
    """The limit in effect now (see the module)."""
    is_squeezed: bool = False
    """True under memory pressure: the effective limit is lower because others must get memory, or
    the machine has too little."""
    is_limit_of_kvcached_client: bool = False
    """True if the newest request is a limit that a program wrote into its kvcached segment."""
    requested_limit_bytes: int | None = None
    """The newest requested limit, whatever its outcome; None without a request."""
    over_bytes: int = 0
    """Memory that must still be released to meet the effective limit."""
    min_bytes: int = 0
    """The guarantee: other instances never take memory below it."""
    priority: int = 0

    capacity_bytes: int = 0
    """Capacity of its device."""
    mapped_bytes: int = 0
    in_use_bytes: int = 0
    set_aside_bytes: int = 0
    """Reserved for future requests (`try_to_reserve`), and not in use."""
    cached_bytes: int = 0
    parked_bytes: int = 0
    page_bytes: int = 0
    mappings_per_page: int = 0
    """Mappings of a page on all ranks together; 0: unknown."""
    blocks_total: int = 0
    """Number of blocks in its address range."""
    blocks_in_use: int = 0
    blocks_cached: int = 0
    blocks_available: int = 0
    """Blocks that could be allocated now."""
    blocks_reserved: int = 0
    pages_mapped: int = 0
    pages_parked: int = 0

    requests_waiting: int | None = None
    """Requests of the engine that wait for memory; None if the engine does not report them."""
    first_needs_bytes: int = 0
    """Minimum limit with which the first waiting request can run; 0: unknown."""
    first_may_need_bytes: int = 0
    """Its need at the end of a response of maximum length."""

    revision: int = 0
    """Revision of the newest request."""
    answered_revision: int = 0
    pending_s: float = 0.0
    """Age of the newest request while it has no reply; else 0."""

    engine: str = ""
    model: str = ""
    device: str = ""
    """Its first device; `uses` has all devices."""
    pid: int = 0
    uid: int = 0
    uuid: bytes = b""
    created: str | None = None
    """Creation time in UTC, ISO 8601."""
    counters: Mapping[str, int] = field(default_factory=dict)
    shares: tuple[DeviceShare, ...] = ()
    """Its ledger entries; empty without a readable ledger."""
    uses: tuple[DeviceUse, ...] = ()
    """Its memory on each device, the lowest rank's device first."""
    shown_tiers: TiersStatus | None = None
    """Statistics of its tiers; None without tiers or without a readable status file."""

    @property
    def kvcached_name(self) -> str:
        """Name of its kvcached segment; its own name if it keeps none."""
        return kvcached_name(self.name)

    @property
    def is_alive(self) -> bool:
        """True if the instance may still reply."""
        return self.life not in ENDED

    @property
    def word(self) -> str:
        """The state in one word, for tables.

        `asleep`: the newest request is applied, and memory or engine sleeps, so requests wait.
        `stuck`: a request needs more than the limit allows.
        """
        return state_word(self.state, sleeps=self.sleeps, is_limit_too_low=self.is_limit_too_low)

    @property
    def sleeps(self) -> bool:
        """True if its memory or its engine sleeps."""
        return self.asleep or bool(self.engine_asleep)

    @property
    def allowed_bytes(self) -> int:
        """Memory within limit and device in whole pages, ignoring memory pressure and sleep."""
        return whole_pages(min(self.limit_bytes, self.capacity_bytes), self.page_bytes)

    @property
    def is_limit_too_low(self) -> bool:
        """True if the first waiting request needs more than limit and device allow."""
        return (
            bool(self.requests_waiting)
            and not self.asleep
            and self.first_needs_bytes > self.allowed_bytes
        )

    @property
    def is_limit_binding(self) -> bool:
        """True if the operator's limit is the effective one, so a higher limit gives more memory.

        Otherwise the device, the addresses reserved at the start, or memory pressure bounds it.
        """
        return self.is_limited and self.limit_bytes - self.effective_limit_bytes < max(
            self.page_bytes, 1
        )

    @property
    def slack_bytes(self) -> int:
        """Mapped memory that is neither used nor spare: free blocks on used pages, and padding."""
        return max(0, self.mapped_bytes - self.in_use_bytes - self.spare_bytes)

    @property
    def spare_bytes(self) -> int:
        """Memory that can be reclaimed without preempting requests."""
        return self.parked_bytes + self.set_aside_bytes + self.cached_bytes

    @property
    def used_bytes(self) -> int:
        """Mapped memory that is not parked."""
        return max(0, self.mapped_bytes - self.parked_bytes)

    @property
    def room_bytes(self) -> int:
        """Memory that can still be mapped under the effective limit."""
        return max(0, self.effective_limit_bytes - self.mapped_bytes)

    @property
    def granted_bytes(self) -> int | None:
        """Memory that ledgers grant it on all its devices; None without a ledger."""
        return sum(share.member.granted_bytes for share in self.shares) if self.shares else None

    @property
    def reserved_bytes(self) -> int | None:
        """Memory held besides its KV cache while awake; None without a ledger."""
        return sum(share.member.reserve_bytes for share in self.shares) if self.shares else None

    @property
    def requested_bytes(self) -> int | None:
        """Memory that it has requested and waits for; None without a ledger."""
        return sum(share.member.ask_bytes for share in self.shares) if self.shares else None

    @property
    def uuid_text(self) -> str | None:
        """The UUID of its segment as text; None if unknown."""
        return uuid_text(self.uuid) if self.uuid else None


def state_word(state: str, *, sleeps: bool, is_limit_too_low: bool) -> str:
    """Return the state for tables; see `InstanceStatus.word`."""
    if state != "applied":
        return state
    if sleeps:
        return "asleep"
    return "stuck" if is_limit_too_low else state


def status_of(
    info: SegmentInfo,
    ledgers: Iterable[LedgerInfo] = (),
    *,
    now_ns: int | None = None,
    shown_tiers: TiersStatus | None = None,
) -> InstanceStatus:
    """Return the status of a segment, with the statistics of its tiers, if any.

    `now_ns` (CLOCK_MONOTONIC) is needed for `pending_s` only.
    """
    if not info.header:
        return InstanceStatus(
            info.name, info.status, info.status, info.status, reason=info.problem, is_known=False
        )
    header, usage, ack, request = info.header, info.usage, info.ack, info.request
    request_state = _request_state(ack, request)
    limit_bytes, capacity_bytes = usage["limit_bytes"], usage["capacity_bytes"]
    is_limited = limit_bytes != UNLIMITED_BYTES
    # The control block counts reserved blocks as used bytes, but counts blocks separately.
    taken = usage["blocks_in_use"] + usage["blocks_reserved"]
    set_aside_bytes = usage["in_use_bytes"] * usage["blocks_reserved"] // max(taken, 1)
    waited_ns = 0 if now_ns is None else max(0, now_ns - request["written_ns"])
    statistics = {name: usage.get(name, 0) for name in _USAGE}
    statistics["in_use_bytes"] -= set_aside_bytes
    shares = tuple(_shares(header["uuid"], ledgers))
    return InstanceStatus(
        name=info.name,
        life=info.status,
        state=request_state if info.status == "alive" else info.status,
        request_state=request_state,
        reason=ack["reason"],
        asleep=bool(usage["asleep"]),
        engine_asleep=info.engine_asleep,
        limit_bytes=limit_bytes if is_limited else capacity_bytes,
        is_limited=is_limited,
        is_squeezed=bool(usage["under_pressure"]),
        is_limit_of_kvcached_client=_is_of_kvcached_client(info),
        requested_limit_bytes=request["limit_bytes"],
        set_aside_bytes=set_aside_bytes,
        **statistics,
        **{name: ack[name] for name in _ACKNOWLEDGED},
        **{name: header[name] for name in _IDENTITY},
        requests_waiting=usage["requests_waiting"] if usage.get("reports_waiting") else None,
        revision=request["revision"],
        answered_revision=ack["revision"],
        pending_s=waited_ns / 1e9 if request_state == "pending" else 0.0,
        created=_utc_text(header["created_realtime_ns"]),
        counters=info.counters,
        shares=shares,
        uses=tuple(_uses(header["devices"], statistics, shares)),
        shown_tiers=shown_tiers,
    )


def _request_state(ack: Mapping[str, Any], request: Mapping[str, Any]) -> str:
    state: str = ack["state"]
    is_acknowledged = state != "none" and ack["revision"] == request["revision"]
    return state if is_acknowledged else "pending"


def _is_of_kvcached_client(info: SegmentInfo) -> bool:
    """Only its `kvcached_segment` makes an instance write a request to itself."""
    request = info.request
    return (
        kvcached_name(info.name) != info.name
        and request["revision"] == request["limit_revision"] > 0
        and request["writer_pid"] == info.header["pid"]
    )


def _shares(uuid: bytes, ledgers: Iterable[LedgerInfo]) -> Iterable[DeviceShare]:
    for ledger in ledgers:
        for member in ledger.members:
            if member.uuid == uuid:
                yield DeviceShare(ledger.device, ledger.group, member)


def _uses(
    devices: Iterable[tuple[str, int]], statistics: Mapping[str, int], shares: Iterable[DeviceShare]
) -> Iterable[DeviceUse]:
    """Yield the use of each device. All copies of a page have one size, so divide by copies."""
    devices, shares = list(devices), list(shares)
    whole = max(1, sum(copies for _, copies in devices))
    for device, copies in devices:
        here = {part: statistics[part] * copies // whole for part in _PARTS}
        share = next((one for one in shares if one.device == device), None)
        yield DeviceUse(device, copies, **here, share=share)


def member_uses(
    ledger: LedgerInfo, statuses: Iterable[InstanceStatus]
) -> list[tuple[Member, DeviceUse]]:
    """Return every member of a ledger with its memory on the device, in the ledger's order.

    A ledger has the grants of its device, a member's own control block the use of its pages. So a
    device's parts are the sums of the values shown for its instances. A member that is dead or not
    in `statuses` counts with the ledger's grant.
    """
    uses = {
        status.uuid: use
        for status in statuses
        if status.is_alive
        for use in status.uses
        if use.share is not None
        and (use.share.device, use.share.group) == (ledger.device, ledger.group)
    }
    return [
        (member, uses.get(member.uuid) or _granted(ledger.device, member))
        for member in ledger.members
    ]


def _granted(device: str, member: Member) -> DeviceUse:
    return DeviceUse(
        device,
        copies=0,
        mapped_bytes=member.granted_bytes,
        in_use_bytes=member.in_use_bytes,
        cached_bytes=member.evictable_bytes,
        parked_bytes=member.parked_bytes,
    )


def uuid_text(raw: bytes) -> str:
    """Return the 16 bytes of a UUID in the usual notation."""
    digits = raw.hex()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _utc_text(realtime_ns: int) -> str | None:
    try:
        moment = datetime.fromtimestamp(realtime_ns // 1_000_000_000, tz=timezone.utc)
    except (OverflowError, ValueError, OSError):
        return None
    return moment.isoformat().replace("+00:00", "Z")
