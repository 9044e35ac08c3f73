"""The interface of a store, which keeps demoted blocks as one record per block.

    store.enter(namespace)                       # further records belong to it
    stored = store.put(keys, records)            # records: one view for each key
    with store.hold(keys) as hold:             # the leading keys that are stored
        whole = store.get(keys[: hold.count * KEY_BYTES], into)

A key has 16 bytes and is cumulative: it identifies the namespace and all tokens up to the end of
its block. Keys are concatenated in one `bytes`, so that a lookup creates no object per key. A
record holds the bytes of one block in all its buffers and on all ranks. All records of one store
have the same size.

A store never raises for a failure of its medium, such as a full disk, a device error or a server
that is unreachable. A failed read counts as a miss, a failed write as not stored, and both are
counted in `statistics().errors`. A store raises `InvalidArgumentError` for a caller's mistake:
incomplete keys, or views of the wrong size.

All methods are thread-safe. Calls may block for as long as the medium takes. If `asks_medium` is
False, `has` and `hold` only use an index in memory and do not block.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from kvelastic.errors import InvalidArgumentError
from kvelastic.tiers.namespace import Namespace
from kvelastic.units import MAX_SIZE_BYTES

KEY_BYTES = 16
NO_KEY = bytes(KEY_BYTES)
"""Not a valid key: it stands for "no block"."""


def each_key(keys: bytes) -> list[bytes]:
    """Split concatenated keys."""
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


def count_of(keys: bytes) -> int:
    """Return the number of concatenated keys. Raises `InvalidArgumentError` for a partial key."""
    count, rest = divmod(len(keys), KEY_BYTES)
    if rest:
        raise InvalidArgumentError(
            f"keys have {len(keys)} bytes, no multiple of {KEY_BYTES}; pass whole keys"
        )
    return count


def keys_at(keys: bytes, at: int, count: int = 1) -> bytes:
    """Return `count` of the concatenated keys, from position `at` on."""
    return keys[at * KEY_BYTES : (at + count) * KEY_BYTES]


def check_size(what: str, value: object, least: int = 0, most: int = MAX_SIZE_BYTES) -> None:
    """Raises `InvalidArgumentError` unless the value is an integer from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidArgumentError(f"{what}={value!r} is not accepted; give {least} to {most}")


@dataclass(frozen=True)
class Capacity:
    """The usage and the limit of a store.

    `limit_bytes` is None if the store has no limit here, for example because a server sets it.
    """

    used_bytes: int
    limit_bytes: int | None
    records: int


@dataclass(frozen=True)
class StoreStatistics:
    """Counters of a store since it was opened. Unless named otherwise, they count records."""

    puts: int = 0
    """Records stored."""
    refused: int = 0
    """Records not stored: nothing could be evicted, budget exhausted, or the medium failed."""
    hits: int = 0
    """Records read successfully."""
    misses: int = 0
    """Requested records that were not stored."""
    torn: int = 0
    """Records found torn, truncated or corrupt. They also count as misses."""
    evicted: int = 0
    """Records evicted for other records or by a lower limit."""
    errors: int = 0
    """Calls to the medium that failed."""
    bytes_written: int = 0
    bytes_read: int = 0


@dataclass(frozen=True)
class Selection:
    """Which records to erase. None in a field does not restrict the selection."""

    namespace: Namespace | None = None
    model: str | None = None
    older_than_s: float | None = None
    every_generation: bool = False
    """Whether to select every generation of `namespace`."""


class Unerased(NamedTuple):
    """Text for an operator on records that an erasure may have left. Empty: none."""

    failed: str = ""
    """Records that the medium failed to erase. Another erasure retries them."""
    elsewhere: str = ""
    """Records that belong to other engines and must be erased there."""


class _Releasable:
    """Something that a store keeps for the caller until `release()`. Any thread may call."""

    def __init__(self, end: Callable[[], object] | None = None) -> None:
        """The first `release` calls `end`."""
        self._end = end
        self._lock = threading.Lock()

    def release(self) -> None:
        """Release what is kept. Idempotent."""
        with self._lock:
            end, self._end = self._end, None
        if end is not None:
            end()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


_Self = TypeVar("_Self", bound=_Releasable)


class Hold(_Releasable):
    """Keys that stay readable until `release()`: the store does not evict their records.

    A hold without `end` protects nothing: the keys were stored, but may be evicted at any time.
    """

    def __init__(self, count: int = 0, end: Callable[[], object] | None = None) -> None:
        super().__init__(end)
        self.count = count
        """How many of the requested keys are held, counted from the first."""


class Reservation(_Releasable):
    """Slots reserved for records that will be put, exclusively for the holder.

    `put` of a reserved key fills its slot. Until then `has`, `hold` and `get` do not find the key,
    and another `reserve` treats it as present. `release` frees the slots that were not filled.
    """

    def __init__(self, slots: Sequence[int], end: Callable[[], object] | None = None) -> None:
        super().__init__(end)
        self.slots = slots
        """For each requested key, the store's slot number. Negative if the key is stored or
        reserved already, so that the holder need not put it."""

    @property
    def first_new(self) -> int | None:
        """Index of the first key that the holder must put, or None."""
        return next((at for at, slot in enumerate(self.slots) if slot >= 0), None)


class Store(ABC):
    """A store of demoted blocks. The module states the rules for errors and threads."""

    name: str
    """The kind, as in KVELASTIC_TIERS, commands and metrics: host, disk, folder, mooncake, peer."""
    record_bytes: int
    takes_records: bool = True
    """Whether blocks can be demoted to it. False for a store that only reads."""
    asks_medium: bool = False
    """Whether `has` and `hold` use a file system or a server, and so may block."""

    def __init__(self, record_bytes: int) -> None:
        """Raises `InvalidArgumentError` for an invalid size."""
        check_size("record_bytes", record_bytes, least=1)
        self.record_bytes = record_bytes
        self._counts = dict.fromkeys(StoreStatistics.__dataclass_fields__, 0)
        self._counting = threading.Lock()
        """Guards the counts. No other lock is taken inside it."""

    @property
    def is_ready(self) -> bool:
        """Whether records of this engine can be read and written. Never returns to False."""
        return True

    @abstractmethod
    def enter(self, namespace: Namespace) -> None:
        """Set the namespace of all further records."""

    @abstractmethod
    def has(self, keys: bytes) -> list[bool]:
        """For each key, return whether its record can be read now. Has no side effects."""

    def leading(self, keys: bytes) -> tuple[int, int]:
        """Return the number of leading keys that are readable, and that are readable or reserved.

        Both numbers are equal for a store without reservations. Has no side effects.
        """
        there = self.has(keys)
        ready = there.index(False) if False in there else len(there)
        return ready, ready

    def hold(self, keys: bytes) -> Hold:
        """Hold the leading keys that are stored. Counts as a use in the eviction policy.

        If other processes can evict records of the store (on a server), the hold guarantees
        nothing: `get` may still miss. That is the hold of a store that does not override this.
        """
        return Hold(self.leading(keys)[0])

    def reserve(self, keys: bytes, *, chain_after: bytes | None = None) -> Reservation | None:
        """Reserve slots for all given keys that are not stored.

        Returns None, and reserves none, if there are not enough slots. Evicts other records as
        `put` does. A store without slots returns slot 0 for each missing key, and allocates at
        `put`.
        """
        self._count_of(keys, None, chain_after)
        return Reservation([-1 if is_there else 0 for is_there in self.has(keys)])

    def evict(self, count: int) -> int:
        """Evict up to `count` records by policy. Returns how many were evicted.

        Returns 0 if the store does not control eviction.
        """
        return 0

    @abstractmethod
    def put(
        self, keys: bytes, records: Sequence[memoryview], *, chain_after: bytes | None = None
    ) -> list[bool]:
        """Store records. For each key, return whether its record is stored now, or was before.

        With `chain_after`, each key continues the previous one, and the first one continues
        `chain_after` (NO_KEY: it begins a prompt). A store with an index evicts the ends of chains
        first. A key becomes visible only when its record is complete. `records` are read only
        during the call.
        """

    @abstractmethod
    def get(self, keys: bytes, into: Sequence[memoryview]) -> list[bool]:
        """Read records. For each key, return whether its view holds the complete record.

        If False, the contents of the view are undefined.
        """

    @abstractmethod
    def erase(self, keys: bytes) -> int:
        """Erase the records of the given keys. Returns how many were stored.

        Held records are erased when their holds end.
        """

    @abstractmethod
    def erase_matching(self, selection: Selection) -> int:
        """Erase every record that `selection` names. Returns how many were erased.

        Also erases and counts damaged records, because their owner is unknown. `unerased` reports
        what is left.
        """

    def unerased(self) -> Unerased:
        """Return which records the last erasures could not remove."""
        return Unerased()

    @abstractmethod
    def capacity(self) -> Capacity:
        """Return the current usage and the limit."""

    @property
    def least_limit_bytes(self) -> int:
        """The lowest limit at which the store can hold a record; 0 if it has no limit here."""
        return 0

    @abstractmethod
    def set_limit(self, limit_bytes: int) -> None:
        """Set the limit. Evicts records above it, by policy, before it returns.

        Held records are evicted when their holds end. Raises `InvalidArgumentError` if the
        store does not control its capacity.
        """

    def statistics(self) -> StoreStatistics:
        """Return the counters since the store was opened."""
        with self._counting:
            return StoreStatistics(**self._counts)

    def _count(self, **more: int) -> None:
        """Add to the statistics."""
        with self._counting:
            for name, count in more.items():
                self._counts[name] += count

    def write_budget(self) -> tuple[int, int] | None:
        """Return the bytes that may be written per UTC day and how many remain. None: no limit."""
        return None

    def problem(self) -> str:
        """Return, for an operator, why the medium refuses calls now. Empty: it works.

        Becomes empty when the failed operation works again. Does not access the medium.
        """
        return ""

    @abstractmethod
    def check_integrity(self) -> None:
        """Compare index, counters and medium. Raises `IntegrityError` that names a mismatch."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources. Persistent records are found at the next open. Idempotent."""

    def _count_of(
        self,
        keys: bytes,
        views: Sequence[memoryview] | None = None,
        chain_after: bytes | None = None,
    ) -> int:
        """Return the number of keys.

        Raises `InvalidArgumentError` for incomplete keys, views that do not match them, or a
        `chain_after` that is neither None nor a key.
        """
        count = count_of(keys)
        if chain_after is not None and len(chain_after) != KEY_BYTES:
            raise InvalidArgumentError(
                f"chain_after has {len(chain_after)} bytes; it must be a key of {KEY_BYTES}"
            )
        if views is None:
            return count
        if len(views) != count:
            raise InvalidArgumentError(f"{count} keys and {len(views)} views; pass one for each")
        for view in views:
            if view.nbytes != self.record_bytes:
                raise InvalidArgumentError(
                    f"a view of {view.nbytes} bytes for records of {self.record_bytes};"
                    " give each the record's size"
                )
        return count
