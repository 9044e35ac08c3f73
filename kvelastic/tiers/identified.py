"""Stores that outlive the process, while it is not known yet which weights the engine has.

    disk = IdentifiedStore(DiskStore(...))
    disk.enter(namespace)                   # nothing is read or written there yet
    disk.identify(fingerprint)              # from here on it is an ordinary store

Hashing a model's weights takes minutes, and the keys of blocks are needed with the first request.
So keys and namespaces of the engine leave the files' contents out, and this store adds them: each
key is combined (XOR) with a mask, 16 bytes of the SHA-256 of the fingerprint, and a namespace's
`weights` with the fingerprint. Two engines of different weights find each other's records as seldom
as two SHA-256 agree in 16 bytes. The key of no block stays itself.

Until `identify` the store holds nothing and refuses everything, except what concerns all
namespaces: its limit, and the erasing by model and age.
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
    Lease,
    Promise,
    Reservation,
    Selection,
    Store,
    StoreStatistics,
    Unerased,
)
from kvelastic.tiers.namespace import Namespace


class _NoLease(Lease):
    count = 0

    def release(self) -> None:
        """Nothing is held."""


class IdentifiedStore(Store):
    """See the module. `inner` belongs to it. Any thread may call, as `inner` allows."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.name = inner.name
        self.record_bytes = inner.record_bytes
        self.asks_medium = inner.asks_medium
        self._entering = threading.Lock()
        """Guards the namespace, so that the last one entered is the one of `inner`."""
        self._namespace: Namespace | None = None
        self._fingerprint = ""
        self._mask = b""
        """Set last by `identify`: a call that sees it finds `inner` in its namespace."""

    def identify(self, fingerprint: str) -> None:
        """The weights have this fingerprint: read and write from now on. Call it once."""
        with self._entering:
            self._fingerprint = fingerprint
            if self._namespace is not None:
                self.inner.enter(self._with_weights(self._namespace))
            digest = hashlib.sha256(b"kvelastic weights of keys " + fingerprint.encode())
            self._mask = digest.digest()[:KEY_BYTES]

    @property
    def is_ready(self) -> bool:
        """As `Store.is_ready`: whether the weights are identified."""
        return bool(self._mask)

    def enter(self, namespace: Namespace) -> None:
        """As `Store.enter`."""
        with self._entering:
            self._namespace = namespace
            if self._fingerprint:
                self.inner.enter(self._with_weights(namespace))

    def has(self, keys: bytes) -> list[bool]:
        """As `Store.has`."""
        if not self._mask:
            return [False] * self._count_of(keys)
        return self.inner.has(self._masked(keys))

    def leading(self, keys: bytes) -> tuple[int, int]:
        """As `Store.leading`."""
        return self.inner.leading(self._masked(keys)) if self._mask else (0, 0)

    def lease(self, keys: bytes) -> Lease:
        """As `Store.lease`."""
        return self.inner.lease(self._masked(keys)) if self._mask else _NoLease()

    def reserve(self, keys: bytes, *, chain_after: bytes | None = None) -> Reservation | None:
        """As `Store.reserve`."""
        if not self._mask:
            return Promise([False] * self._count_of(keys))
        return self.inner.reserve(self._masked(keys), chain_after=self._parent(chain_after))

    def evict(self, count: int) -> int:
        """As `Store.evict`."""
        return self.inner.evict(count)

    def put(
        self, keys: bytes, records: Sequence[memoryview], *, chain_after: bytes | None = None
    ) -> list[bool]:
        """As `Store.put`."""
        if not self._mask:
            return [False] * self._count_of(keys, records)
        return self.inner.put(self._masked(keys), records, chain_after=self._parent(chain_after))

    def get(self, keys: bytes, into: Sequence[memoryview]) -> list[bool]:
        """As `Store.get`."""
        if not self._mask:
            return [False] * self._count_of(keys, into)
        return self.inner.get(self._masked(keys), into)

    def erase(self, keys: bytes) -> int:
        """As `Store.erase`."""
        return self.inner.erase(self._masked(keys)) if self._mask else 0

    def erase_matching(self, selection: Selection) -> int:
        """As `Store.erase_matching`. Nothing is erased by namespace until `is_ready`."""
        if selection.namespace is None:
            return self.inner.erase_matching(selection)
        if not self._mask:
            return 0
        own = self._with_weights(selection.namespace)
        return self.inner.erase_matching(replace(selection, namespace=own))

    def unerased(self) -> Unerased:
        """As `Store.unerased`."""
        return self.inner.unerased()

    def capacity(self) -> Capacity:
        """As `Store.capacity`."""
        return self.inner.capacity()

    @property
    def least_limit_bytes(self) -> int:
        """As `Store.least_limit_bytes`."""
        return self.inner.least_limit_bytes

    def set_limit(self, limit_bytes: int) -> None:
        """As `Store.set_limit`."""
        self.inner.set_limit(limit_bytes)

    def statistics(self) -> StoreStatistics:
        """As `Store.statistics`."""
        return self.inner.statistics()

    def problem(self) -> str:
        """As `Store.problem`."""
        return self.inner.problem()

    def write_budget(self) -> tuple[int, int] | None:
        """As `Store.write_budget`."""
        return self.inner.write_budget()

    def check_integrity(self) -> None:
        """As `Store.check_integrity`."""
        self.inner.check_integrity()

    def close(self) -> None:
        """As `Store.close`."""
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
        self._check_chain(chain_after)
        return self._masked(chain_after)
