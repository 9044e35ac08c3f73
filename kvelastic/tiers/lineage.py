"""Which key continues which: what a store needs to evict the ends of prompts first.

    lineage.note(keys)               # of one prompt, from its first block on; O(1)
    lineage.parents(keys)            # for blocks that leave, in whatever order

The engine knows prompts when it looks them up, and the pool knows only blocks when they leave. What
was noted is unpacked here when somebody asks, not on the path of a lookup. Bounded: the oldest
prompts are forgotten first, and a key that is not known begins a prompt. Any thread.
"""

from __future__ import annotations

import threading
from collections import deque

from kvelastic.tiers.base import KEY_BYTES, NO_KEY

MOST_KEYS = 1 << 18
"""4 MiB of prompts that wait, and as many keys unpacked."""


class Lineage:
    """See the module."""

    def __init__(self, most_keys: int = MOST_KEYS) -> None:
        self._most_keys = most_keys
        self._lock = threading.Lock()
        self._noted: deque[tuple[bytes, bytes]] = deque()
        self._noted_keys = 0
        self._parents: dict[bytes, bytes] = {}

    def note(self, keys: bytes, after: bytes = NO_KEY) -> None:
        """These continue one another, and the first one continues `after`. Copies nothing."""
        if not keys:
            return
        with self._lock:
            self._noted.append((keys, after))
            self._noted_keys += len(keys) // KEY_BYTES
            while self._noted_keys > self._most_keys and len(self._noted) > 1:
                oldest, _ = self._noted.popleft()
                self._noted_keys -= len(oldest) // KEY_BYTES

    def parents(self, keys: bytes) -> list[bytes]:
        """For each key the one that it continues; NO_KEY where that is not known."""
        with self._lock:
            self._unpack()
            get = self._parents.get
            return [get(keys[at : at + KEY_BYTES], NO_KEY) for at in range(0, len(keys), KEY_BYTES)]

    def _unpack(self) -> None:
        while self._noted:
            keys, parent = self._noted.popleft()
            for at in range(0, min(len(keys), self._most_keys * KEY_BYTES), KEY_BYTES):
                key = keys[at : at + KEY_BYTES]
                # Named last, so that the oldest are in front.
                self._parents.pop(key, None)
                self._parents[key] = parent
                parent = key
        self._noted_keys = 0
        while len(self._parents) > self._most_keys:
            del self._parents[next(iter(self._parents))]


def in_order(keys: list[bytes], parents: list[bytes]) -> list[int]:
    """Places of `keys` such that each stands right behind the one that it continues, if that is
    among them: a store then takes runs of them at once. Linear.
    """
    place = {key: at for at, key in enumerate(keys)}
    children: dict[int, list[int]] = {}
    roots = []
    for at, parent in enumerate(parents):
        above = place.get(parent)
        if above is None or above == at:
            roots.append(at)
        else:
            children.setdefault(above, []).append(at)
    order: list[int] = []
    seen = [False] * len(keys)
    stack = roots[::-1]
    while stack:
        at = stack.pop()
        if seen[at]:
            continue
        seen[at] = True
        order.append(at)
        stack.extend(children.get(at, [])[::-1])
    # What continues itself in a circle is no prompt; it is stored all the same.
    return order + [at for at in range(len(keys)) if not seen[at]]
