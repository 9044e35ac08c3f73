"""Policy: when blocks are cleaned, and how long shrinking waits.

Pure functions of their arguments. They read no clock and never wait.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

AGED_BLOCKS = 64
"""How many of the oldest dirty blocks one tick cleans before the pool evicts them as idle."""
BATCHES_A_DEADLINE = 4
"""Batches that fit into a deadline, so that most of it is used."""


class WritePolicy(Enum):
    """When blocks are cleaned. The names are SGLang's."""

    WRITE_BACK = "write_back"
    """As late as possible: when free and clean blocks run short, when idle, or on request."""
    WRITE_THROUGH = "write_through"
    """As soon as a block is cached."""


class Copies(Enum):
    """In how many tiers a demoted block is stored."""

    ALL = "all"
    """Inclusive: in every tier that accepts it. Farther tiers keep it if a nearer one evicts it."""
    FIRST = "first"
    """Exclusive: only in the nearest tier that accepts it."""


@dataclass(frozen=True)
class Rules:
    """The settings for cleaning blocks."""

    policy: WritePolicy = WritePolicy.WRITE_BACK
    copies: Copies = Copies.ALL
    reclaim_s: float = 0.02
    """How long a pool that shrinks for others waits for copies, before it drops dirty blocks."""
    limit_s: float = 2.0
    """How long a pool waits for copies after its limit was lowered."""
    sleep_s: float = 30.0
    """How long a pool waits for copies before it sleeps."""
    watermark: float = 0.1
    """Fraction (0 to 1) of the pool's blocks to keep free or clean."""
    idle_after_s: float = 5.0
    """The pool counts as idle after this long without an allocation or release."""
    cache_idle_s: float = 600.0
    """The pool evicts cached blocks that have been idle for this long."""
    write_bytes_per_s: int | None = None
    """Write budget for cleaning ahead of need; None: no limit."""
    tick_s: float = 0.1
    """Interval at which the demoter checks whether to clean ahead of need."""

    def deadline_s(self, reason: str) -> float:
        """Return how long shrinking waits for copies. An unknown reason gets `reclaim_s`."""
        return {"limit": self.limit_s, "sleep": self.sleep_s}.get(reason, self.reclaim_s)


@dataclass(frozen=True)
class Occupancy:
    """Block counts of a pool."""

    used: int
    cached: int
    clean: int
    available: int
    """Blocks that alloc could return, with eviction."""
    max_cached: int | None = None
    """Maximum number of cached blocks; None: no limit."""
    oldest_copyable_s: float = 0.0
    """How long the oldest block that a tier can copy has been cached."""

    @property
    def dirty(self) -> int:
        """Cached blocks that have no copy."""
        return max(0, self.cached - self.clean)

    @property
    def spare(self) -> int:
        """Blocks that alloc could return without losing data: free and clean blocks."""
        return max(0, self.available - self.dirty)

    @property
    def total(self) -> int:
        """Blocks that the pool may hold now."""
        return self.used + self.available


def blocks_to_clean(rules: Rules, occupancy: Occupancy, *, idle_s: float, affordable: int) -> int:
    """Return how many of the oldest dirty blocks to clean ahead of need.

    The watermark is the part of the blocks to keep free or clean, and the part of `max_cached` to
    keep free of dirty blocks. `idle_s` is how long the pool has been idle. `affordable` is how many
    blocks the write budget allows.
    """
    if rules.policy is WritePolicy.WRITE_THROUGH or idle_s >= rules.idle_after_s:
        wanted = occupancy.dirty
    else:
        # Round up: otherwise a small pool would never clean ahead.
        wanted = math.ceil(rules.watermark * occupancy.total) - occupancy.spare
        if occupancy.max_cached is not None:
            headroom = occupancy.max_cached - occupancy.dirty
            wanted = max(wanted, math.ceil(rules.watermark * occupancy.max_cached) - headroom)
        if occupancy.oldest_copyable_s >= rules.cache_idle_s / 2:
            wanted = max(wanted, AGED_BLOCKS)
    return max(0, min(wanted, occupancy.dirty, affordable))


def refilled(
    level_bytes: float, elapsed_s: float, *, rate_bytes_per_s: int, burst_bytes: int
) -> float:
    """Return the bytes in a write budget after `elapsed_s`, at most `burst_bytes`."""
    return min(float(burst_bytes), level_bytes + elapsed_s * rate_bytes_per_s)


def batch_blocks(
    record_bytes: int, bytes_per_s: float | None, *, deadline_s: float, slots: int
) -> int:
    """Return how many blocks one writeback copies, so that several fit into the deadline.

    `bytes_per_s` is the measured rate, or None. At most half of the staging slots, so that one
    batch can be copied while another is written.
    """
    most = max(1, slots // 2)
    if bytes_per_s is None:
        return min(most, 4)
    fitting = int(bytes_per_s * deadline_s / BATCHES_A_DEADLINE / max(1, record_bytes))
    return max(1, min(most, fitting))
