"""Tracks which steps of an engine are in flight, and what waits for them to end.

An engine may schedule a step before the previous one has ended. A request that ends or is preempted
then gives back blocks that a step may still write to. In a stock engine this is safe: the next
user's writes follow in the same stream. Here the page could be unmapped, or the contents moved,
during that step. So the native pool pins the blocks (vmm_csrc/pool/pins.h) until every step that
was in flight when they were given back has ended. Such a pin is *ordered*: the engine may take the
blocks again at once::

    schedule 7 | schedule 8 | 7 ends: request gives block 5 back | 8 ends: block 5 is free
                              (pinned: step 8 is in flight)

Pure bookkeeping; used by the scheduler's thread only.
"""

from __future__ import annotations

from collections import deque


class StepsOnTheirWay:
    """Steps that are scheduled and have not ended. They end in the order in which they began."""

    def __init__(self) -> None:
        self._newest = 0
        self._newest_at_work = 0
        self._ended = 0

    def begin(self, *, works: bool = True) -> int:
        """A step was scheduled; returns its number, 1 or more. An empty one has no work to do."""
        self._newest += 1
        if works:
            self._newest_at_work = self._newest
        return self._newest

    def works(self, step: int) -> None:
        """The newest step has work after all."""
        self._newest_at_work = step

    @property
    def is_at_work(self) -> bool:
        """Whether a step that has work to do is on its way."""
        return self._newest_at_work > self._ended

    def end(self, step: int) -> None:
        """`step` and all earlier ones have been executed."""
        self._ended = max(self._ended, step)

    @property
    def newest(self) -> int:
        """The newest step that is on its way; 0: none is."""
        return self._newest if self._newest > self._ended else 0

    @property
    def next(self) -> int:
        """The number of the step that is scheduled next."""
        return self._newest + 1

    @property
    def ended(self) -> int:
        """The newest step that has ended."""
        return self._ended


class PinsOfSteps:
    """Tickets of pins, each with the step after which it ends."""

    def __init__(self) -> None:
        self._tickets: deque[tuple[int, int]] = deque()

    def __len__(self) -> int:
        return len(self._tickets)

    def add(self, step: int, ticket: int) -> None:
        """End the pin with `step`, which must not be older than that of an earlier pin."""
        self._tickets.append((step, ticket))

    def take_ended(self, step: int) -> list[int]:
        """Take the tickets of pins that end with `step` or an earlier one."""
        ended = []
        while self._tickets and self._tickets[0][0] <= step:
            ended.append(self._tickets.popleft()[1])
        return ended
