"""Which keys a tier has, without waiting for a medium that does not answer.

Stores with an index in memory are asked at once. Those that ask a file system of other machines, or
a server, are asked in a thread of their own, and count as empty when they take longer than a
request may be kept waiting for a perhaps.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvelastic.tiers.base import KEY_BYTES, Lease, Store
from kvelastic.tiers.deadline_worker import DeadlineWorker

PATIENCE_S = 0.02


class NoHold(Lease):
    """Keys that were there when they were asked for; nothing keeps them."""

    def __init__(self, count: int) -> None:
        self.count = count

    def release(self) -> None:
        """Nothing is held."""


class Lookup:
    """See the module. Any thread."""

    def __init__(self, stores: Sequence[Store], patience_s: float = PATIENCE_S) -> None:
        self._stores = tuple(stores)
        self._patience_s = patience_s
        self._workers = {
            tier: DeadlineWorker(f"kvelastic-ask-{store.name}"[:15])
            for tier, store in enumerate(stores)
            if store.asks_medium
        }

    def has(self, tier: int, keys: bytes) -> list[bool]:
        """As `Store.has`; all False where the answer is late."""
        store = self._stores[tier]
        worker = self._workers.get(tier)
        if worker is None:
            return store.has(keys)
        try:
            return worker.run(lambda: store.has(keys), self._patience_s)
        except TimeoutError:
            return [False] * (len(keys) // KEY_BYTES)

    def hold(self, tier: int, keys: bytes) -> Lease:
        """A lease of keys that were found just now; none where a store cannot promise anything."""
        if tier in self._workers:
            return NoHold(len(keys) // KEY_BYTES)
        return self._stores[tier].lease(keys)

    def close(self, timeout_s: float) -> None:
        """End the threads; one that hangs is left behind. Repeatable."""
        for worker in self._workers.values():
            worker.close(timeout_s)
