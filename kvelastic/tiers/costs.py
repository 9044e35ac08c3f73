"""Measured costs: seconds to load a block from each tier, and seconds to compute one.

    costs = Costs(tiers=2)
    costs.loaded(1, blocks=8, seconds=0.02); costs.computed(blocks=50, seconds=3.4)
    costs.worth_asking(1), costs.worth_writing(1)

Thread-safe.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

WEIGHT = 0.2
"""Weight of the newest measurement in a moving average."""
PROBE_AFTER_S = 30.0
"""Time after which a tier that was too slow is queried again, since the load may have dropped."""


def averaged(before: float | None, new: float) -> float:
    """Return the moving average after a new measurement. `before` None: return `new`."""
    return new if before is None else before + WEIGHT * (new - before)


class Costs:
    """Moving averages, in seconds per block. Thread-safe."""

    def __init__(self, tiers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._load_s: list[float | None] = [None] * tiers
        self._asked_s = [clock()] * tiers
        self._written_s = [clock()] * tiers
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
        """Return whether loading from the tier is faster than computing.

        Also True if either was not measured yet, so that it will be, and if the tier has not been
        queried for `PROBE_AFTER_S`. If True, records the time as that of the tier's last query.
        """
        return self._is_worth(tier, self._asked_s)

    def worth_writing(self, tier: int) -> bool:
        """Return whether to write to the tier: as `worth_asking`, with a separate last query.

        With a common one, writes, which measure no load, would leave no query to the requests.
        """
        return self._is_worth(tier, self._written_s)

    def _is_worth(self, tier: int, last_s: list[float]) -> bool:
        with self._lock:
            now_s = self._clock()
            load_s, compute_s = self._load_s[tier], self._compute_s
            is_faster = load_s is None or compute_s is None or load_s < compute_s
            is_worth = is_faster or now_s - last_s[tier] >= PROBE_AFTER_S
            if is_worth:
                last_s[tier] = now_s
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
