"""Finds which keys each tier has, with a timeout for slow media.

Stores with an index in memory are queried directly. Stores that use a shared file system or a
server are queried in a separate thread. If such a query takes longer than `PATIENCE_S`, the store
counts as empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvelastic.tiers.base import KEY_BYTES, Hold, Store, keys_at
from kvelastic.tiers.workers import Workers

PATIENCE_S = 0.02
"""How long a request waits for a lookup in a store that may have nothing."""


@dataclass(frozen=True)
class Segment:
    """Consecutive keys that one tier has."""

    tier: int
    first: int
    count: int


def nearest(found: Sequence[Sequence[bool]]) -> list[Segment]:
    """Return the leading keys that are in any tier, each in the nearest tier that has it.

    `found[tier][key]` is whether a tier has a key. All rows have the same length. Linear.
    """
    if not found:
        return []
    segments: list[Segment] = []
    count = len(found[0])
    # The next True in each row, from `at` on. `list.index` skips long runs without a step of
    # Python for each key.
    next_true = [_next(row, True, 0) for row in found]
    at = 0
    while at < count:
        tier = next((tier for tier, there in enumerate(next_true) if there == at), None)
        if tier is None:
            break
        end = min([_next(found[tier], False, at), *next_true[:tier]])
        segments.append(Segment(tier, at, end - at))
        at = end
        for other, row in enumerate(found):
            if next_true[other] < at:
                next_true[other] = _next(row, True, at)
    return segments


def _next(row: Sequence[bool], value: bool, at: int) -> int:
    """Return the first index from `at` on with `value`, or the length of the row."""
    try:
        return row.index(value, at)
    except ValueError:
        return len(row)


class Lookup:
    """Lookups in all stores of one pool. Thread-safe."""

    def __init__(self, stores: Sequence[Store], patience_s: float = PATIENCE_S) -> None:
        self._stores = tuple(stores)
        self._patience_s = patience_s
        self._workers = {
            tier: Workers(f"kvelastic-ask-{store.name}"[:15])
            for tier, store in enumerate(stores)
            if store.asks_medium
        }

    def has(self, tier: int, keys: bytes) -> list[bool]:
        """Return for each key whether the tier has it. All False on timeout."""
        store = self._stores[tier]
        worker = self._workers.get(tier)
        if worker is None:
            return store.has(keys)
        try:
            return worker.run(lambda: store.has(keys), self._patience_s)
        except TimeoutError:
            return [False] * (len(keys) // KEY_BYTES)

    def hold_leading(
        self, keys: bytes, may_ask: Callable[[int], bool]
    ) -> tuple[list[Segment], list[Hold]]:
        """Find and hold the leading keys that are in any tier, each in the nearest tier with it.

        Skips tiers for which `may_ask` returns False.
        """
        held: list[Segment] = []
        holds: list[Hold] = []
        for segment in self._segments(keys, may_ask):
            found = keys_at(keys, segment.first, segment.count)
            # A store that uses a file system or a server protects nothing, so it is not asked.
            is_asked = segment.tier in self._workers
            hold = Hold(segment.count) if is_asked else self._stores[segment.tier].hold(found)
            holds.append(hold)
            if hold.count:
                held.append(Segment(segment.tier, segment.first, hold.count))
            # Some records were evicted since the lookup, so the keys after them are useless.
            if hold.count < segment.count:
                break
        return held, holds

    def _segments(self, keys: bytes, may_ask: Callable[[int], bool]) -> list[Segment]:
        """Return the segments of leading keys.

        Takes a fast path if the nearest tier has all keys or is the only tier.
        """
        store = self._stores[0] if self._stores else None
        if store is None or store.asks_medium or not may_ask(0):
            return nearest(self.find(keys, may_ask))
        ready, _ = store.leading(keys)
        lead = [Segment(0, 0, ready)] if ready else []
        if len(self._stores) == 1 or ready * KEY_BYTES == len(keys):
            return lead
        rest = nearest(self.find(keys[ready * KEY_BYTES :], may_ask))
        return lead + [Segment(each.tier, each.first + ready, each.count) for each in rest]

    def find(self, keys: bytes, may_ask: Callable[[int], bool]) -> list[list[bool]]:
        """Return, for each tier and key, whether the tier has the key.

        A farther tier is queried only for keys that the nearer tiers lack.
        """
        count = len(keys) // KEY_BYTES
        found: list[list[bool]] = []
        missing = list(range(count))
        for tier in range(len(self._stores)):
            row = [False] * count
            found.append(row)
            if not missing or not may_ask(tier):
                continue
            if len(missing) == count:
                answers = found[tier] = self.has(tier, keys)
            else:
                asked = b"".join(keys_at(keys, at) for at in missing)
                answers = self.has(tier, asked)
                for at, is_there in zip(missing, answers, strict=True):
                    row[at] = is_there
            missing = (
                [at for at, is_there in zip(missing, answers, strict=True) if not is_there]
                if False in answers
                else []
            )
        return found

    def close(self, timeout_s: float) -> None:
        """Stop the threads. Idempotent. Waits at most `timeout_s` each, then abandons a thread."""
        for worker in self._workers.values():
            worker.close(timeout_s)
