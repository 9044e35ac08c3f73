"""Wait for what another thread or process does in its own time.

until(lambda: one.mapped_bytes == 0, "the keeper has given everything back")
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")

DEADLINE_S = 60.0
"""Far beyond what anything takes here: only a fault meets it."""
_INTERVAL_S = 0.001


def until(condition: Callable[[], Value], what: str = "", deadline_s: float = DEADLINE_S) -> Value:
    """Ask until the answer is true, and return it. `what` is for the failure's message."""
    end_s = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end_s, what or "it did not come true"
        time.sleep(_INTERVAL_S)
    return value
