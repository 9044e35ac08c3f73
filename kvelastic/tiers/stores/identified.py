"""A wrapper for persistent stores, which stays unused until the engine's weights are identified.

    disk = IdentifiedStore(DiskStore(...))
    disk.enter(namespace)                   # nothing is read or written there yet
    disk.identify(fingerprint)              # from here on it is an ordinary store

Hashing a model's weights takes minutes, but the first request already needs the keys of its blocks.
So the engine's keys and namespaces do not depend on the contents of the weights. This store adds
them. It XORs each key with a mask, which is 16 bytes of the SHA-256 of the fingerprint. It combines
the `weights` of a namespace with the fingerprint. Engines with different weights find each other's
records only if 16 bytes of two SHA-256 digests collide. NO_KEY is not masked.

Until `identify`, the store acts as empty and refuses records. Only operations that concern all
namespaces work: the limit, eviction, and erasure by model and age.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import replace

from kvelastic.tiers.base import (
    KEY_BYTES,
    NO_KEY,
    Capacity,
    Hold,
    Reservation,
    Selection,
    Store,
    StoreStatistics,
    Unerased,
)
from kvelastic.tiers.namespace import Namespace


class IdentifiedStore(Store):
    """A store that maps keys and namespaces of an engine to those of `inner`, and owns `inner`.

    Thread-safe. Unless stated otherwise, methods behave as in `Store` and call `inner`.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner.record_bytes)
        self.inner = inner
        self.name = inner.name
        self.asks_medium = inner.asks_medium
        self.takes_records = inner.takes_records
        self._entering = threading.Lock()
        """Guards the namespace, so that `inner` always has the one entered last."""
        self._namespace: Namespace | None = None
        self._fingerprint = ""
        self._mask = b""
        """Set last by `identify`, when `inner` is in its namespace. Empty until then."""

    def identify(self, fingerprint: str) -> None:
        """Set the fingerprint of the weights, and start to read and write. Call it once."""
        with self._entering:
            self._fingerprint = fingerprint
            if self._namespace is not None:
                self.inner.enter(self._with_weights(self._namespace))
            digest = hashlib.sha256(b"kvelastic weights of keys " + fingerprint.encode())
            self._mask = digest.digest()[:KEY_BYTES]

    @property
    def is_ready(self) -> bool:
        """Whether the weights are identified."""
        return bool(self._mask)

    def enter(self, namespace: Namespace) -> None:
        """Set the namespace. It reaches `inner` once the weights are identified."""
        with self._entering:
            self._namespace = namespace
            if self._fingerprint:
                self.inner.enter(self._with_weights(namespace))

    def has(self, keys: bytes) -> list[bool]:
        """Return whether each record can be read now. All False until `is_ready`."""
        if not self._mask:
            return [False] * self._count_of(keys)
        return self.inner.has(self._masked(keys))

    def leading(self, keys: bytes) -> tuple[int, int]:
        """Return the numbers of readable and of reserved leading keys. (0, 0) until `is_ready`."""
        return self.inner.leading(self._masked(keys)) if self._mask else (0, 0)

    def hold(self, keys: bytes) -> Hold:
        """Hold the leading keys that are stored. Holds none until `is_ready`."""
        return self.inner.hold(self._masked(keys)) if self._mask else Hold()

    def reserve(self, keys: bytes, *, chain_after: bytes | None = None) -> Reservation | None:
        """Reserve slots for missing keys. Until `is_ready`, treats all keys as missing."""
        if not self._mask:
            return Reservation([0] * self._count_of(keys))
        return self.inner.reserve(self._masked(keys), chain_after=self._parent(chain_after))

    def evict(self, count: int) -> int:
        """Evict up to `count` records of any namespace, also before `is_ready`."""
        return self.inner.evict(count)

    def put(
        self, keys: bytes, records: Sequence[memoryview], *, chain_after: bytes | None = None
    ) -> list[bool]:
        """Store records. Stores none until `is_ready`."""
        if not self._mask:
            return [False] * self._count_of(keys, records)
        return self.inner.put(self._masked(keys), records, chain_after=self._parent(chain_after))

    def get(self, keys: bytes, into: Sequence[memoryview]) -> list[bool]:
        """Read records. All misses until `is_ready`."""
        if not self._mask:
            return [False] * self._count_of(keys, into)
        return self.inner.get(self._masked(keys), into)

    def erase(self, keys: bytes) -> int:
        """Erase the records of the given keys. Erases none until `is_ready`."""
        return self.inner.erase(self._masked(keys)) if self._mask else 0

    def erase_matching(self, selection: Selection) -> int:
        """Erase selected records. Until `is_ready`, a selection with a namespace erases none."""
        if selection.namespace is None:
            return self.inner.erase_matching(selection)
        if not self._mask:
            return 0
        own = self._with_weights(selection.namespace)
        return self.inner.erase_matching(replace(selection, namespace=own))

    def unerased(self) -> Unerased:
        """Return which records the last erasures could not remove."""
        return self.inner.unerased()

    def capacity(self) -> Capacity:
        """Return the usage and the limit of `inner`."""
        return self.inner.capacity()

    @property
    def least_limit_bytes(self) -> int:
        """The lowest limit at which `inner` can hold a record."""
        return self.inner.least_limit_bytes

    def set_limit(self, limit_bytes: int) -> None:
        """Set the limit of `inner`, also before `is_ready`."""
        self.inner.set_limit(limit_bytes)

    def statistics(self) -> StoreStatistics:
        """Return the counters of `inner`."""
        return self.inner.statistics()

    def problem(self) -> str:
        """Return why the medium refuses calls now; empty if it works."""
        return self.inner.problem()

    def write_budget(self) -> tuple[int, int] | None:
        """Return the daily write budget of `inner` and the rest of it, or None."""
        return self.inner.write_budget()

    def check_integrity(self) -> None:
        """Check `inner`. Raises `IntegrityError` for a mismatch."""
        self.inner.check_integrity()

    def close(self) -> None:
        """Close `inner`. Idempotent."""
        self.inner.close()

    def _with_weights(self, namespace: Namespace) -> Namespace:
        both = f"{len(namespace.weights)}:{namespace.weights}{self._fingerprint}"
        return replace(namespace, weights=hashlib.sha256(both.encode()).hexdigest()[:32])

    def _masked(self, keys: bytes) -> bytes:
        mask = self._mask * self._count_of(keys)
        both = int.from_bytes(keys, "little") ^ int.from_bytes(mask, "little")
        return both.to_bytes(len(keys), "little")

    def _parent(self, chain_after: bytes | None) -> bytes | None:
        if chain_after is None or chain_after == NO_KEY:
            return chain_after
        return self._masked(chain_after)
