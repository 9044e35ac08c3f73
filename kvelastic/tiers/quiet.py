"""How long a store leaves a medium alone that has failed: longer after each failure in a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

FIRST_S: Final = 0.25
MOST_S: Final = 60.0


class Quiet:
    """One kind of call to one medium. Its owner's lock guards it.

    `clock` answers seconds that never go back. Doubles from `first_s` up to `most_s`, so a medium
    that is well again is found to be so within that time.
    """

    def __init__(
        self, clock: Callable[[], float], first_s: float = FIRST_S, most_s: float = MOST_S
    ) -> None:
        self._clock = clock
        self._first_s = first_s
        self._most_s = most_s
        self._next_s = first_s
        self._until_s = float("-inf")

    @property
    def is_over(self) -> bool:
        """Whether the medium may be called now."""
        return self._clock() >= self._until_s

    def failed(self) -> None:
        """It failed; calls that were under way together count once."""
        if self.is_over:
            self._until_s = self._clock() + self._next_s
            self._next_s = min(2 * self._next_s, self._most_s)

    def worked(self) -> None:
        """It worked; the next failure is a first one."""
        self._until_s = float("-inf")
        self._next_s = self._first_s
