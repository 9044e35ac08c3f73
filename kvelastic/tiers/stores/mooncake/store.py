"""A store that keeps demoted blocks on a Mooncake Store, shared by several machines.

    store = MooncakeStore("10.0.0.1:50051", record_bytes, segment_bytes=8 << 30)
    store.enter(namespace)
    store.put(keys, records)

A `mooncake_master` holds the index. Its clients provide the memory: this process provides
`segment_bytes` while it runs. The master decides what to evict. So no limit can be set, and a hold
holds nothing: `get` may miss a record that was just present.

An unreachable master causes neither an exception nor a hang. A call that exceeds `timeout_s`
continues in a background thread, and its result is discarded. After a failure, calls are suspended
for a while, longer after each consecutive failure. During that time reads miss and puts are
refused. When the master is back, the store creates a new client.

**Who can write**: everyone who can reach the master's port, because Mooncake has no passwords here.
A record's header has its key, its namespace and a checksum, which detect damaged or misplaced
records. They do not authenticate the writer. A malicious writer can store other contents under a
key, and a model would use them as its own. A malicious reader can read the prompts of others. Run
master and clients in a network of machines that trust each other.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from kvelastic.errors import IntegrityError, InvalidArgumentError
from kvelastic.tiers.base import (
    Capacity,
    Selection,
    Store,
    Unerased,
    check_size,
    each_key,
)
from kvelastic.tiers.namespace import Namespace
from kvelastic.tiers.stores.circuit_breaker import CircuitBreaker
from kvelastic.tiers.stores.mooncake.client import (
    NO_ROOM,
    NOT_FOUND,
    Client,
    check_address,
    connect,
    require_library,
)
from kvelastic.tiers.stores.mooncake.format import HEADER_BYTES, is_whole, server_key, write_header
from kvelastic.tiers.stores.record_owner import owner_of, wanted_by
from kvelastic.tiers.workers import Workers

ALIGNMENT_BYTES = 4096
STAGED_RECORDS = 16
STAGED_BYTES = 32 << 20
"""Maximum records and bytes that one call to the server transfers; at least one record."""
CLIENT_BUFFER_BYTES = 16 << 20
"""Memory that the client allocates for itself. Transfers of registered buffers do not use it."""
_NO_REPLY = -1
"""Stands for the code of a call that was not made or failed. Mooncake's codes are below -100."""
CLOSE_WAIT_S = 5.0
"""How long `close` waits. A client needs two seconds to leave an unreachable master."""


class MooncakeStore(Store):
    """A store on a Mooncake server. See the module text.

    Any thread may call. Lookups do not wait for transfers; transfers run one after the other.
    `capacity().records` counts the records that this process put and did not erase, although the
    master may have evicted some.
    """

    name = "mooncake"
    asks_medium = True

    def __init__(
        self,
        address: str,
        record_bytes: int,
        *,
        segment_bytes: int = 0,
        timeout_s: float = 1.0,
        setup_timeout_s: float = 5.0,
        make_client: Callable[[], Client] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connect. If that fails, the store is empty and retries later.

        `timeout_s` bounds each call to the server, which transfers up to `STAGED_BYTES` or one
        record. `setup_timeout_s` bounds this constructor. `make_client` and `clock` are for tests.
        Raises `InvalidArgumentError` for an invalid address or size, and `UnsupportedError` with
        installation instructions if Mooncake's client cannot be imported.
        """
        check_address(address)
        super().__init__(record_bytes)
        check_size("segment_bytes", segment_bytes)
        if make_client is None:
            require_library()
        self._stored_bytes = HEADER_BYTES + record_bytes
        self._make_client = make_client or (
            lambda: connect(address, segment_bytes, CLIENT_BUFFER_BYTES)
        )
        self._timeout_s = timeout_s
        self._setup_timeout_s = setup_timeout_s
        slot_bytes = -(-self._stored_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        staged = max(1, min(STAGED_RECORDS, STAGED_BYTES // slot_bytes))
        self._memory = mmap.mmap(-1, slot_bytes * staged)
        self._staged = staged
        self._pin = ctypes.c_char.from_buffer(self._memory)
        base = ctypes.addressof(self._pin)
        whole = memoryview(self._memory)
        starts = range(0, slot_bytes * staged, slot_bytes)
        self._addresses = [base + start for start in starts]
        self._slots = [whole[start : start + self._stored_bytes] for start in starts]
        self._asks = Workers("kvelastic-mooncake-asks")
        self._transfers = Workers("kvelastic-mooncake-transfers")
        self._staging = threading.Lock()  # taken before _lock; guards the slots
        self._lock = threading.Lock()
        self._breaker = CircuitBreaker(clock)
        self._client: Client | None = None
        self._is_setting_up = False
        self._closed = False
        self._namespace: Namespace | None = None
        self._fingerprint = bytes(16)
        self._entered: dict[bytes, Namespace] = {}
        self._own_records = 0
        self._unerased = Unerased()
        self._set_up()

    # --- the server ------------------------------------------------------------------------------

    def _set_up(self) -> None:
        """Create a client on the transfer worker. A client that is ready late is still used."""

        def make() -> None:
            client = self._make_client()
            code = client.register_buffer(self._addresses[0], len(self._memory))
            with self._lock:
                if code == 0 and not self._closed:
                    self._client = client
                    self._breaker.worked()
                    return
            client.close()
            if code:
                raise OSError(f"Mooncake's client refuses the staging memory: its code is {code}")

        try:
            self._transfers.run(make, self._setup_timeout_s)
        except Exception as error:  # a foreign library may raise anything
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self._count(errors=1)
        self._breaker.failed(str(error) or type(error).__name__)

    def _ready(self) -> bool:
        """Whether the server may be called now. Creates a client if necessary."""
        with self._lock:
            if self._closed or not self._breaker.allows_calls:
                return False
            if self._client is not None:
                return True
            if self._is_setting_up:
                return False
            self._is_setting_up = True
        try:
            if not self._transfers.is_stuck:
                self._set_up()
        finally:
            with self._lock:
                self._is_setting_up = False
        return self._client is not None

    def _call(
        self,
        worker: Workers,
        count: int,
        function: Callable[[Client], Sequence[int]],
        also_fine: int = 0,
    ) -> Sequence[int]:
        """Call the server, and return `count` codes; negative ones if it gives no reply.

        Counts errors. If all codes are failures other than `also_fine`, suspends calls.
        """
        client = self._client if self._ready() else None
        if client is None:
            return [_NO_REPLY] * count
        try:
            codes = worker.run(lambda: function(client), self._timeout_s)
            failures = sum(code < 0 and code != also_fine for code in codes)
            if len(codes) != count:
                raise ValueError(f"Mooncake's client returned {len(codes)} codes, not {count}")
        except Exception as error:  # a foreign library may raise or return anything
            self._failed(error)
            return [_NO_REPLY] * count
        self._count(errors=failures)
        if failures == count > 0:
            self._breaker.failed(
                f"Mooncake's client refuses every record: its code is {min(codes)}"
            )
        else:
            self._breaker.worked()
        return codes

    # --- records ---------------------------------------------------------------------------------

    def enter(self, namespace: Namespace) -> None:
        """Set the namespace. Keys of other namespaces miss from now on."""
        with self._lock:
            self._namespace = namespace
            self._fingerprint = namespace.fingerprint
            self._entered[namespace.fingerprint] = namespace

    def has(self, keys: bytes) -> list[bool]:
        """Return for each key whether it is on the server. Blocks for at most `timeout_s`."""
        self._count_of(keys)
        return self._exist(each_key(keys))

    def _exist(self, keys: Sequence[bytes]) -> list[bool]:
        if not keys:
            return []
        names = _names(self._fingerprint, keys)
        codes = self._call(self._asks, len(keys), lambda client: client.batch_is_exist(names))
        return [code == 1 for code in codes]

    def put(
        self, keys: bytes, records: Sequence[memoryview], *, chain_after: bytes | None = None
    ) -> list[bool]:
        """Store records; return for each key whether it is present.

        Blocks. Ignores `chain_after`.
        """
        self._count_of(keys, records, chain_after)
        if self._namespace is None:
            raise InvalidArgumentError("nothing can be put before enter() names a namespace")
        of_key = dict(zip(each_key(keys), records, strict=True))
        each = list(of_key)
        stored = dict(zip(each, self._exist(each), strict=True))
        new = [key for key in each if not stored[key]]
        for at in range(0, len(new), self._staged):
            some = new[at : at + self._staged]
            done = self._put_some(some, [of_key[key] for key in some])
            stored.update(zip(some, done, strict=True))
        return [stored[key] for key in each_key(keys)]

    def _put_some(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> list[bool]:
        fingerprint = self._fingerprint
        names = _names(fingerprint, keys)
        codes: Sequence[int] = ()
        if self._ready():
            with self._staging:
                if not self._transfers.is_stuck:  # else a late call still reads the slots
                    for slot, key, record in zip(self._slots, keys, records, strict=False):
                        slot[HEADER_BYTES:] = record.cast("B")
                        write_header(slot, key, fingerprint)
                    codes = self._call(
                        self._transfers,
                        len(keys),
                        lambda client: client.batch_put_from(names, *self._staged_of(keys)),
                        NO_ROOM,
                    )
        done = [code == 0 for code in codes] or [False] * len(keys)
        count = sum(done)
        with self._lock:
            self._own_records += count
        self._count(puts=count, refused=len(keys) - count, bytes_written=count * self.record_bytes)
        return done

    def _staged_of(self, keys: Sequence[bytes]) -> tuple[list[int], list[int]]:
        """Return the addresses and sizes of the first slots, one for each key."""
        return self._addresses[: len(keys)], [self._stored_bytes] * len(keys)

    def get(self, keys: bytes, into: Sequence[memoryview]) -> list[bool]:
        """Read records; return for each key whether its view is complete. Blocks.

        Damaged records are erased, so that they can be put again.
        """
        self._count_of(keys, into)
        if any(view.readonly or not view.c_contiguous for view in into):
            raise InvalidArgumentError("a view to read into is read-only or not contiguous")
        each = each_key(keys)
        found: list[bool] = []
        for at in range(0, len(each), self._staged):
            found += self._get_some(each[at : at + self._staged], into[at : at + self._staged])
        return found

    def _get_some(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        fingerprint = self._fingerprint
        names = _names(fingerprint, keys)
        found = [False] * len(keys)
        torn: list[bytes] = []
        if self._ready():
            with self._staging:
                codes: Sequence[int] = ()
                if not self._transfers.is_stuck:  # else a late call still writes to the slots
                    codes = self._call(
                        self._transfers,
                        len(keys),
                        lambda client: client.batch_get_into(names, *self._staged_of(keys)),
                        NOT_FOUND,
                    )
                for at, code in enumerate(codes):
                    if code < 0:
                        continue
                    slot = self._slots[at]
                    if code == self._stored_bytes and is_whole(slot, keys[at], fingerprint):
                        into[at].cast("B")[:] = slot[HEADER_BYTES:]
                        found[at] = True
                    else:
                        torn.append(keys[at])
        hits = sum(found)
        self._count(
            hits=hits,
            misses=len(keys) - hits,
            torn=len(torn),
            bytes_read=hits * self.record_bytes,
        )
        if torn:
            self._remove(torn)
        return found

    def erase(self, keys: bytes) -> int:
        """Erase these keys for every machine; return how many. Erases none if the server fails."""
        self._count_of(keys)
        return self._remove(list(dict.fromkeys(each_key(keys))))

    def _remove(self, keys: Sequence[bytes]) -> int:
        if not keys:
            return 0
        names = _names(self._fingerprint, keys)
        codes = self._call(
            self._asks, len(keys), lambda client: client.batch_remove(names, True), NOT_FOUND
        )
        return self._erased(sum(code == 0 for code in codes))

    def _erased(self, count: int) -> int:
        with self._lock:
            self._own_records = max(self._own_records - count, 0)
        return count

    def erase_matching(self, selection: Selection) -> int:
        """Erase the selected records in the namespaces that this process has entered.

        Also erases in the namespace that `selection` names. Erases nothing for an age, which
        `unerased` then reports: the server does not know the age of a record.
        """
        if selection.older_than_s is not None:
            self._unerased = Unerased(
                failed="the server does not know the age of records; erase by model alone"
            )
            return 0
        with self._lock:
            entered = dict(self._entered)
            self._unerased = Unerased()
        if selection.namespace is not None:  # even if this process has not entered it
            entered[selection.namespace.fingerprint] = selection.namespace
        wanted = wanted_by(selection, 0.0)
        count = 0
        for fingerprint, namespace in entered.items():
            if not wanted(owner_of(namespace), 0):
                continue
            (code,) = self._call(self._asks, 1, partial(_remove_namespace, fingerprint))
            if code < 0:
                self._unerased = Unerased(failed="the server did not erase all of it")
            count += max(code, 0)
        return self._erased(count)

    def unerased(self) -> Unerased:
        """Return what earlier erasures could not remove, as text for an operator."""
        return self._unerased

    # --- room and life ---------------------------------------------------------------------------

    def capacity(self) -> Capacity:
        """Return the records that this process put and did not erase; there is no limit."""
        with self._lock:
            return Capacity(self._own_records * self.record_bytes, None, self._own_records)

    def set_limit(self, limit_bytes: int) -> None:
        """Raises `InvalidArgumentError`: the master decides the capacity."""
        raise InvalidArgumentError(
            "a Mooncake server's capacity is what its clients give; no limit can be set from here"
        )

    def problem(self) -> str:
        """Return why the server refuses calls now, for an operator; empty if it works."""
        return self._breaker.problem

    def check_integrity(self) -> None:
        """Check the counts. Records on the server are verified when they are read."""
        done = self.statistics()
        if self._own_records < 0 or done.torn > done.misses:
            raise IntegrityError(
                f"{self._own_records} records, {done.torn} torn of {done.misses} misses"
            )

    def close(self) -> None:
        """Close the client; the records in this process's segment are lost.

        Waits at most `CLOSE_WAIT_S` for each step: lookups, the client, and transfers.
        """
        with self._lock:
            self._closed = True
            client, self._client = self._client, None
        self._asks.close(CLOSE_WAIT_S)
        if client is not None:
            try:
                self._transfers.run(client.close, CLOSE_WAIT_S)
            except Exception as error:  # a foreign library may raise anything
                self._failed(error)
        ended = self._transfers.close(CLOSE_WAIT_S)
        with self._staging:
            if ended and self._slots:  # else a late call may still write there: keep it mapped
                for slot in self._slots:
                    slot.release()
                self._slots.clear()


def _remove_namespace(fingerprint: bytes, client: Client) -> list[int]:
    return [client.remove_by_regex(f"^{fingerprint.hex()}-.*", True)]


def _names(fingerprint: bytes, keys: Sequence[bytes]) -> list[str]:
    return [server_key(fingerprint, key) for key in keys]
