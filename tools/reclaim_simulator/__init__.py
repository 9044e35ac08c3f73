"""The policy of who gives memory to whom, on plain values: no clock, no memory, no lock.

    plan = plan_reclaim([asker, victim], 0, free_bytes=0, capacity_bytes=8 * GIB_BYTES)
    for demand in plan: print(demand.contender, demand.bytes, demand.depth.name)

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
    "ASK_LEASE_NS",
    "FAIR_CACHED_NS",
    "FAIR_IN_USE_NS",
    "IDLE_NS",
    "PATIENCE_NS",
    "RESERVE_WAIT_NS",
    "Contender",
    "Demand",
    "Depth",
    "kept_bytes",
    "plan_excess",
    "plan_reclaim",
]

IDLE_NS: Final = _vmm.RECLAIM_IDLE_NS
"""Without an alloc or a free for so long an instance is idle."""
PATIENCE_NS: Final = _vmm.RECLAIM_PATIENCE_NS
"""Who has not dealt with a request for so long is not counted on."""
FAIR_CACHED_NS: Final = _vmm.RECLAIM_FAIR_CACHED_NS
"""After so long an ask reaches cached contents of busy equals above their share."""
FAIR_IN_USE_NS: Final = _vmm.RECLAIM_FAIR_IN_USE_NS
"""After so long also their blocks in use."""
RESERVE_WAIT_NS: Final = _vmm.RECLAIM_RESERVE_WAIT_NS
"""What a wake is to reserve is refused when others have not given it for so long."""
ASK_LEASE_NS: Final = _vmm.RECLAIM_ASK_LEASE_NS
"""An ask that nobody has repeated for so long is no ask any more."""

_MAX_UNSIGNED: Final = (1 << 64) - 1
_MAX_PRIORITY: Final = (1 << 63) - 1


class Depth(IntEnum):
    """Down to which reclaim step an instance is asked to go."""

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
    ask_bytes: int = 0
    """What it waits for; 0: nothing."""
    ask_ns: int = 0
    """How long it has waited."""
    wanted_bytes: int = 0
    """Asked of it and not dealt with yet."""
    wanted_ns: int = 0
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
class Demand:
    """What one instance is asked for."""

    contender: int
    """Its index among the contenders."""
    bytes: int
    depth: Depth


def plan_reclaim(
    contenders: Sequence[Contender], asker: int, free_bytes: int, capacity_bytes: int
) -> list[Demand]:
    """Say whom to ask for what, so that `contenders[asker]` gets its `ask_bytes`.

    `free_bytes` are there for it already, and what others were asked for lately counts as on its
    way. The order of the answer is the order to ask in. It may come to less than is missing: nobody
    else has to give anything. Raises `InvalidArgumentError` for a bad index or negative bytes.
    """
    _check(contenders, asker, free_bytes=free_bytes, capacity_bytes=capacity_bytes)
    return _named(_vmm.plan_reclaim(contenders, asker, free_bytes, capacity_bytes))


def plan_excess(
    contenders: Sequence[Contender], excess_bytes: int, capacity_bytes: int
) -> list[Demand]:
    """Say whom to ask for what, so that all together hold `excess_bytes` less.

    As `plan_reclaim` for one who outranks everybody: guarantees are kept, and one page of each.
    Raises `InvalidArgumentError` for negative bytes.
    """
    _check_sizes(excess_bytes=excess_bytes, capacity_bytes=capacity_bytes)
    return _named(_vmm.plan_excess(contenders, excess_bytes, capacity_bytes))


def kept_bytes(contenders: Sequence[Contender], index: int, capacity_bytes: int) -> int:
    """Say how many of the bytes that come free `contenders[index]` has to leave to those who wait.

    To each that goes before it all that is asked for; only what is lacking of the guarantee, or of
    the fair share among equals, where that alone is why. Raises `InvalidArgumentError` for a bad
    index or negative bytes.
    """
    _check(contenders, index, capacity_bytes=capacity_bytes)
    return _vmm.kept_bytes(contenders, index, capacity_bytes)


def _named(plan: list[tuple[int, int, int]]) -> list[Demand]:
    return [Demand(contender, count, Depth(depth)) for contender, count, depth in plan]


def _check(contenders: Sequence[Contender], index: int, **sizes: int) -> None:
    if not 0 <= index < len(contenders):
        raise InvalidArgumentError(f"the index {index} is wrong for {len(contenders)} contenders.")
    _check_sizes(**sizes)


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if not 0 <= value <= _MAX_UNSIGNED:
            raise InvalidArgumentError(f"{name} is {value}; it must be 0 to 2**64 - 1.")
