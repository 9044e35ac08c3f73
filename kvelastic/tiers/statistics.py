"""What tiers have done and hold, as they say it to whoever asks."""

from __future__ import annotations

from dataclasses import dataclass

from kvelastic.tiers.base import Capacity, StoreStatistics


@dataclass(frozen=True)
class TierStatistics:
    """One tier."""

    name: str
    capacity: Capacity | None
    """None where the store did not answer in time."""
    store: StoreStatistics | None
    load_s: float | None
    """Seconds to load a block; None before the first load."""
    is_stuck: bool
    """Whether it hangs, and is not asked."""


@dataclass(frozen=True)
class TiersStatistics:
    """All tiers of a pool. Counts are of blocks, since it was opened."""

    tiers: tuple[TierStatistics, ...]
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
