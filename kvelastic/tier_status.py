"""Tiers of an instance: what it shows of them in a status file, and requests to them.

    status = read(inspect("kvelastic_vLLM_4711"))       # None: it has no tiers
    answer = ask(info, TierRequest("limit", tier="disk", size_bytes=1 << 30), wait_s=5.0)

The file is called after the segment's uuid, so that none is ever taken for that of another instance
of the same name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from kvelastic import status_file
from kvelastic.errors import (
    InvalidArgumentError,
    SegmentError,
    SegmentFormatError,
    SegmentNotFoundError,
)
from kvelastic.segment_dir import SHM_DIR, SegmentInfo, tier_status_name
from kvelastic.status_file import Asked, Count, Shown, StatusKind, newest, reading
from kvelastic.tier_list import MOST_TIERS

MOST_BYTES: Final = 1 << 62
"""No size is larger."""
LEAST_AGE_S: Final = 0.001
MOST_AGE_S: Final = 100 * 366 * 86400.0
MOST_MODEL_BYTES: Final = 256
MOST_PROBLEM_BYTES: Final = 160
MOST_REASON_BYTES: Final = 320

REQUEST_KINDS: Final = ("limit", "trim", "clear", "erase", "verify")

Label = Annotated[str, Meta(pattern=r"^[0-9A-Za-z]{1,16}\Z")]


class TierFigures(Shown, frozen=True):
    """One tier. Counts are of records, since it was opened; None: not known, or there is none."""

    tier: Label
    """What commands call it: its kind, with a number behind it from the second of a kind on."""
    kind: Annotated[str, Meta(pattern=r"^(host|disk|folder|mooncake)\Z")]
    """host, disk, folder or mooncake."""
    used_bytes: Count
    limit_bytes: Count | None
    """None: others decide."""
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
    """Microseconds to load a block; None before the first."""
    write_budget_bytes: Count | None
    """That may be written a day (UTC)."""
    write_left_bytes: Count | None
    """Of that, today."""
    waiting_bytes: Count
    """Of records that a nearer tier has and that are still to be copied to this one."""
    is_stuck: bool
    """Whether it hangs, and is not asked."""
    is_current: bool
    """Whether it answered for these figures; if not they are older, or zero."""
    problem: str = ""
    """Why its medium does not do all that it should now; empty: it does, or it is not said."""

    @property
    def load_s(self) -> float | None:
        """Seconds to load a block; None before the first."""
        return None if self.load_us is None else self.load_us / 1e6

    @property
    def state(self) -> str:
        """ok; stuck: it hangs and is not asked; silent: it does not say what it holds;
        failing: its medium refuses something, see `problem`."""
        if self.is_stuck:
            return "stuck"
        if not self.is_current:
            return "silent"
        return "failing" if self.problem else "ok"


class BlockCounts(Shown, frozen=True):
    """What became of an instance's blocks, since its tiers were opened."""

    matched: Count
    """Asked for and found."""
    unmatched: Count
    """Asked for and not found."""
    loaded: Count
    missed: Count
    """Found, and not loaded all the same: a medium failed, or a load was cancelled."""
    served: Count
    """Cleaned while shrinking waited."""
    ahead: Count
    """Cleaned while nobody waited."""
    refused: Count
    """Copied, and taken by no tier."""
    late: Count
    """Begun, and cancelled at a deadline."""
    lost: Count
    """Used, evicted or renamed while they were copied."""
    demoted: Count
    """Evicted with a copy."""
    dropped: Count
    """Evicted without one."""


class TiersFigures(Shown, frozen=True):
    """All tiers of an instance."""

    published_realtime_ns: Count
    answered_revision: Count
    """Of the last request that was answered."""
    policy: Annotated[str, Meta(pattern=r"^write_(back|through)\Z")]
    """write_back or write_through."""
    blocks: BlockCounts
    tiers: Annotated[tuple[TierFigures, ...], Meta(max_length=MOST_TIERS)]


class TierRequest(Shown, frozen=True):
    """What an operator asks. `tier` and `size_bytes` belong to limit and trim, the rest to erase.

    Of an erase at least one of `model` and `older_than_s` is given.
    """

    kind: str
    tier: str = ""
    size_bytes: int = 0
    model: str | None = None
    older_than_s: float | None = None


class TierAnswer(Shown, frozen=True):
    """What the instance says to a request."""

    revision: Count
    state: Annotated[str, Meta(pattern=r"^(done|refused|failed)\Z")]
    """done, refused (nothing was changed) or failed."""
    counts: Annotated[tuple[Count | None, ...], Meta(max_length=MOST_TIERS)]
    """Records erased (clear, erase) or held (the others), tier by tier; None: not said."""
    reason: str


KIND: Final = StatusKind(
    "tier status file", b"KVTIERS\0", 3, 8192, TiersFigures, TierRequest, TierAnswer
)


def cut_text(text: str, most_bytes: int) -> str:
    """As much of a text as has room; of a character that has none nothing is left."""
    return text.encode("utf-8", "replace")[:most_bytes].decode("utf-8", "ignore")


class BadRequestError(ValueError):
    """A request that none of the commands makes; the message says what is wrong with it."""


def check_request(request: TierRequest) -> TierRequest:
    """Return it if it is well-formed; both sides ask. Raises `BadRequestError`."""
    if request.kind not in REQUEST_KINDS:
        raise BadRequestError(f"a request of kind {request.kind!r} is not known")
    if request.kind in {"limit", "trim"}:
        if not 0 <= request.size_bytes < MOST_BYTES:
            raise BadRequestError(f"{request.size_bytes} bytes are no size")
        if not request.tier:
            raise BadRequestError("no tier is named")
    if request.kind == "erase":
        if request.model is None and request.older_than_s is None:
            raise BadRequestError("neither a model nor an age says what to erase")
        if request.model is not None:
            try:
                size = len(request.model.encode("utf-8", "surrogateescape"))
            except UnicodeEncodeError:
                raise BadRequestError("a model's name must be valid Unicode text") from None
            if not 0 < size <= MOST_MODEL_BYTES:
                raise BadRequestError(
                    f"a model's name of {size} bytes is not accepted; 1 to {MOST_MODEL_BYTES} are"
                )
        age_s = request.older_than_s
        # nan compares to nothing, so it is refused as well.
        if age_s is not None and not (math.isfinite(age_s) and LEAST_AGE_S <= age_s <= MOST_AGE_S):
            raise BadRequestError(
                f"an age of {age_s:g} s is not accepted; {LEAST_AGE_S:g} to {MOST_AGE_S:g} are"
            )
    return request


def read(info: SegmentInfo) -> TiersFigures | None:
    """What a live instance says of its tiers; None where it has none.

    Never waits. Raises `SegmentFormatError` for a file of another version, of another user, or
    damaged; `SegmentError` if it cannot be opened.
    """
    name, title = _file_of(info)
    with reading(name, KIND, title, _owner_of(info.name)) as fd:
        return None if fd is None else newest(fd, KIND, title)


def tiers_of(infos: Sequence[SegmentInfo]) -> Mapping[str, TiersFigures]:
    """What those have that show tiers which can be read, by the names of their segments."""
    found = {}
    for info in infos:
        if info.is_alive and info.header:
            with suppress(SegmentError):
                tiers = read(info)
                if tiers is not None:
                    found[info.name] = tiers
    return found


def ask(info: SegmentInfo, request: TierRequest, wait_s: float) -> TierAnswer | None:
    """Ask something of an instance's tiers, and wait for its answer to this very request.

    None: no answer within `wait_s`; the request stays, and the instance goes on. Raises as `post`,
    and `SegmentDeadError` if it ends meanwhile.
    """
    with post(info, request) as asked:
        return asked.wait(wait_s)


def post(info: SegmentInfo, request: TierRequest) -> Asked[TierAnswer]:
    """Ask the same, and leave the waiting to the caller, who closes what is returned.

    Blocks for milliseconds: operators share a lock. Raises `InvalidArgumentError` for a malformed
    request and for a tier that it does not have, `SegmentNotFoundError` where it has no tiers,
    `SegmentBusyError` where others have asked as much as there is room for, `SegmentDeadError` if
    it has ended, and as `read`.
    """
    try:
        check_request(request)
    except BadRequestError as error:
        raise InvalidArgumentError(f"{error}; nothing was asked") from None

    def check(shown: TiersFigures) -> None:
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
    """With the bytes of the model's name as characters: they need not be UTF-8."""
    if request.model is None:
        return request
    raw = request.model.encode("utf-8", "surrogateescape")
    return msgspec.structs.replace(request, model=raw.decode("latin-1"))


def received(request: TierRequest) -> TierRequest:
    """The request that `post` was given; checked. Raises `BadRequestError`."""
    if request.model is not None:
        try:
            model = request.model.encode("latin-1").decode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise BadRequestError("a model's name must be valid Unicode text") from None
        request = msgspec.structs.replace(request, model=model)
    return check_request(request)


def _file_of(info: SegmentInfo) -> tuple[str, str]:
    """Its name, and what messages call it."""
    if not info.header:
        raise SegmentFormatError(info.problem or f"the segment {info.name!r} cannot be read")
    return tier_status_name(info.header["uuid"]), f"tier status file of {info.name!r}"


def _owner_of(name: str) -> int:
    """Of the segment's file: a number in it may be that of another user namespace."""
    try:
        return (SHM_DIR / name).stat(follow_symlinks=False).st_uid
    except OSError:
        raise SegmentNotFoundError(f"no segment is called {name!r}") from None
