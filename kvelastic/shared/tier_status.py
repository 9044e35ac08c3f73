"""Tiers of an instance: reads their status file and sends requests to them.

    status = read(inspect("kvelastic_vLLM_4711"))       # None: it has no tiers
    answer = ask(info, TierRequest("limit", tier="disk", size_bytes=1 << 30), wait_s=5.0)

The file is named after the segment's uuid. So it cannot be mistaken for the file of another
instance with the same name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from kvelastic.errors import (
    InvalidArgumentError,
    SegmentError,
    SegmentFormatError,
    SegmentNotFoundError,
)
from kvelastic.shared import status_file
from kvelastic.shared.segment_listing import SHM_DIR, SegmentInfo, tier_status_name
from kvelastic.shared.status_file import Asked, Count, Shown, StatusKind, newest, reading
from kvelastic.tier_list import MOST_TIERS

MOST_BYTES: Final = 1 << 62
"""Upper bound of a size in bytes."""
LEAST_AGE_S: Final = 0.001
MOST_AGE_S: Final = 100 * 366 * 86400.0
MOST_MODEL_BYTES: Final = 256
MOST_PROBLEM_BYTES: Final = 160
MOST_REASON_BYTES: Final = 320

REQUEST_KINDS: Final = ("limit", "trim", "clear", "erase", "verify")

Label = Annotated[str, Meta(pattern=r"^[0-9A-Za-z]{1,16}\Z")]


class TierStatus(Shown, frozen=True):
    """One tier. Counts are of tier objects, since the tier was opened. None: unknown or absent."""

    tier: Label
    """Name in commands: its kind, plus a number for the second and later tiers of a kind."""
    kind: Annotated[str, Meta(pattern=r"^(host|disk|folder|mooncake|peer)\Z")]
    """host, disk, folder, mooncake or peer."""
    used_bytes: Count
    limit_bytes: Count | None
    """None: kvelastic enforces no limit."""
    records: Count
    puts: Count
    refused: Count
    hits: Count
    misses: Count
    torn: Count
    evicted: Count
    errors: Count
    bytes_written: Count
    bytes_read: Count
    load_us: Count | None
    """Microseconds to load a block; None before the first load."""
    write_budget_bytes: Count | None
    """Bytes that may be written per day (UTC)."""
    write_left_bytes: Count | None
    """Bytes of the budget that are left today."""
    waiting_bytes: Count
    """Bytes of objects in a nearer tier that are still to be copied to this tier."""
    is_stuck: bool
    """Whether the tier is stalled and bypassed."""
    is_current: bool
    """Whether the tier reported these statistics. If not, they are older, or zero."""
    problem: str = ""
    """What the medium refuses to do now; empty if nothing is known to fail."""

    @property
    def load_s(self) -> float | None:
        """Seconds to load a block; None before the first load."""
        return None if self.load_us is None else self.load_us / 1e6

    @property
    def state(self) -> str:
        """State of the tier: ok, stuck, silent or failing.

        stuck: it is stalled and bypassed. silent: it does not report its content. failing: its
        medium refuses an operation, see `problem`.
        """
        if self.is_stuck:
            return "stuck"
        if not self.is_current:
            return "silent"
        return "failing" if self.problem else "ok"


class BlockCounts(Shown, frozen=True):
    """Counts of an instance's blocks, by outcome, since its tiers were opened."""

    matched: Count
    """Requested and found."""
    unmatched: Count
    """Requested and not found."""
    loaded: Count
    missed: Count
    """Found but not loaded, because a medium failed or the load was cancelled."""
    served: Count
    """Cleaned while the pool waited to shrink."""
    ahead: Count
    """Cleaned in advance, without a waiter."""
    refused: Count
    """Copied, but refused by every tier."""
    late: Count
    """Started, but cancelled at a deadline."""
    lost: Count
    """Used, evicted or renamed during the copy."""
    demoted: Count
    """Evicted with a copy in a tier."""
    dropped: Count
    """Evicted without a copy."""


class TiersStatus(Shown, frozen=True):
    """The tiers of an instance."""

    published_realtime_ns: Count
    answered_revision: Count
    """Revision of the last request with a result."""
    policy: Annotated[str, Meta(pattern=r"^write_(back|through)\Z")]
    """write_back or write_through."""
    blocks: BlockCounts
    tiers: Annotated[tuple[TierStatus, ...], Meta(max_length=MOST_TIERS)]


class TierRequest(Shown, frozen=True):
    """An operator's request. limit and trim use `tier` and `size_bytes`; erase uses the rest.

    An erase request needs `model`, `older_than_s` or both.
    """

    kind: str
    tier: str = ""
    size_bytes: int = 0
    model: str | None = None
    older_than_s: float | None = None


class TierAck(Shown, frozen=True):
    """The instance's result of a request."""

    revision: Count
    state: Annotated[str, Meta(pattern=r"^(done|refused|failed)\Z")]
    """done, refused (nothing was changed) or failed."""
    counts: Annotated[tuple[Count | None, ...], Meta(max_length=MOST_TIERS)]
    """Objects erased (clear, erase) or held (other requests), by tier; None: not reported."""
    reason: str


KIND: Final = StatusKind(
    "tier status file", b"KVTIERS\0", 3, 8192, TiersStatus, TierRequest, TierAck
)


def cut_text(text: str, most_bytes: int) -> str:
    """Truncate text to `most_bytes` of UTF-8, without a partial character."""
    return text.encode("utf-8", "replace")[:most_bytes].decode("utf-8", "ignore")


def check_request(request: TierRequest) -> TierRequest:
    """Return a well-formed request; used by both sides. Raises `InvalidArgumentError`."""
    if request.kind not in REQUEST_KINDS:
        raise InvalidArgumentError(f"a request of kind {request.kind!r} is not known")
    if request.kind in {"limit", "trim"}:
        if not 0 <= request.size_bytes < MOST_BYTES:
            raise InvalidArgumentError(f"{request.size_bytes} bytes are no size")
        if not request.tier:
            raise InvalidArgumentError("no tier is named")
    if request.kind == "erase":
        if request.model is None and request.older_than_s is None:
            raise InvalidArgumentError("neither a model nor an age says what to erase")
        if request.model is not None:
            try:
                size = len(request.model.encode("utf-8", "surrogateescape"))
            except UnicodeEncodeError:
                raise InvalidArgumentError("a model's name must be valid Unicode text") from None
            if not 0 < size <= MOST_MODEL_BYTES:
                raise InvalidArgumentError(
                    f"a model's name of {size} bytes is not accepted; 1 to {MOST_MODEL_BYTES} are"
                )
        age_s = request.older_than_s
        # Comparisons with nan are false, so nan is refused as well.
        if age_s is not None and not (math.isfinite(age_s) and LEAST_AGE_S <= age_s <= MOST_AGE_S):
            raise InvalidArgumentError(
                f"an age of {age_s:g} s is not accepted; {LEAST_AGE_S:g} to {MOST_AGE_S:g} are"
            )
    return request


def read(info: SegmentInfo) -> TiersStatus | None:
    """Return the tiers that a live instance publishes; None if it has no tiers.

    Never blocks. Raises `SegmentFormatError` if the file is damaged, has another version or belongs
    to another user. Raises `SegmentError` if it cannot be opened.
    """
    name, title = _file_of(info)
    with reading(name, KIND, title, _owner_of(info.name)) as fd:
        return None if fd is None else newest(fd, KIND, title)


def tiers_of(infos: Sequence[SegmentInfo]) -> Mapping[str, TiersStatus]:
    """Return the readable tiers of the live instances among `infos`, by segment name."""
    found = {}
    for info in infos:
        if info.is_alive and info.header:
            with suppress(SegmentError):
                tiers = read(info)
                if tiers is not None:
                    found[info.name] = tiers
    return found


def ask(info: SegmentInfo, request: TierRequest, wait_s: float) -> TierAck | None:
    """Send a request to an instance's tiers and wait for the result of this request.

    Blocks for at most `wait_s` seconds. Returns None on timeout; the request remains in force.
    Raises the errors of `post`, and `SegmentDeadError` if the instance ends during the wait.
    """
    with post(info, request) as asked:
        return asked.wait(wait_s)


def post(info: SegmentInfo, request: TierRequest) -> Asked[TierAck]:
    """Send a request like `ask`, but return without waiting. The caller closes the result.

    Blocks for milliseconds, because operators share a lock. Raises `InvalidArgumentError` for a
    malformed request or an unknown tier, `SegmentNotFoundError` if the instance has no tiers,
    `SegmentBusyError` if too many requests are pending, `SegmentDeadError` if it has ended, and the
    errors of `read`.
    """
    try:
        check_request(request)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{error}; nothing was asked") from None

    def check(shown: TiersStatus) -> None:
        tiers = [one.tier for one in shown.tiers]
        if request.tier and request.tier not in tiers:
            raise InvalidArgumentError(
                f"the instance {info.name!r} has no tier {request.tier!r}; it has"
                f" {', '.join(tiers)}"
            )

    name, title = _file_of(info)
    asked = status_file.post(
        name,
        KIND,
        _sent(request),
        owner_uid=_owner_of(info.name),
        title=title,
        lock_name=info.name,
        subject=f"tiers of {info.name!r}",
        check=check,
    )
    if asked is None:
        raise SegmentNotFoundError(
            f"the instance {info.name!r} has no tiers; it gets them from KVELASTIC_TIERS when it"
            " starts"
        )
    return asked


def _sent(request: TierRequest) -> TierRequest:
    """Encode the model's name as Latin-1 characters, because its bytes may not be valid UTF-8."""
    if request.model is None:
        return request
    raw = request.model.encode("utf-8", "surrogateescape")
    return msgspec.structs.replace(request, model=raw.decode("latin-1"))


def received(request: TierRequest) -> TierRequest:
    """Decode and validate the request that `post` sent. Raises `InvalidArgumentError`."""
    if request.model is not None:
        try:
            model = request.model.encode("latin-1").decode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise InvalidArgumentError("a model's name must be valid Unicode text") from None
        request = msgspec.structs.replace(request, model=model)
    return check_request(request)


def _file_of(info: SegmentInfo) -> tuple[str, str]:
    """Return the file's name, and its description for messages."""
    if not info.header:
        raise SegmentFormatError(info.problem or f"the segment {info.name!r} cannot be read")
    return tier_status_name(info.header["uuid"]), f"tier status file of {info.name!r}"


def _owner_of(name: str) -> int:
    """Return the owner of the segment's file.

    The uid in the segment's header may be that of another user namespace.
    """
    try:
        return (SHM_DIR / name).stat(follow_symlinks=False).st_uid
    except OSError:
        raise SegmentNotFoundError(f"no segment is called {name!r}") from None
