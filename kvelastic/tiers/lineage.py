"""Records which key continues which, so that stores can evict the ends of prompts first.

    lineage.note(keys)               # of one prompt, from its first block on; O(1)
    lineage.parents(keys)            # of blocks to demote, in any order

The engine knows the prompts when it looks them up. The pool knows only single blocks when it
demotes them. `note` stores the prompt, and `parents` unpacks it later, so that a lookup stays fast.
The size is bounded: the oldest prompts are forgotten first. An unknown key counts as the beginning
of a prompt. Thread-safe.
"""

from __future__ import annotations

import threading
from collections import deque

from kvelastic.tiers.base import KEY_BYTES, NO_KEY, each_key

MOST_KEYS = 1 << 18
"""Default bound of the keys in noted prompts (4 MiB), and of the unpacked keys."""


class Lineage:
    """The parent of each recent key. Thread-safe."""

    def __init__(self, most_keys: int = MOST_KEYS) -> None:
        self._most_keys = most_keys
        self._lock = threading.Lock()
        self._noted: deque[tuple[bytes, bytes]] = deque()
        self._noted_keys = 0
        self._parents: dict[bytes, bytes] = {}

    def note(self, keys: bytes, after: bytes = NO_KEY) -> None:
        """Record that each key continues the previous one, and the first one continues `after`.

        Does not copy `keys`.
        """
        if not keys:
            return
        with self._lock:
            self._noted.append((keys, after))
            self._noted_keys += len(keys) // KEY_BYTES
            while self._noted_keys > self._most_keys and len(self._noted) > 1:
                oldest, _ = self._noted.popleft()
                self._noted_keys -= len(oldest) // KEY_BYTES

    def parents(self, keys: bytes) -> list[bytes]:
        """Return for each key the key that it continues, or NO_KEY if that is unknown."""
        with self._lock:
            self._unpack()
            get = self._parents.get
            return [get(key, NO_KEY) for key in each_key(keys)]

    def _unpack(self) -> None:
        while self._noted:
            keys, parent = self._noted.popleft()
            for at in range(0, min(len(keys), self._most_keys * KEY_BYTES), KEY_BYTES):
                key = keys[at : at + KEY_BYTES]
                # Reinsert at the end, so that the oldest keys come first.
                self._parents.pop(key, None)
                self._parents[key] = parent
                parent = key
        self._noted_keys = 0
        while len(self._parents) > self._most_keys:
            del self._parents[next(iter(self._parents))]


def in_order(keys: list[bytes], parents: list[bytes]) -> list[int]:
    """Return indices of `keys` in an order in which each key follows its parent, if present.

    A store can then take whole chains in one call. Linear.
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
    # Keys in a cycle form no prompt, but are stored anyway.
    return order + [at for at in range(len(keys)) if not seen[at]]
