"""The policy of who gives memory to whom, on plain values: no clock, no memory, no lock.

    plan = plan_reclaim([requester, victim], 0, free_bytes=0, capacity_bytes=8 * GIB_BYTES)
    for request in plan: print(request.contender, request.bytes, request.depth.name)

It calls the native policy that instances use (vmm_csrc/ledger/reclaim.h). docs/reclaim.md has the
rules; `python -m tools.reclaim_simulator` replays traces by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Final

from kvelastic import _vmm
from kvelastic.errors import InvalidArgumentError

__all__ = [
    "FAIR_CACHED_NS",
    "FAIR_IN_USE_NS",
    "IDLE_NS",
    "PATIENCE_NS",
    "REQUEST_EXPIRY_NS",
    "RESERVE_WAIT_NS",
    "Contender",
    "Depth",
    "ReclaimRequest",
    "kept_bytes",
    "plan_excess",
    "plan_reclaim",
]

IDLE_NS: Final = _vmm.RECLAIM_IDLE_NS
"""Without an alloc or a free for so long an instance is idle."""
PATIENCE_NS: Final = _vmm.RECLAIM_PATIENCE_NS
"""Who has not dealt with a request for so long is not counted on."""
FAIR_CACHED_NS: Final = _vmm.RECLAIM_FAIR_CACHED_NS
"""A request this old may take cached contents of busy equals above their fair share."""
FAIR_IN_USE_NS: Final = _vmm.RECLAIM_FAIR_IN_USE_NS
"""A request this old may also take their blocks in use."""
RESERVE_WAIT_NS: Final = _vmm.RECLAIM_RESERVE_WAIT_NS
"""What a wake is to reserve is refused when others have not given it for so long."""
REQUEST_EXPIRY_NS: Final = _vmm.RECLAIM_REQUEST_EXPIRY_NS
"""A memory request expires if it is not renewed for this long."""

_MAX_UNSIGNED: Final = (1 << 64) - 1
_MAX_PRIORITY: Final = (1 << 63) - 1


class Depth(IntEnum):
    """The last reclaim step that a reclaim request allows."""

    PARKED = 1
    CACHED = 2
    IN_USE = 3


@dataclass(frozen=True)
class Contender:
    """One instance of a device, at one moment.

    Raises `InvalidArgumentError` where a value is negative (but the priority), or has more bits
    than the native policy.
    """

    granted_bytes: int = 0
    min_bytes: int = 0
    priority: int = 0
    parked_bytes: int = 0
    cached_bytes: int = 0
    page_bytes: int = 0
    """What it gives is a multiple of this; 0: of one byte."""
    idle_ns: int = 0
    """Since its last alloc or free."""
    request_bytes: int = 0
    """What it waits for; 0: nothing."""
    request_ns: int = 0
    """How long it has waited."""
    reclaim_bytes: int = 0
    """Asked of it and not dealt with yet."""
    reclaim_ns: int = 0
    """Since the oldest of that, or since it last dealt with some."""

    def __post_init__(self) -> None:
        for name in _UNSIGNED_FIELDS:
            value = getattr(self, name)
            if not 0 <= value <= _MAX_UNSIGNED:
                raise InvalidArgumentError(f"{name} is {value}; it must be 0 to 2**64 - 1.")
        if not -_MAX_PRIORITY <= self.priority <= _MAX_PRIORITY:
            raise InvalidArgumentError(f"priority is {self.priority}; it must have 64 bits.")


_UNSIGNED_FIELDS: Final = tuple(f.name for f in fields(Contender) if f.name != "priority")


@dataclass(frozen=True)
class ReclaimRequest:
    """A reclaim request to one instance."""

    contender: int
    """Its index among the contenders."""
    bytes: int
    depth: Depth


def plan_reclaim(
    contenders: Sequence[Contender], requester: int, free_bytes: int, capacity_bytes: int
) -> list[ReclaimRequest]:
    """Plan the reclaim requests for `contenders[requester]` to get its `request_bytes`.

    `free_bytes` are available to it, and memory requested earlier counts as on its way. The order
    of the result is the order of sending. The plan may cover less than is missing if no other
    instance must release memory. Raises `InvalidArgumentError` for a bad index or negative bytes.
    """
    _check(contenders, requester, free_bytes=free_bytes, capacity_bytes=capacity_bytes)
    return _named(_vmm.plan_reclaim(contenders, requester, free_bytes, capacity_bytes))


def plan_excess(
    contenders: Sequence[Contender], excess_bytes: int, capacity_bytes: int
) -> list[ReclaimRequest]:
    """Plan reclaim requests that reduce the total by `excess_bytes`.

    As `plan_reclaim` for a requester that outranks all: guarantees and one page of each are kept.
    Raises `InvalidArgumentError` for negative bytes.
    """
    _check_sizes(excess_bytes=excess_bytes, capacity_bytes=capacity_bytes)
    return _named(_vmm.plan_excess(contenders, excess_bytes, capacity_bytes))


def kept_bytes(contenders: Sequence[Contender], index: int, capacity_bytes: int) -> int:
    """Return how many released bytes `contenders[index]` must leave to waiting instances.

    An instance that outranks it gets its whole request; if it outranks only by guarantee or fair
    share, only the missing part of that. Raises `InvalidArgumentError` for a bad
    index or negative bytes.
    """
    _check(contenders, index, capacity_bytes=capacity_bytes)
    return _vmm.kept_bytes(contenders, index, capacity_bytes)


def _named(plan: list[tuple[int, int, int]]) -> list[ReclaimRequest]:
    return [ReclaimRequest(contender, count, Depth(depth)) for contender, count, depth in plan]


def _check(contenders: Sequence[Contender], index: int, **sizes: int) -> None:
    if not 0 <= index < len(contenders):
        raise InvalidArgumentError(f"the index {index} is wrong for {len(contenders)} contenders.")
    _check_sizes(**sizes)


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if not 0 <= value <= _MAX_UNSIGNED:
            raise InvalidArgumentError(f"{name} is {value}; it must be 0 to 2**64 - 1.")
