"""What an instance is: the one reading of its segment and of its places in ledgers.

    status = status_of(segment.inspect("kvelastic_vLLM_4711"), ledger.list_ledgers())
    status.state, status.limit_bytes, status.slack_bytes

kvctl, kvtop, the metrics, the controller and the dashboard show these values and decide nothing.
Pure: it looks at nothing but its arguments.

The parts of what is mapped, and the limits over it::

    mapped   [ in use | set aside | cached | parked | slack ]
    limit    what the operator set, as it was set; an instance that sleeps keeps it
    effective limit   what the instance keeps to now: whole pages, within the device, lowered while
                      others are owed memory, or the machine has too little left (a squeeze),
                      0 while it sleeps
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final

from kvelastic import _vmm
from kvelastic.sizes import whole_pages

if TYPE_CHECKING:
    from kvelastic.ledger_facts import LedgerInfo, Member
    from kvelastic.segment_dir import SegmentInfo
    from kvelastic.tier_status import TiersFigures

UNLIMITED_BYTES: Final = _vmm.UNLIMITED_BYTES
"""The limit of an instance that has none; it may use its whole device."""

ENDED: Final = frozenset({"dead", "unreadable"})
"""Values of `life` that are final."""


_PARTS: Final = ("mapped_bytes", "in_use_bytes", "cached_bytes", "parked_bytes")
_FIGURES: Final = (
    *_PARTS, "capacity_bytes", "page_bytes", "mappings_per_page", "blocks_total", "blocks_in_use",
    "blocks_cached", "blocks_available", "blocks_reserved", "pages_mapped", "pages_parked",
    "first_needs_bytes", "first_may_need_bytes",
)  # fmt: skip
"""Fields of `InstanceStatus` that are called so in a record's usage."""
_ANSWERED: Final = ("effective_limit_bytes", "over_bytes", "min_bytes", "priority")
_IDENTITY: Final = ("engine", "model", "device", "pid", "uid", "uuid")
"""The same, in its answer and in its header."""


@dataclass(frozen=True)
class DeviceShare:
    """An instance's place in the ledger of one device."""

    device: str
    group: str
    granted_bytes: int
    """What the ledger lets it hold."""
    asked_bytes: int
    """Memory that it has requested and waits for."""
    asked_s: float
    """How long it has waited."""
    wanted_bytes: int
    """Memory that others have requested from it and not yet received."""
    idle_s: float
    """Since its last alloc or free."""
    reserved_bytes: int = 0
    """Memory held there besides its KV cache while awake."""


@dataclass(frozen=True)
class DeviceUse:
    """An instance's memory on one device."""

    device: str
    copies: int
    """Of each page: one for each rank whose pages lie there."""
    mapped_bytes: int
    in_use_bytes: int = 0
    cached_bytes: int = 0
    parked_bytes: int = 0
    share: DeviceShare | None = None
    """Its place in the device's ledger; None where it is in none that can be read."""


@dataclass(frozen=True)
class InstanceStatus:
    """One instance at one moment. Figures are 0 and texts empty where `is_known` is False."""

    name: str
    """Of its segment, as every command takes it."""
    life: str
    """alive, closing, dead, unknown (whether it lives cannot be asked here), unreadable."""
    state: str
    """Of the newest request: applied, shrinking, refused, pending, or failed (its memory has
    failed); of one that is not alive its `life`."""
    request_state: str = "applied"
    """Equal to `state`, but independent of `life`."""
    reason: str = ""
    """Why the state is refused, failed or unreadable."""
    is_known: bool = True
    """Whether its record could be read."""

    asleep: bool = False
    """It hands out no block, and holds nothing that is not in use."""
    engine_asleep: bool | None = None
    """The engine itself sleeps: requests to it wait whatever its memory does. None: not known."""
    limit_bytes: int = 0
    """As the operator set it; `capacity_bytes` where there is no limit."""
    is_limited: bool = True
    effective_limit_bytes: int = 0
    """The limit in effect now (see the module)."""
    is_squeezed: bool = False
    """It keeps to less than its limit: others are owed memory, or the machine has too little."""
    requested_limit_bytes: int | None = None
    """The newest requested limit, whatever its outcome; None without a request."""
    over_bytes: int = 0
    """Still to be given back to meet the effective limit."""
    min_bytes: int = 0
    """The guarantee: other instances never take memory below it."""
    priority: int = 0

    capacity_bytes: int = 0
    """Of its device."""
    mapped_bytes: int = 0
    in_use_bytes: int = 0
    set_aside_bytes: int = 0
    """Set aside for requests to come (`try_to_reserve`), and in use by none."""
    cached_bytes: int = 0
    parked_bytes: int = 0
    page_bytes: int = 0
    mappings_per_page: int = 0
    """Of a page, on all ranks together; 0: not known."""
    blocks_total: int = 0
    """Blocks that its address range has room for."""
    blocks_in_use: int = 0
    blocks_cached: int = 0
    blocks_available: int = 0
    """That an alloc could have now."""
    blocks_reserved: int = 0
    pages_mapped: int = 0
    pages_parked: int = 0

    requests_waiting: int | None = None
    """Requests of the engine that wait for memory; None: the engine does not report them."""
    first_needs_bytes: int = 0
    """The least limit that lets the first of them run; 0: not known."""
    first_may_need_bytes: int = 0
    """Its need at the end of a response of maximum length."""

    revision: int = 0
    """Of the newest request."""
    answered_revision: int = 0
    pending_s: float = 0.0
    """Since the newest request was made, where the instance has not replied to it."""

    engine: str = ""
    model: str = ""
    device: str = ""
    """The first of its devices; `uses` has all."""
    pid: int = 0
    uid: int = 0
    uuid: bytes = b""
    created: str | None = None
    """UTC, ISO 8601."""
    counters: Mapping[str, int] = field(default_factory=dict)
    shares: tuple[DeviceShare, ...] = ()
    """Its places in ledgers; empty where it is in none, or in none that can be read."""
    uses: tuple[DeviceUse, ...] = ()
    """Its memory on each device, the lowest rank's device first."""
    shown_tiers: TiersFigures | None = None
    """Statistics of its tiers; None without tiers or without a readable status file."""

    @property
    def is_alive(self) -> bool:
        """Whether it may still reply."""
        return self.life not in ENDED

    @property
    def word(self) -> str:
        """The state in one word, as tables show it.

        `asleep` where memory or engine sleeps, so that requests wait, and nothing is left to do;
        `stuck` where a request needs more than the limit allows.
        """
        return state_word(self.state, sleeps=self.sleeps, is_limit_too_low=self.is_limit_too_low)

    @property
    def sleeps(self) -> bool:
        """Whether its memory or its engine sleeps."""
        return self.asleep or bool(self.engine_asleep)

    @property
    def allowed_bytes(self) -> int:
        """What limit and device allow: whole pages, without a squeeze, also in sleep."""
        return whole_pages(min(self.limit_bytes, self.capacity_bytes), self.page_bytes)

    @property
    def is_limit_too_low(self) -> bool:
        """Whether the first request that waits needs more than limit and device allow."""
        return (
            bool(self.requests_waiting)
            and not self.asleep
            and self.first_needs_bytes > self.allowed_bytes
        )

    @property
    def is_limit_binding(self) -> bool:
        """Whether it is the operator's limit that it keeps to, so that a higher one gives more.

        Else it is the device, the addresses that it reserved at its start, or a squeeze.
        """
        return self.is_limited and self.limit_bytes - self.effective_limit_bytes < max(
            self.page_bytes, 1
        )

    @property
    def slack_bytes(self) -> int:
        """Mapped, and none of the rest: free blocks on pages in use, and padding."""
        return max(0, self.mapped_bytes - self.in_use_bytes - self.spare_bytes)

    @property
    def spare_bytes(self) -> int:
        """Memory that can be reclaimed without preempting requests."""
        return self.parked_bytes + self.set_aside_bytes + self.cached_bytes

    @property
    def used_bytes(self) -> int:
        """Mapped and not parked."""
        return max(0, self.mapped_bytes - self.parked_bytes)

    @property
    def room_bytes(self) -> int:
        """What the effective limit still allows."""
        return max(0, self.effective_limit_bytes - self.mapped_bytes)

    @property
    def granted_bytes(self) -> int | None:
        """What ledgers let it hold on all its devices; None where it is in no ledger."""
        return sum(share.granted_bytes for share in self.shares) if self.shares else None

    @property
    def reserved_bytes(self) -> int | None:
        """Memory held besides its KV cache while awake; None without a ledger."""
        return sum(share.reserved_bytes for share in self.shares) if self.shares else None

    @property
    def asked_bytes(self) -> int | None:
        """Memory that it has requested and waits for; None without a ledger."""
        return sum(share.asked_bytes for share in self.shares) if self.shares else None

    @property
    def uuid_text(self) -> str | None:
        """The UUID of its segment as text; None where it is not known."""
        return uuid_text(self.uuid) if self.uuid else None


def state_word(state: str, *, sleeps: bool, is_limit_too_low: bool) -> str:
    """What tables show as the state; see `InstanceStatus.word`."""
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
    shown_tiers: TiersFigures | None = None,
) -> InstanceStatus:
    """Read a segment as it was found, with what its tiers show, if it has some.

    `now_ns` (CLOCK_MONOTONIC) is needed for `pending_s` only.
    """
    if not info.header:
        return InstanceStatus(
            info.name, info.status, info.status, info.status, reason=info.problem, is_known=False
        )
    header, usage, answer, request = info.header, info.usage, info.answer, info.request
    request_state = _request_state(answer, request)
    limit_bytes, capacity_bytes = usage["limit_bytes"], usage["capacity_bytes"]
    is_limited = limit_bytes != UNLIMITED_BYTES
    # The control block counts reserved blocks as used bytes, but counts blocks separately.
    taken = usage["blocks_in_use"] + usage["blocks_reserved"]
    set_aside_bytes = usage["in_use_bytes"] * usage["blocks_reserved"] // max(taken, 1)
    waited_ns = 0 if now_ns is None else max(0, now_ns - request["written_ns"])
    figures = {name: usage.get(name, 0) for name in _FIGURES}
    figures["in_use_bytes"] -= set_aside_bytes
    shares = tuple(_shares(header["uuid"], ledgers))
    return InstanceStatus(
        name=info.name,
        life=info.status,
        state=request_state if info.status == "alive" else info.status,
        request_state=request_state,
        reason=answer["reason"],
        asleep=bool(usage["asleep"]),
        engine_asleep=info.engine_asleep,
        limit_bytes=limit_bytes if is_limited else capacity_bytes,
        is_limited=is_limited,
        is_squeezed=bool(usage["squeezed"]),
        requested_limit_bytes=request["limit_bytes"],
        set_aside_bytes=set_aside_bytes,
        **figures,
        **{name: answer[name] for name in _ANSWERED},
        **{name: header[name] for name in _IDENTITY},
        requests_waiting=usage["requests_waiting"] if usage.get("reports_waiting") else None,
        revision=request["revision"],
        answered_revision=answer["revision"],
        pending_s=waited_ns / 1e9 if request_state == "pending" else 0.0,
        created=_utc_text(header["created_realtime_ns"]),
        counters=info.counters,
        shares=shares,
        uses=tuple(_uses(header["devices"], figures, shares)),
        shown_tiers=shown_tiers,
    )


def _request_state(answer: Mapping[str, Any], request: Mapping[str, Any]) -> str:
    state: str = answer["state"]
    is_answered = state != "none" and answer["revision"] == request["revision"]
    return state if is_answered else "pending"


def _shares(uuid: bytes, ledgers: Iterable[LedgerInfo]) -> Iterable[DeviceShare]:
    for ledger in ledgers:
        for member in ledger.members:
            if member.uuid == uuid:
                yield _share(ledger, member)


def _share(ledger: LedgerInfo, member: Member) -> DeviceShare:
    return DeviceShare(
        device=ledger.device,
        group=ledger.group,
        granted_bytes=member.granted_bytes,
        asked_bytes=member.ask_bytes,
        asked_s=member.ask_s,
        wanted_bytes=member.wanted_bytes,
        idle_s=member.idle_s,
        reserved_bytes=member.reserve_bytes,
    )


def _uses(
    devices: Iterable[tuple[str, int]], figures: Mapping[str, int], shares: Iterable[DeviceShare]
) -> Iterable[DeviceUse]:
    """Every copy of a page is as large as the others, so bytes are divided by copies."""
    devices, shares = list(devices), list(shares)
    whole = max(1, sum(copies for _, copies in devices))
    for device, copies in devices:
        here = {part: figures[part] * copies // whole for part in _PARTS}
        share = next((one for one in shares if one.device == device), None)
        yield DeviceUse(device, copies, **here, share=share)


def uuid_text(raw: bytes) -> str:
    """The 16 bytes of a UUID as people write it."""
    digits = raw.hex()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _utc_text(realtime_ns: int) -> str | None:
    try:
        moment = datetime.fromtimestamp(realtime_ns // 1_000_000_000, tz=timezone.utc)
    except (OverflowError, ValueError, OSError):
        return None
    return moment.isoformat().replace("+00:00", "Z")
