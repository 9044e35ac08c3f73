"""The bytes of a tier board: what an instance says of its tiers, and what operators ask of it.

Where cells lie and what seals them is in `board_layout`; here is what stands in them. `unpack_*`
answers None for what no writer of ours writes.
"""

from __future__ import annotations

import math
import struct
from dataclasses import astuple, dataclass, fields, replace
from typing import Any, Final

from kvelastic.board_layout import CELL_BYTES, MOST_REVISION, BoardLayout

MOST_TIERS: Final = 8
MOST_BYTES: Final = 1 << 62
"""No size is larger."""
LEAST_AGE_S: Final = 0.001
MOST_AGE_S: Final = 100 * 366 * 86400.0
MOST_MODEL_BYTES: Final = 256

REQUEST_KINDS: Final = ("limit", "trim", "clear", "erase", "verify")
ANSWER_STATES: Final = ("done", "refused", "failed")
POLICIES: Final = ("write_back", "write_through")
TIER_KINDS: Final = ("host", "disk", "folder", "mooncake")

LAYOUT: Final = BoardLayout("tier board", b"KVTIERS\0", version=2, snapshot_bytes=4096)

_NONE: Final = (1 << 64) - 1
_LABEL_BYTES: Final = 16
_ALL: Final = struct.Struct("<QQQBB6x11Q")
_TIER: Final = struct.Struct("<16s16s18Q")
# Behind the room for all tiers: a text for each.
_PROBLEMS_AT: Final = _ALL.size + MOST_TIERS * _TIER.size
_MOST_PROBLEM_BYTES: Final = 160
_PROBLEM: Final = struct.Struct(f"<{_MOST_PROBLEM_BYTES}s")
_REQUEST: Final = struct.Struct("<QBBBxH2x16sQQ256s")
_ANSWER: Final = struct.Struct("<QBxH4x8Q320s")
_MOST_REASON_BYTES: Final = 320


@dataclass(frozen=True)
class TierFigures:
    """One tier. Counts are of records, since it was opened; None: not known, or there is none."""

    tier: str
    """What commands call it: its kind, with a number behind it from the second of a kind on."""
    kind: str
    """host, disk, folder or mooncake."""
    used_bytes: int
    limit_bytes: int | None
    """None: others decide."""
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
    """Microseconds to load a block; None before the first."""
    write_budget_bytes: int | None
    """That may be written a day (UTC)."""
    write_left_bytes: int | None
    """Of that, today."""
    waiting_bytes: int
    """Of records that a nearer tier has and that are still to be copied to this one."""
    is_stuck: bool
    """Whether it hangs, and is not asked."""
    is_current: bool
    """Whether it answered for these figures; if not they are older, or zero."""
    problem: str = ""
    """Why its medium does not do all that it should now; empty: it does, or it is not said."""

    @property
    def state(self) -> str:
        """ok; stuck: it hangs and is not asked; silent: it does not say what it holds;
        failing: its medium refuses something, see `problem`."""
        if self.is_stuck:
            return "stuck"
        if not self.is_current:
            return "silent"
        return "failing" if self.problem else "ok"


@dataclass(frozen=True)
class BlockCounts:
    """What became of an instance's blocks, since its tiers were opened."""

    matched: int
    """Asked for and found."""
    unmatched: int
    """Asked for and not found."""
    loaded: int
    missed: int
    """Found, and not loaded all the same: a medium failed, or a load was cancelled."""
    served: int
    """Cleaned while shrinking waited."""
    ahead: int
    """Cleaned while nobody waited."""
    refused: int
    """Copied, and taken by no tier."""
    late: int
    """Begun, and cancelled at a deadline."""
    lost: int
    """Used, evicted or renamed while they were copied."""
    demoted: int
    """Evicted with a copy."""
    dropped: int
    """Evicted without one."""


@dataclass(frozen=True)
class BoardFigures:
    """All tiers of an instance."""

    published_realtime_ns: int
    answered_revision: int
    """Of the last request that was answered."""
    policy: str
    """write_back or write_through."""
    blocks: BlockCounts
    tiers: tuple[TierFigures, ...]


_TIER_FIGURES: Final = tuple(field.name for field in fields(TierFigures))[2:-3]
"""Those between what it is called and how it does; the order of the file is that of the class."""
_TIER_OPTIONAL: Final = {"limit_bytes", "load_us", "write_budget_bytes", "write_left_bytes"}


@dataclass(frozen=True)
class TierRequest:
    """What an operator asks. `tier` and `size_bytes` belong to limit and trim, the rest to erase.

    Of an erase at least one of `model` and `older_than_s` is given.
    """

    kind: str
    tier: str = ""
    size_bytes: int = 0
    model: str | None = None
    older_than_s: float | None = None


@dataclass(frozen=True)
class TierAnswer:
    """What the instance says to a request."""

    revision: int
    state: str
    """done, refused (nothing was changed) or failed."""
    counts: tuple[int | None, ...]
    """Records erased (clear, erase) or held (the others), tier by tier; None: not said."""
    reason: str


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


# ------------------------------------------------------------------------------------- snapshots


def pack_snapshot(number: int, board: BoardFigures) -> bytes:
    """One snapshot; the newer one has the higher number."""
    tiers = board.tiers[:MOST_TIERS]
    body = _ALL.pack(
        number,
        _number(board.published_realtime_ns),
        _number(board.answered_revision),
        POLICIES.index(board.policy),
        len(tiers),
        *map(_number, astuple(board.blocks)),
    )
    for tier in tiers:
        name, kind, *figures, _ = astuple(tier)
        body += _TIER.pack(_label(name), _label(kind), *map(_number, figures))
    body = body.ljust(_PROBLEMS_AT, b"\0")
    body += b"".join(_PROBLEM.pack(_cut(tier.problem)) for tier in tiers)
    return LAYOUT.sealed(b"snapshot", body, LAYOUT.snapshot_bytes)


def unpack_snapshot(raw: bytes) -> tuple[int, BoardFigures] | None:
    """Its number and what it says; None: it is not whole."""
    body = LAYOUT.opened(b"snapshot", raw, LAYOUT.snapshot_bytes)
    if body is None:
        return None
    number, published_ns, answered, policy, tier_count, *counts = _ALL.unpack_from(body)
    if policy >= len(POLICIES) or tier_count > MOST_TIERS or answered >= MOST_REVISION:
        return None
    tiers = []
    for place in range(tier_count):
        tier = _unpack_tier(body, _ALL.size + place * _TIER.size)
        if tier is None:
            return None
        (problem,) = _PROBLEM.unpack_from(body, _PROBLEMS_AT + place * _PROBLEM.size)
        tiers.append(replace(tier, problem=problem.rstrip(b"\0").decode("utf-8", "replace")))
    board = BoardFigures(
        published_realtime_ns=published_ns,
        answered_revision=answered,
        policy=POLICIES[policy],
        blocks=BlockCounts(*counts),
        tiers=tuple(tiers),
    )
    return number, board


def _unpack_tier(body: bytes, at: int) -> TierFigures | None:
    name, kind, *figures, is_stuck, is_current = _TIER.unpack_from(body, at)
    label, kind_text = _text(name), _text(kind)
    if not label or not label.isalnum() or kind_text not in TIER_KINDS:
        return None
    values: dict[str, Any] = dict(zip(_TIER_FIGURES, map(_or_none, figures), strict=True))
    # A count that is not known is none of ours.
    if any(values[name] is None for name in _TIER_FIGURES if name not in _TIER_OPTIONAL):
        return None
    return TierFigures(
        tier=label, kind=kind_text, is_stuck=bool(is_stuck), is_current=bool(is_current), **values
    )


# -------------------------------------------------------------------------- requests and answers


def pack_request(revision: int, request: TierRequest) -> bytes:
    """The cell of a request that `check_request` has accepted."""
    model = (request.model or "").encode("utf-8", "surrogateescape")
    age_ms = 0 if request.older_than_s is None else round(request.older_than_s * 1000)
    body = _REQUEST.pack(
        revision,
        REQUEST_KINDS.index(request.kind),
        request.model is not None,
        request.older_than_s is not None,
        len(model),
        _label(request.tier),
        request.size_bytes,
        age_ms,
        model,
    )
    return LAYOUT.sealed(b"request", body, CELL_BYTES)


def unpack_request(raw: bytes) -> tuple[int, TierRequest] | None:
    """Its revision and what it asks, which `check_request` has not seen; None: it is not whole."""
    body = LAYOUT.opened(b"request", raw, CELL_BYTES)
    if body is None:
        return None
    revision, kind, has_model, has_age, length, tier, size_bytes, age_ms, model = (
        _REQUEST.unpack_from(body)
    )
    label = _text(tier)
    if not 0 < revision < MOST_REVISION or label is None:
        return None
    return revision, TierRequest(
        REQUEST_KINDS[kind] if kind < len(REQUEST_KINDS) else f"#{kind}",
        label,
        size_bytes,
        model[:length].decode("utf-8", "surrogateescape") if has_model else None,
        age_ms / 1000 if has_age else None,
    )


def pack_answer(answer: TierAnswer) -> bytes:
    """The cell of an answer; of a long reason the end is left out."""
    reason = answer.reason.encode("utf-8", "replace")[:_MOST_REASON_BYTES]
    counts = [*answer.counts, *[None] * MOST_TIERS][:MOST_TIERS]
    body = _ANSWER.pack(
        answer.revision,
        ANSWER_STATES.index(answer.state),
        len(reason),
        *map(_number, counts),
        reason,
    )
    return LAYOUT.sealed(b"answer", body, CELL_BYTES)


def unpack_answer(raw: bytes) -> TierAnswer | None:
    """What was answered; None: it is not whole."""
    body = LAYOUT.opened(b"answer", raw, CELL_BYTES)
    if body is None:
        return None
    revision, state, length, *counts, reason = _ANSWER.unpack_from(body)
    if not 0 < revision < MOST_REVISION or state >= len(ANSWER_STATES):
        return None
    return TierAnswer(
        revision,
        ANSWER_STATES[state],
        tuple(map(_or_none, counts)),
        reason[:length].decode("utf-8", "replace"),
    )


# ---------------------------------------------------------------------------------------- fields


def _number(value: int | None) -> int:
    return _NONE if value is None else min(max(int(value), 0), _NONE - 1)


def _or_none(value: int) -> int | None:
    return None if value == _NONE else value


def _cut(text: str) -> bytes:
    """As much of a text as has room; of a character that has none nothing is left."""
    raw = text.encode("utf-8", "replace")[:_MOST_PROBLEM_BYTES]
    return raw.decode("utf-8", "ignore").encode()


def _label(text: str) -> bytes:
    return text.encode("ascii", "replace")[:_LABEL_BYTES]


def _text(raw: bytes) -> str | None:
    try:
        return raw.rstrip(b"\0").decode("ascii")
    except UnicodeDecodeError:
        return None
