"""A store that fails as stores do: a write that fails stores nothing, a failed read is a miss.

failing = FailingStore(inner)
failing.fail_at(3)         # the third record from now on that is written or read; 0: none
failing.fail_all(True)     # every one, until it is told otherwise
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

from kvelastic.tiers.base import KEY_BYTES, Capacity, Hold, Selection, Store, StoreStatistics
from kvelastic.tiers.namespace import Namespace


class FailingStore(Store):
    """`inner`, with a medium in front of it that can be broken."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.name = inner.name
        self.record_bytes = inner.record_bytes
        self.calls = 0
        self._fail_at = 0
        self._fails_all = False
        self._lock = threading.Lock()
        self._refused = self._misses = self._errors = 0

    def fail_at(self, turn: int) -> None:
        """The turn-th record from now on that is written or read is not."""
        self.calls, self._fail_at = 0, turn

    def fail_all(self, fails: bool) -> None:
        """Whether none can be written and none can be read."""
        self._fails_all = fails

    def _works(self) -> bool:
        with self._lock:
            self.calls += 1
            fails = self._fails_all or self.calls == self._fail_at
            self._errors += fails
            return not fails

    def enter(self, namespace: Namespace) -> None:
        self.inner.enter(namespace)

    def has(self, keys: bytes) -> list[bool]:
        return self.inner.has(keys)

    def hold(self, keys: bytes) -> Hold:
        return self.inner.hold(keys)

    def put(
        self, keys: bytes, records: Sequence[memoryview], *, chain_after: bytes | None = None
    ) -> list[bool]:
        """Puts those whose write works; a chain goes on behind one that did not."""
        count = self._count_of(keys, records, chain_after)
        there = self.inner.has(keys)
        works = [there[at] or self._works() for at in range(count)]
        stored = [False] * count
        for at in range(count):
            key = keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]
            after = chain_after
            if chain_after is not None and at:
                after = keys[(at - 1) * KEY_BYTES : at * KEY_BYTES]
            if works[at]:
                (stored[at],) = self.inner.put(key, [records[at]], chain_after=after)
            else:
                with self._lock:
                    self._refused += 1
        return stored

    def get(self, keys: bytes, into: Sequence[memoryview]) -> list[bool]:
        """What cannot be read is a miss, and leaves its view half written."""
        count = self._count_of(keys, into)
        found = []
        for at in range(count):
            key = keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]
            if self._works():
                found += self.inner.get(key, [into[at]])
                continue
            into[at].cast("B")[: self.record_bytes // 2] = b"\xdd" * (self.record_bytes // 2)
            found.append(False)
            with self._lock:
                self._misses += 1
        return found

    def erase(self, keys: bytes) -> int:
        return self.inner.erase(keys)

    def erase_matching(self, selection: Selection) -> int:
        return self.inner.erase_matching(selection)

    def capacity(self) -> Capacity:
        return self.inner.capacity()

    def set_limit(self, limit_bytes: int) -> None:
        self.inner.set_limit(limit_bytes)

    def statistics(self) -> StoreStatistics:
        done = self.inner.statistics()
        with self._lock:
            return replace(
                done,
                refused=done.refused + self._refused,
                misses=done.misses + self._misses,
                errors=done.errors + self._errors,
            )

    def check_integrity(self) -> None:
        self.inner.check_integrity()

    def close(self) -> None:
        self.inner.close()
