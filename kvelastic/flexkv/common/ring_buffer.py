"""The last few of something, in a fixed number of places.

recent: RingBuffer[str] = RingBuffer(100)
recent.append("..."); recent.snapshot(); recent.dropped
"""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

from kvelastic.errors import InvalidArgumentError

_T = TypeVar("_T")


class RingBuffer(Generic[_T]):
    """Items in the order they came; a full ring lets go of its oldest. Any thread; never blocks."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise InvalidArgumentError(f"a ring of {capacity} places holds nothing; give 1 or more")
        self.capacity = capacity
        self._lock = threading.Lock()
        self._items: list[_T] = []
        self._next = 0
        self._dropped = 0

    def append(self, item: _T) -> None:
        """Take an item in."""
        with self._lock:
            if len(self._items) < self.capacity:
                self._items.append(item)
                return
            self._items[self._next] = item
            self._next = (self._next + 1) % self.capacity
            self._dropped += 1

    def snapshot(self) -> list[_T]:
        """All that are there, the oldest first."""
        with self._lock:
            return self._items[self._next :] + self._items[: self._next]

    def take_all(self) -> list[_T]:
        """The same; it is empty then."""
        with self._lock:
            taken = self._items[self._next :] + self._items[: self._next]
            self._items, self._next = [], 0
            return taken

    @property
    def dropped(self) -> int:
        """How many it has let go of for newer ones."""
        with self._lock:
            return self._dropped

    def __len__(self) -> int:
        with self._lock:
            return len(self._items)
