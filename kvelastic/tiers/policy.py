"""What is written when, how long is waited, and which tier is asked: pure functions.

Plain values in, plain values out: no clock is read here, and no thread waits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

WEIGHT = 0.2
"""Of the newest measurement in a moving average."""
PROBE_AFTER_S = 30.0
"""A tier that was too slow is asked again after so long: it may have been a busy moment."""
AGED_BLOCKS = 64
"""How many of the oldest dirty blocks one look cleans before the pool evicts them as idle."""
BATCHES_A_DEADLINE = 4
"""A batch takes a fourth of the shortest deadline, so that most of it is used."""


class WritePolicy(Enum):
    """When blocks are cleaned. SGLang's names."""

    WRITE_BACK = "write_back"
    """As late as possible: when free and clean blocks run short, when idle, when asked."""
    WRITE_THROUGH = "write_through"
    """As soon as a block is cached."""


class Copies(Enum):
    """In how many tiers a demoted block lies."""

    ALL = "all"
    """Inclusive: in each that takes it. A lower one has it when a nearer one displaces it."""
    FIRST = "first"
    """Exclusive: in the nearest one that takes it, and only there."""


@dataclass(frozen=True)
class Deadlines:
    """How long shrinking waits for copies; what is dirty then is dropped and counted."""

    reclaim_s: float = 0.02
    limit_s: float = 2.0
    sleep_s: float = 30.0

    def of(self, reason: str) -> float:
        """By the reason that the pool gives; an unknown one has the shortest."""
        by_reason: Mapping[str, float] = {"limit": self.limit_s, "sleep": self.sleep_s}
        return by_reason.get(reason, self.reclaim_s)


@dataclass(frozen=True)
class Rules:
    """What the settings say about cleaning."""

    policy: WritePolicy = WritePolicy.WRITE_BACK
    copies: Copies = Copies.ALL
    deadlines: Deadlines = field(default_factory=Deadlines)
    watermark: float = 0.1
    """Part of all blocks that shall be free or clean."""
    idle_after_s: float = 5.0
    cache_idle_s: float = 600.0
    """The pool evicts cached blocks that have been idle for this long."""
    write_bytes_per_s: int | None = None
    """Budget of cleaning ahead; None: no bound."""
    tick_s: float = 0.1
    """How often it looks whether something is to be cleaned ahead."""


@dataclass(frozen=True)
class Occupancy:
    """Blocks of a pool, as policy sees them."""

    used: int
    cached: int
    clean: int
    available: int
    """What alloc could give, evicting as it must."""
    max_cached: int | None = None
    """How many blocks may be cached; None: no bound."""
    oldest_copyable_s: float = 0.0
    """For how long the oldest block that a tier can copy has been cached."""

    @property
    def dirty(self) -> int:
        """Cached blocks that have no copy."""
        return max(0, self.cached - self.clean)

    @property
    def spare(self) -> int:
        """What alloc could take without losing anything: free and clean blocks."""
        return max(0, self.available - self.dirty)

    @property
    def total(self) -> int:
        """All that the pool may hold now."""
        return self.used + self.available


def blocks_to_clean(
    policy: WritePolicy,
    occupancy: Occupancy,
    *,
    watermark: float,
    idle_s: float,
    idle_after_s: float,
    cache_idle_s: float,
    affordable: int,
) -> int:
    """Return how many of the oldest dirty blocks to clean ahead of need.

    `watermark` is the part of all blocks, and of the blocks that may be cached, that is kept free
    or clean, 0 to 1. `affordable` is what the write budget allows.
    """
    if policy is WritePolicy.WRITE_THROUGH or idle_s >= idle_after_s:
        wanted = occupancy.dirty
    else:
        # Rounded up: below one block's worth there would never be anything to do.
        wanted = math.ceil(watermark * occupancy.total) - occupancy.spare
        if occupancy.max_cached is not None:
            headroom = occupancy.max_cached - occupancy.dirty
            wanted = max(wanted, math.ceil(watermark * occupancy.max_cached) - headroom)
        if occupancy.oldest_copyable_s >= cache_idle_s / 2:
            wanted = max(wanted, AGED_BLOCKS)
    return max(0, min(wanted, occupancy.dirty, affordable))


def refilled(
    level_bytes: float, elapsed_s: float, *, rate_bytes_per_s: int, burst_bytes: int
) -> float:
    """A write budget after `elapsed_s`: it fills at its rate, and holds one burst at most."""
    return min(float(burst_bytes), level_bytes + elapsed_s * rate_bytes_per_s)


def averaged(before: float | None, new: float, weight: float = WEIGHT) -> float:
    """A moving average with one more measurement; the first one is taken as it is."""
    return new if before is None else before + weight * (new - before)


def is_worth_asking(load_s: float | None, compute_s: float | None, *, unasked_s: float) -> bool:
    """Whether a tier that takes `load_s` for a block beats computing it in `compute_s`.

    What was never measured (None) is asked: there is no other way to learn. One that lost is asked
    again after `PROBE_AFTER_S` without a question.
    """
    if load_s is None or compute_s is None or load_s < compute_s:
        return True
    return unasked_s >= PROBE_AFTER_S


def batch_blocks(
    record_bytes: int, bytes_per_s: float | None, *, deadline_s: float, slots: int
) -> int:
    """How many blocks one demotion copies at once, so that it fits well into the deadline.

    Half of the staging slots at most: one batch is copied while another is put.
    """
    most = max(1, slots // 2)
    if bytes_per_s is None:
        return min(most, 4)
    fitting = int(bytes_per_s * deadline_s / BATCHES_A_DEADLINE / max(1, record_bytes))
    return max(1, min(most, fitting))
