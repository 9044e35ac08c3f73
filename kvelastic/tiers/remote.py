"""Demoted blocks on a Mooncake Store: a store and an index that several machines share.

    store = MooncakeStore("10.0.0.1:50051", record_bytes, segment_bytes=8 << 30)
    store.enter(namespace)
    store.put(keys, records)

A `mooncake_master` knows which records there are; the memory they lie in is given by its clients
(`segment_bytes` of this process, as long as it lives). The master decides who is evicted, so there
is no limit to set and a lease promises nothing: `get` may miss what was just there.

A master that is gone is never an exception and never a hang: calls have `timeout_s`, after which
they go on in a thread that nobody waits for; what fails is left alone for a while, longer after
each failure in a row, and meanwhile reads are misses and puts are refused. The client is set up
anew when the master is back.

**Who may write there**: everybody who reaches the master's port, for Mooncake has no passwords
here. A record's header has its key, its namespace and a checksum, which find what was damaged or
misplaced; a checksum is no signature. Who can write can put other contents under a key, which a
model would then read as its own, and who can read has the prompts of others. Keep master and
clients in a network of machines that trust each other.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from kvelastic.errors import IntegrityError, InvalidArgumentError
from kvelastic.tiers.base import (
    KEY_BYTES,
    Capacity,
    Lease,
    Selection,
    Store,
    StoreStatistics,
    Unerased,
)
from kvelastic.tiers.deadline_worker import DeadlineWorker
from kvelastic.tiers.mooncake_client import (
    NO_ROOM,
    NOT_FOUND,
    Client,
    check_address,
    connect,
    require_library,
)
from kvelastic.tiers.namespace import Namespace
from kvelastic.tiers.quiet import Quiet
from kvelastic.tiers.remote_record import HEADER_BYTES, is_whole, server_key, write_header

Value = TypeVar("Value")

ALIGNMENT_BYTES = 4096
STAGED_RECORDS = 16
STAGED_BYTES = 32 << 20
"""What one call to the server transfers at most, so many records and bytes; a record at least."""
CLIENT_BUFFER_BYTES = 16 << 20
"""Memory of the client's own, which transfers of registered buffers do not use."""
CLOSE_WAIT_S = 5.0
"""A client takes two seconds to leave a master that is gone."""


class MooncakeStore(Store):
    """See the module. Any thread; lookups do not wait for transfers, transfers wait in line.

    `capacity().records` counts what this process has put and not erased; others may have evicted
    some of it.
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
        """Connect; where that fails the store is there and empty, and tries again later.

        `timeout_s` bounds each call to the server, of `STAGED_BYTES` or one record, and
        `setup_timeout_s` this constructor. `make_client` and `clock` are for tests. Raises
        `InvalidArgumentError` for a bad address or size, and `UnsupportedError`, which says how to
        install it, where Mooncake's client cannot be imported.
        """
        check_address(address)
        for what, value, least in (
            ("record_bytes", record_bytes, 1),
            ("segment_bytes", segment_bytes, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InvalidArgumentError(f"{what}={value!r} is not accepted; least is {least}")
        if make_client is None:
            require_library()
        self.record_bytes = record_bytes
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
        self._asks = DeadlineWorker("kvelastic-mooncake-asks")
        self._transfers = DeadlineWorker("kvelastic-mooncake-transfers")
        self._staging = threading.Lock()  # before _lock; who has it uses the slots
        self._lock = threading.Lock()
        self._quiet = Quiet(clock)
        self._problem = ""
        self._client: Client | None = None
        self._is_setting_up = False
        self._closed = False
        self._namespace: Namespace | None = None
        self._fingerprint = bytes(16)
        self._entered: dict[bytes, Namespace] = {}
        self._own_records = 0
        self._unerased = Unerased()
        self._counts = dict.fromkeys(StoreStatistics.__dataclass_fields__, 0)
        self._set_up()

    # --- the server ------------------------------------------------------------------------------

    def _set_up(self) -> None:
        """Have a client made, in the line of transfers; late ones are taken when they come."""

        def make() -> None:
            client = self._make_client()
            code = client.register_buffer(self._addresses[0], len(self._memory))
            with self._lock:
                if code == 0 and not self._closed:
                    self._client = client
                    self._quiet.worked()
                    self._problem = ""
                    return
            client.close()
            if code:
                raise OSError(f"Mooncake's client refuses the staging memory: its code is {code}")

        try:
            self._transfers.run(make, self._setup_timeout_s)
        except Exception as error:  # whatever a foreign library raises: it is not there
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        with self._lock:
            self._counts["errors"] += 1
            self._quiet.failed()
            self._problem = str(error) or type(error).__name__

    def _ready(self) -> bool:
        """Whether the server may be called now; sets a client up where there is none."""
        with self._lock:
            if self._closed or not self._quiet.is_over:
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

    def _call(self, worker: DeadlineWorker, function: Callable[[Client], Value]) -> Value | None:
        """What the client answers; None, counted, where it raises or is late."""
        client = self._client
        if client is None:
            return None
        try:
            answer = worker.run(lambda: function(client), self._timeout_s)
        except Exception as error:  # whatever a foreign library raises is one of the medium
            self._failed(error)
            return None
        return answer

    def _judge(self, codes: Sequence[int], also_fine: int) -> None:
        """Count what failed; leave the server alone where all of it did."""
        failures = sum(code < 0 and code != also_fine for code in codes)
        with self._lock:
            self._counts["errors"] += failures
            if failures == len(codes) > 0:
                self._quiet.failed()
                self._problem = f"Mooncake's client refuses every record: its code is {min(codes)}"
            else:
                self._quiet.worked()
                self._problem = ""

    # --- records ---------------------------------------------------------------------------------

    def enter(self, namespace: Namespace) -> None:
        """As `Store.enter`. Keys of other namespaces are misses from now on."""
        with self._lock:
            self._namespace = namespace
            self._fingerprint = namespace.fingerprint
            self._entered[namespace.fingerprint] = namespace

    def has(self, keys: bytes) -> list[bool]:
        """As `Store.has`. Asks the server: blocks for `timeout_s` at most."""
        self._count_of(keys)
        return self._exist(_split(keys))

    def _exist(self, keys: Sequence[bytes]) -> list[bool]:
        if not keys or not self._ready():
            return [False] * len(keys)
        names = _names(self._fingerprint, keys)
        codes = self._call(self._asks, lambda client: client.batch_is_exist(names))
        if codes is None or len(codes) != len(keys):
            return [False] * len(keys)
        self._judge(codes, 0)
        return [code == 1 for code in codes]

    def lease(self, keys: bytes) -> Lease:
        """As `Store.lease`; the master keeps what was just asked for, for a while, if it can."""
        there = self.has(keys)
        return _Hint(there.index(False) if False in there else len(there))

    def put(
        self, keys: bytes, records: Sequence[memoryview], *, chain_after: bytes | None = None
    ) -> list[bool]:
        """As `Store.put`; the server knows no chains."""
        self._count_of(keys, records)
        self._check_chain(chain_after)
        if self._namespace is None:
            raise InvalidArgumentError("nothing can be put before enter() names a namespace")
        of_key = dict(zip(_split(keys), records, strict=True))
        each = list(of_key)
        stored = dict(zip(each, self._exist(each), strict=True))
        new = [key for key in each if not stored[key]]
        for at in range(0, len(new), self._staged):
            some = new[at : at + self._staged]
            done = self._put_some(some, [of_key[key] for key in some])
            stored.update(zip(some, done, strict=True))
        return [stored[key] for key in _split(keys)]

    def _put_some(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> list[bool]:
        codes: list[int] | None = None
        if self._ready():
            fingerprint = self._fingerprint
            names = _names(fingerprint, keys)
            addresses = self._addresses[: len(keys)]
            sizes = [self._stored_bytes] * len(keys)
            with self._staging:
                if not self._transfers.is_stuck:  # else the slots are still being read
                    for slot, key, record in zip(self._slots, keys, records, strict=False):
                        slot[HEADER_BYTES:] = record.cast("B")
                        write_header(slot, key, fingerprint)
                    codes = self._call(
                        self._transfers,
                        lambda client: client.batch_put_from(names, addresses, sizes),
                    )
        done = [False] * len(keys)
        if codes is not None and len(codes) == len(keys):
            self._judge(codes, NO_ROOM)
            done = [code == 0 for code in codes]
        with self._lock:
            count = sum(done)
            self._counts["puts"] += count
            self._counts["refused"] += len(keys) - count
            self._counts["bytes_written"] += count * self.record_bytes
            self._own_records += count
        return done

    def get(self, keys: bytes, into: Sequence[memoryview]) -> list[bool]:
        """As `Store.get`. What is found and is not whole is erased, so that it can be put again."""
        self._count_of(keys, into)
        if any(view.readonly or not view.c_contiguous for view in into):
            raise InvalidArgumentError("a view to read into is read-only or not contiguous")
        each = _split(keys)
        found: list[bool] = []
        for at in range(0, len(each), self._staged):
            found += self._get_some(each[at : at + self._staged], into[at : at + self._staged])
        return found

    def _get_some(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        found = [False] * len(keys)
        torn: list[bytes] = []
        if self._ready():
            fingerprint = self._fingerprint
            names = _names(fingerprint, keys)
            addresses = self._addresses[: len(keys)]
            sizes = [self._stored_bytes] * len(keys)
            codes: list[int] | None = None
            with self._staging:
                if not self._transfers.is_stuck:  # else a late call still writes to the slots
                    codes = self._call(
                        self._transfers,
                        lambda client: client.batch_get_into(names, addresses, sizes),
                    )
                if codes is not None and len(codes) == len(keys):
                    for at, code in enumerate(codes):
                        slot = self._slots[at]
                        if code < 0:
                            continue
                        if code == self._stored_bytes and is_whole(slot, keys[at], fingerprint):
                            into[at].cast("B")[:] = slot[HEADER_BYTES:]
                            found[at] = True
                        else:
                            torn.append(keys[at])
            if codes is not None and len(codes) == len(keys):
                self._judge(codes, NOT_FOUND)
        with self._lock:
            hits = sum(found)
            self._counts["hits"] += hits
            self._counts["misses"] += len(keys) - hits
            self._counts["torn"] += len(torn)
            self._counts["bytes_read"] += hits * self.record_bytes
        if torn:
            self._remove(torn)
        return found

    def erase(self, keys: bytes) -> int:
        """As `Store.erase`, for every machine. Where the server does not answer none is erased."""
        self._count_of(keys)
        return self._remove(list(dict.fromkeys(_split(keys))))

    def _remove(self, keys: Sequence[bytes]) -> int:
        if not keys or not self._ready():
            return 0
        names = _names(self._fingerprint, keys)
        codes = self._call(self._asks, lambda client: client.batch_remove(names, True))
        if codes is None:
            return 0
        self._judge(codes, NOT_FOUND)
        return self._erased(sum(code == 0 for code in codes))

    def _erased(self, count: int) -> int:
        with self._lock:
            self._own_records = max(self._own_records - count, 0)
        return count

    def erase_matching(self, selection: Selection) -> int:
        """As `Store.erase_matching`, among the namespaces that this process has entered.

        The server does not say how old a record is: raises `InvalidArgumentError` for an age.
        """
        if selection.older_than_s is not None:
            raise InvalidArgumentError(
                "a Mooncake server does not know the age of records; select by namespace or model"
            )
        with self._lock:
            worlds = dict(self._entered)
            self._unerased = Unerased()
        if selection.namespace is not None:  # also one that only others have entered
            worlds[selection.namespace.fingerprint] = selection.namespace
        count = 0
        for fingerprint, namespace in worlds.items():
            if not selection.names(namespace):
                continue
            code = None
            if self._ready():
                code = self._call(self._asks, partial(_remove_world, fingerprint))
            if code is not None:
                self._judge([code], 0)
            if code is None or code < 0:
                self._unerased = Unerased(failed="the server did not erase all of it")
            count += max(code or 0, 0)
        return self._erased(count)

    def unerased(self) -> Unerased:
        """As `Store.unerased`."""
        return self._unerased

    # --- room and life ---------------------------------------------------------------------------

    def capacity(self) -> Capacity:
        """As `Store.capacity`; see the class for what is counted."""
        with self._lock:
            return Capacity(self._own_records * self.record_bytes, None, self._own_records)

    def set_limit(self, limit_bytes: int) -> None:
        """Raises `InvalidArgumentError`: the master decides."""
        raise InvalidArgumentError(
            "a Mooncake server's capacity is what its clients give; no limit can be set from here"
        )

    def statistics(self) -> StoreStatistics:
        """As `Store.statistics`."""
        with self._lock:
            return StoreStatistics(**self._counts)

    def problem(self) -> str:
        """As `Store.problem`."""
        with self._lock:
            return self._problem

    def check_integrity(self) -> None:
        """As `Store.check_integrity`; what lies on the server is checked when it is read."""
        with self._lock:
            if self._own_records < 0 or self._counts["torn"] > self._counts["misses"]:
                raise IntegrityError(
                    f"{self._own_records} records, {self._counts['torn']} torn of"
                    f" {self._counts['misses']} misses"
                )

    def close(self) -> None:
        """As `Store.close`. What lies in this process's segment is gone.

        Waits for `CLOSE_WAIT_S`, for each of both lines of calls.
        """
        with self._lock:
            self._closed = True
            client, self._client = self._client, None
        self._asks.close(CLOSE_WAIT_S)
        if client is not None:
            try:
                self._transfers.run(client.close, CLOSE_WAIT_S)
            except Exception as error:  # whatever a foreign library raises is one of the medium
                self._failed(error)
        ended = self._transfers.close(CLOSE_WAIT_S)
        with self._staging:
            if ended and self._slots:  # else a late call may still write there: it is left mapped
                for slot in self._slots:
                    slot.release()
                self._slots.clear()


class _Hint(Lease):
    """Keys that were there when they were asked for."""

    def __init__(self, count: int) -> None:
        self.count = count

    def release(self) -> None:
        """Nothing is held."""


def _remove_world(fingerprint: bytes, client: Client) -> int:
    return client.remove_by_regex(f"^{fingerprint.hex()}-.*", True)


def _names(fingerprint: bytes, keys: Sequence[bytes]) -> list[str]:
    return [server_key(fingerprint, key) for key in keys]


def _split(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
