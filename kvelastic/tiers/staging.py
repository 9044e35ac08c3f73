"""Allocates staging slots.

    slots = StagingSlots(memory.slots)
    held = slots.take(8)                 # all or none
    ...
    slots.give_back(held)

Slots are few. To prevent deadlock, a caller gets all requested slots at once or none. Thread-safe.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from kvelastic.errors import IntegrityError, InvalidArgumentError


class StagingSlots:
    """A fixed set of slot numbers. Thread-safe."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise InvalidArgumentError(
                f"{count} staging slots cannot hold a record; give 1 or more"
            )
        self.count = count
        self._changed = threading.Condition()
        self._free = list(range(count - 1, -1, -1))
        self._is_free = bytearray(b"\1" * count)

    def take(self, count: int, timeout_s: float = 0.0) -> list[int] | None:
        """Take `count` slots. Returns None if that many are not free within `timeout_s`.

        Blocks for at most `timeout_s`. Raises `InvalidArgumentError` if `count` exceeds the total
        number of slots.
        """
        if not 0 <= count <= self.count:
            raise InvalidArgumentError(
                f"{count} staging slots of {self.count} were asked for; take fewer at once"
            )
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while len(self._free) < count:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return None
                self._changed.wait(left_s)
            taken = [self._free.pop() for _ in range(count)]
            for slot in taken:
                self._is_free[slot] = 0
            return taken

    def give_back(self, slots: Sequence[int]) -> None:
        """Release slots. Raises `IntegrityError`, and releases none, if one was not taken."""
        with self._changed:
            are_taken = all(0 <= slot < self.count and not self._is_free[slot] for slot in slots)
            if not are_taken or len(set(slots)) != len(slots):
                raise IntegrityError(
                    f"staging slots {list(slots)} were given back; some were not taken, or twice"
                )
            for slot in slots:
                self._is_free[slot] = 1
            self._free.extend(slots)
            self._changed.notify_all()

    @property
    def free(self) -> int:
        """Number of free slots."""
        with self._changed:
            return len(self._free)

    def check_integrity(self) -> None:
        """Raises `IntegrityError` if the free list and the free marks differ."""
        with self._changed:
            marked = [slot for slot in range(self.count) if self._is_free[slot]]
            if sorted(self._free) != marked:
                raise IntegrityError(
                    f"staging slots {sorted(self._free)} are in the list, {marked} are marked free"
                )
