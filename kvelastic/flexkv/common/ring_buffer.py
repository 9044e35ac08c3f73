"""The last items of a sequence."""

from __future__ import annotations

from collections import deque
from typing import TypeVar

_T = TypeVar("_T")


class RingBuffer(deque[_T]):
    """A deque of at most `capacity` items, which drops its oldest one for a new one."""

    def __init__(self, capacity: int) -> None:
        super().__init__(maxlen=capacity)
