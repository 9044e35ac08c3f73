"""Measured costs: seconds to load a block from each tier, and seconds to compute one.

    costs = Costs(tiers=2)
    costs.loaded(1, blocks=8, seconds=0.02); costs.computed(blocks=50, seconds=3.4)
    costs.worth_asking(1)

`policy.is_worth_asking` compares them. Thread-safe.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvelastic.tiers.policy import averaged, is_worth_asking


class Costs:
    """Moving averages, in seconds per block. Thread-safe."""

    def __init__(self, tiers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._load_s: list[float | None] = [None] * tiers
        self._asked_s = [clock()] * tiers
        self._compute_s: float | None = None

    def loaded(self, tier: int, blocks: int, seconds: float) -> None:
        """Record that a tier loaded `blocks` blocks into staging in `seconds`."""
        if blocks > 0:
            with self._lock:
                self._load_s[tier] = averaged(self._load_s[tier], seconds / blocks)

    def computed(self, blocks: int, seconds: float) -> None:
        """Record that the engine computed `blocks` blocks in `seconds`."""
        if blocks > 0:
            with self._lock:
                self._compute_s = averaged(self._compute_s, seconds / blocks)

    def worth_asking(self, tier: int) -> bool:
        """Return whether loading from the tier is faster than computing, or unknown.

        If True, records the time as that of the tier's last query.
        """
        with self._lock:
            now_s = self._clock()
            is_worth = is_worth_asking(
                self._load_s[tier], self._compute_s, unasked_s=now_s - self._asked_s[tier]
            )
            if is_worth:
                self._asked_s[tier] = now_s
            return is_worth

    def load_s(self, tier: int) -> float | None:
        """Return the seconds to load a block from the tier; None before the first load."""
        with self._lock:
            return self._load_s[tier]

    @property
    def compute_s(self) -> float | None:
        """Seconds to compute a block; None before the first measurement."""
        with self._lock:
            return self._compute_s
