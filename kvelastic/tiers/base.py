"""The contract of a store: what keeps demoted blocks, one record a block.

    store.enter(namespace)                       # records put from now on belong to it
    stored = store.put(keys, records)            # records: one view for each key
    with store.lease(keys) as lease:             # the leading keys that are there
        whole = store.get(keys[: lease.count * KEY_BYTES], into)

A key is 16 bytes and cumulative: it stands for all the tokens up to the end of its block, and for
the namespace. Keys are passed side by side in one `bytes`; no parser and no object for each is on
the path of a lookup. A record is the bytes of one block in all its buffers and all ranks;
all records of one store have the same size.

A store never raises for what its medium does: a disk that is full, an error of a device, a server
that is gone. What cannot be read is not there; what cannot be written was not stored; both are
counted (`statistics().errors`). It raises `InvalidArgumentError` for a caller's mistake: keys that
are not whole, views of another size.

Any thread may call any method; calls may block as long as the medium takes, `has` and `lease` of a
bounded store never do: they look at an index in memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import NamedTuple

from kvelastic.errors import InvalidArgumentError
from kvelastic.tiers.namespace import Namespace

KEY_BYTES = 16
NO_KEY = bytes(KEY_BYTES)
"""The key of no block."""


@dataclass(frozen=True)
class Capacity:
    """How much a store holds, and may hold. `limit_bytes` is None where others decide that."""

    used_bytes: int
    limit_bytes: int | None
    records: int


@dataclass(frozen=True)
class StoreStatistics:
    """What a store has done since it was opened. Counts are of records."""

    puts: int = 0
    """Records stored."""
    refused: int = 0
    """Records that were not stored: no room that may be taken, a budget, a medium that failed."""
    hits: int = 0
    """Records read whole."""
    misses: int = 0
    """Records asked for that are not there."""
    torn: int = 0
    """Records found that are not whole: torn, truncated, flipped. They count as misses, too."""
    evicted: int = 0
    """Records displaced by others, or by a lower limit."""
    errors: int = 0
    """Calls to the medium that failed."""
    bytes_written: int = 0
    bytes_read: int = 0


@dataclass(frozen=True)
class Selection:
    """Which records to erase; what is None does not restrict."""

    namespace: Namespace | None = None
    model: str | None = None
    older_than_s: float | None = None
    every_generation: bool = False
    """Whether records of the other generations of `namespace` are selected, too."""

    def names(self, namespace: Namespace) -> bool:
        """Whether records of this namespace are selected, if they are old enough."""
        if self.model not in (None, namespace.model):
            return False
        if self.namespace is None:
            return True
        if self.every_generation:
            namespace = replace(namespace, generation=self.namespace.generation)
        return namespace.fingerprint == self.namespace.fingerprint


class Unerased(NamedTuple):
    """What may be left of an erasure, as text for an operator; empty where nothing is."""

    failed: str = ""
    """The medium refused it: another erasure tries it again."""
    elsewhere: str = ""
    """It belongs to other engines: ask these."""


class Lease(ABC):
    """Keys that stay readable until `release()`: no other record displaces them."""

    count: int
    """How many leading keys of those asked for are held."""

    @abstractmethod
    def release(self) -> None:
        """End it. Repeatable."""

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


class Reservation(ABC):
    """Places for records that are on their way: nobody else puts these keys meanwhile.

    A `put` of such a key fills its place. Until then it is not there to `has`, `lease` and `get`,
    and there already to another `reserve`.
    """

    slots: Sequence[int]
    """Where each new record will lie, as the store numbers it; below 0 elsewhere."""

    @property
    @abstractmethod
    def is_new(self) -> Sequence[bool]:
        """For each key asked for, whether it is to be put; else it is there, or on its way."""

    @property
    def first_new(self) -> int | None:
        """The place of the first key that is to be put."""
        is_new = self.is_new
        return is_new.index(True) if True in is_new else None

    @abstractmethod
    def release(self) -> None:
        """Give up the places that were not filled. Repeatable."""


class Promise(Reservation):
    """Of a store that decides at each `put` and reserves nothing."""

    def __init__(self, there: Sequence[bool]) -> None:
        self._there = there
        self.slots = [-1] * len(there)

    @property
    def is_new(self) -> Sequence[bool]:
        """As `Reservation.is_new`."""
        return [not is_there for is_there in self._there]

    def release(self) -> None:
        """Nothing is held."""


class Store(ABC):
    """Where demoted blocks lie. See the module for what holds of every method."""

    name: str
    """As in KVELASTIC_TIERS, commands and metrics: host, disk, folder, mooncake."""
    record_bytes: int
    asks_medium: bool = False
    """Whether `has` and `lease` ask a file system or a server, and so may block."""

    @property
    def is_ready(self) -> bool:
        """Whether records of this engine can be read and written. Once true, it stays true."""
        return True

    @abstractmethod
    def enter(self, namespace: Namespace) -> None:
        """Records put from now on belong to `namespace`."""

    @abstractmethod
    def has(self, keys: bytes) -> list[bool]:
        """For each key, whether its record can be read now. Changes nothing."""

    def leading(self, keys: bytes) -> tuple[int, int]:
        """How many leading keys can be read now, and how many of these can be or are on their way.

        A store that reserves no places knows of none that are on their way. Changes nothing.
        """
        there = self.has(keys)
        ready = there.index(False) if False in there else len(there)
        return ready, ready

    @abstractmethod
    def lease(self, keys: bytes) -> Lease:
        """Hold the leading keys that are there. A use, to the policy of eviction.

        A store that others displace records of (a server's) cannot promise: `get` may still miss.
        """

    def reserve(self, keys: bytes, *, chain_after: bytes | None = None) -> Reservation | None:
        """Have places for all of these keys that are not there, or None: no key is new then.

        Others are displaced for them as by `put`. A store without such places answers what is not
        there, and decides when it is put.
        """
        self._check_chain(chain_after)
        return Promise(self.has(keys))

    def evict(self, count: int) -> int:
        """Displace `count` records by policy now; answers how many went. 0: others decide that."""
        return 0

    @abstractmethod
    def put(
        self, keys: bytes, records: Sequence[memoryview], *, chain_after: bytes | None = None
    ) -> list[bool]:
        """Store records; for each key, whether its record is there now (also from before).

        With `chain_after` each key continues the one before it, and the first one continues
        `chain_after` (NO_KEY: it begins a prompt): a store with an index evicts the ends of chains
        first. A key becomes visible when its record is whole, never before. Reads `records` only
        during the call.
        """

    @abstractmethod
    def get(self, keys: bytes, into: Sequence[memoryview]) -> list[bool]:
        """Read records; for each key, whether its view holds the whole record.

        What a view holds after False is undefined.
        """

    @abstractmethod
    def erase(self, keys: bytes) -> int:
        """Forget these; answers how many were there. Leased ones go when their leases end."""

    @abstractmethod
    def erase_matching(self, selection: Selection) -> int:
        """Forget every record that `selection` names; answers how many.

        Damaged records count, too: it is not known whose they were. `unerased` says what is left.
        """

    def unerased(self) -> Unerased:
        """What the last erasures have not removed."""
        return Unerased()

    @abstractmethod
    def capacity(self) -> Capacity:
        """What it holds now."""

    @property
    def least_limit_bytes(self) -> int:
        """The lowest limit with which it keeps anything; 0 where others decide."""
        return 0

    @abstractmethod
    def set_limit(self, limit_bytes: int) -> None:
        """Hold no more than this from now on; what is over it goes before this returns, by policy.

        Leased records go when their leases end. Raises `InvalidArgumentError` where others decide
        the capacity.
        """

    @abstractmethod
    def statistics(self) -> StoreStatistics:
        """What it has done."""

    def write_budget(self) -> tuple[int, int] | None:
        """Bytes that may be written a day (UTC), and what is left of them; None: any number."""
        return None

    def problem(self) -> str:
        """Return why the medium refuses some or all calls now, for an operator; empty: it works.

        It is empty again once what failed works. Does not ask the medium.
        """
        return ""

    @abstractmethod
    def check_integrity(self) -> None:
        """Compare index, account and medium; raises `IntegrityError` naming what disagrees."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything; what survives is found at the next open. Repeatable."""

    def _count_of(self, keys: bytes, views: Sequence[memoryview] | None = None) -> int:
        """How many keys these are; raises `InvalidArgumentError` where they or views do not fit."""
        count, rest = divmod(len(keys), KEY_BYTES)
        if rest:
            raise InvalidArgumentError(
                f"keys have {len(keys)} bytes, no multiple of {KEY_BYTES}; pass whole keys"
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

    def _check_chain(self, chain_after: bytes | None) -> None:
        """Raises `InvalidArgumentError` unless that is a key."""
        if chain_after is not None and len(chain_after) != KEY_BYTES:
            raise InvalidArgumentError(
                f"chain_after has {len(chain_after)} bytes; it must be a key of {KEY_BYTES}"
            )
