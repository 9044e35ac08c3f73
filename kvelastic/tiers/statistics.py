"""What tiers have done and hold, as they say it to whoever asks."""

from __future__ import annotations

from dataclasses import dataclass

from kvelastic.tier_status import BlockCounts
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
    waiting_bytes: int = 0
    """Of records that a nearer tier has and that are still to be copied to this one."""


@dataclass(frozen=True)
class TiersStatistics:
    """All tiers of a pool."""

    tiers: tuple[TierStatistics, ...]
    blocks: BlockCounts
