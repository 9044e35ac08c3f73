"""Which keys a tier has, without waiting for a medium that does not answer.

Stores with an index in memory are asked at once. Those that ask a file system of other machines, or
a server, are asked in a thread of their own, and count as empty when they take longer than a
request may be kept waiting for a perhaps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvelastic.tiers.base import KEY_BYTES, Lease, Store
from kvelastic.tiers.deadline_worker import DeadlineWorker
from kvelastic.tiers.plan import Segment, nearest

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

    def hold_leading(
        self, keys: bytes, may_ask: Callable[[int], bool]
    ) -> tuple[list[Segment], list[Lease]]:
        """The leading keys that are anywhere, each in the nearest tier that has it, and held there.

        Tiers that `may_ask` denies are left out.
        """
        held: list[Segment] = []
        leases: list[Lease] = []
        for segment in self._segments(keys, may_ask):
            end = segment.first + segment.count
            lease = self.hold(segment.tier, keys[segment.first * KEY_BYTES : end * KEY_BYTES])
            leases.append(lease)
            if lease.count:
                held.append(Segment(segment.tier, segment.first, lease.count))
            # Less than was there a moment ago: it was displaced, and what follows is of no use.
            if lease.count < segment.count:
                break
        return held, leases

    def _segments(self, keys: bytes, may_ask: Callable[[int], bool]) -> list[Segment]:
        """Who has what: mostly the nearest has all of it, or there is no other."""
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
        """What each tier has; a farther one is asked only for what the nearer ones lack."""
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
                asked = b"".join(keys[at * KEY_BYTES : (at + 1) * KEY_BYTES] for at in missing)
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
        """End the threads; one that hangs is left behind. Repeatable."""
        for worker in self._workers.values():
            worker.close(timeout_s)
