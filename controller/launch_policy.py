"""When to start an engine again: pure rules over what has happened."""

from __future__ import annotations

from dataclasses import dataclass

STEADY_S = 60.0
"""An engine that served for so long has not failed in a row."""


@dataclass
class Restarts:
    """How often an engine has failed in a row, and what follows of it."""

    first_s: float
    most_s: float
    in_a_row: int = 0

    def ended(self, served_s: float) -> float:
        """It has ended after serving so long; returns how long to wait before the next start."""
        if served_s >= STEADY_S:
            self.in_a_row = 0
        wait_s = min(self.most_s, self.first_s * 2.0 ** min(self.in_a_row, 30))
        self.in_a_row += 1
        return wait_s
