"""Statistics of the tiers of one pool."""

from __future__ import annotations

from dataclasses import dataclass

from kvelastic.shared.tier_status import BlockCounts
from kvelastic.tiers.base import Capacity, StoreStatistics


@dataclass(frozen=True)
class TierStatistics:
    """Statistics of one tier."""

    name: str
    capacity: Capacity | None
    """None if the store did not return in time."""
    store: StoreStatistics | None
    """None if the store did not return in time."""
    load_s: float | None
    """Seconds to load a block; None before the first load."""
    is_stuck: bool
    """Whether a call to the store hangs, so that the tier is bypassed."""
    waiting_bytes: int = 0
    """Bytes of records that are waiting to be copied here from a nearer tier."""


@dataclass(frozen=True)
class TiersStatistics:
    """Statistics of a pool's tiers."""

    tiers: tuple[TierStatistics, ...]
    blocks: BlockCounts
