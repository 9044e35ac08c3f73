"""Stand-ins for a pool, staging memory and stores, that are stricter than the real ones.

A fake refuses what would be a race in the real thing: a slot that two calls use, a copy into a
block that nobody has in use. Faults are armed by the number of the call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from waiting import DEADLINE_S

from kvelastic.errors import BlockError, DriverError, InvalidArgumentError
from kvelastic.tiers.base import (
    KEY_BYTES,
    Capacity,
    Hold,
    Selection,
    Store,
    StoreStatistics,
)
from kvelastic.tiers.namespace import Namespace

RECORD_BYTES = 64


def key_of(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "big")


def keys_of(numbers: Sequence[int]) -> bytes:
    return b"".join(map(key_of, numbers))


def record_of(number: int) -> bytes:
    """What a block with this key holds: nothing else does."""
    return (number + 1).to_bytes(8, "big") * (RECORD_BYTES // 8)


def split(keys: bytes) -> list[bytes]:
    assert len(keys) % KEY_BYTES == 0
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


class FakeStaging:
    """Slots that know who uses them."""

    def __init__(self, slots: int, record_bytes: int = RECORD_BYTES) -> None:
        self.slots = slots
        self.record_bytes = record_bytes
        self._memory = [bytearray(record_bytes) for _ in range(slots)]
        self._lock = threading.Lock()
        self._users = [0] * slots
        self._puts = [0] * slots

    def view(self, slot: int) -> memoryview:
        return memoryview(self._memory[slot])

    def use(self, slots: Sequence[int], change: int) -> None:
        with self._lock:
            for slot in slots:
                self._users[slot] += change
                assert self._users[slot] in (0, 1), f"two calls use staging slot {slot}"
                assert not self._puts[slot], f"staging slot {slot} changes during a put"

    def put_from(self, slots: Sequence[int], change: int) -> None:
        """Several stores may read a slot at a time."""
        with self._lock:
            for slot in slots:
                self._puts[slot] += change
                assert not self._users[slot], f"staging slot {slot} changes during a put"

    def slot_of(self, view: memoryview) -> int:
        return next(at for at, memory in enumerate(self._memory) if view.obj is memory)


class FakeCopies:
    """Blocks as bytes by id."""

    def __init__(self) -> None:
        self.blocks: dict[int, bytes] = {}
        self.calls = 0
        self.fail_at = -1
        self.before_copy: Callable[[], None] | None = None
        self._lock = threading.Lock()

    def _begin(self) -> None:
        with self._lock:
            number, self.calls = self.calls, self.calls + 1
        if self.before_copy is not None:
            self.before_copy()
        if number == self.fail_at:
            raise DriverError("a copy that was made to fail; arm no fault")

    def copy_out(self, ids: Sequence[int], staging: FakeStaging, slots: Sequence[int]) -> None:
        self._begin()
        assert len(ids) == len(slots) > 0
        staging.use(slots, 1)
        for block, slot in zip(ids, slots, strict=True):
            staging.view(slot)[:] = self.blocks[block]
        staging.use(slots, -1)

    def copy_in(self, staging: FakeStaging, slots: Sequence[int], ids: Sequence[int]) -> None:
        self._begin()
        assert len(ids) == len(slots) > 0
        staging.use(slots, 1)
        for block, slot in zip(ids, slots, strict=True):
            self.blocks[block] = bytes(staging.view(slot))
        staging.use(slots, -1)


@dataclass
class FakeDemotion:
    reason: str
    blocks: int
    seconds_left: float


@dataclass
class FakeBatch:
    ticket: int = 0
    ids: list[int] = field(default_factory=list)
    keys: bytes = b""


class FakePool(FakeCopies):
    """Cached blocks by age, and the pool's side of leaving. Block n has key n unless renamed."""

    max_cached_blocks = -1
    oldest_copyable_s = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.changed = threading.Condition()
        self.names: dict[int, bytes] = {}
        self.dirty: list[int] = []
        self.clean_ids: set[int] = set()
        self.batch: dict[int, list[int]] = {}
        self.taken: set[int] = set()
        """Used by an alloc while they left."""
        self.demotion: FakeDemotion | None = None
        self.is_attended = False
        self.tickets = 0
        self.most_asked: list[int] = []

    def put_dirty(self, ids: Sequence[int]) -> None:
        with self.changed:
            for block in ids:
                self.blocks[block] = record_of(block)
                self.names[block] = key_of(block)
                self.dirty.append(block)

    def use_tiers(self, *, reclaim_wait_s: float, limit_wait_s: float, sleep_wait_s: float) -> None:
        self.waits = (reclaim_wait_s, limit_wait_s, sleep_wait_s)

    def name_blocks(self, ids: Sequence[int], keys: bytes) -> None:
        with self.changed:
            for at, block in enumerate(ids):
                if block < 0:
                    raise BlockError("a block that is free")
                self.names[block] = keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]

    def mark_clean(self, ids: Sequence[int], keys: bytes) -> int:
        with self.changed:
            for at, block in enumerate(ids):
                if self.names.get(block) == keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]:
                    self.clean_ids.add(block)
            return len(ids)

    def forget_copies(self) -> int:
        with self.changed:
            count = len(self.clean_ids)
            self.dirty += sorted(self.clean_ids)
            self.clean_ids.clear()
            return count

    def next_demotion(self, timeout_s: float) -> FakeDemotion | None:
        with self.changed:
            self.is_attended = True
            self.changed.wait_for(
                lambda: self.demotion is not None or not self.is_attended, timeout_s
            )
            return self.demotion

    def stop_demotions(self) -> None:
        with self.changed:
            self.is_attended = False
            self.demotion = None
            self.changed.notify_all()

    def shrink(self, reason: str, seconds: float = DEADLINE_S) -> bool:
        """As who lowers a limit; answers whether all was cleaned."""
        with self.changed:
            self.demotion = FakeDemotion(reason, len(self.dirty), seconds)
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: self.demotion is None, DEADLINE_S)
            return not self.dirty

    def clean(self, timeout_s: float) -> int:
        if self.dirty:
            self.shrink("limit", timeout_s)
        return len(self.dirty)

    def begin_writeback(self, most: int) -> FakeBatch:
        with self.changed:
            self.most_asked.append(most)
            ids = self.dirty[:most]
            if not ids:
                self._settle()
                return FakeBatch()
            self.tickets += 1
            self.batch[self.tickets] = ids
            return FakeBatch(self.tickets, ids, b"".join(self.names[b] for b in ids))

    def still_unchanged(self, ticket: int) -> list[bool]:
        with self.changed:
            return [block not in self.taken for block in self.batch[ticket]]

    def end_writeback(self, ticket: int, copied: Sequence[bool]) -> int:
        with self.changed:
            ids = self.batch.pop(ticket, [])
            assert len(ids) == len(copied)
            cleaned = 0
            for block, is_copied in zip(ids, copied, strict=True):
                if block in self.taken:
                    self.dirty.remove(block)
                    self.taken.discard(block)
                elif is_copied:
                    self.dirty.remove(block)
                    self.clean_ids.add(block)
                    cleaned += 1
            if not self.dirty or not any(copied):
                self._settle()
            return cleaned

    def _settle(self) -> None:
        self.demotion = None
        self.changed.notify_all()

    def stats(self) -> dict[str, int]:
        with self.changed:
            cached = len(self.dirty) + len(self.clean_ids)
            return {
                "blocks_used": 0,
                "blocks_cached": cached,
                "blocks_clean": len(self.clean_ids),
                "blocks_available": 100,
                "blocks_demoted": 0,
                "blocks_dropped": 0,
                "allocs": 1,
                "frees": 1,
            }


class FakeStore(Store):
    """Records in a dict; fails, refuses or hangs as told."""

    def __init__(self, name: str, staging: FakeStaging, room: int = 1 << 30) -> None:
        self.name = name
        self.record_bytes = staging.record_bytes
        self.records: dict[bytes, bytes] = {}
        self.parents: dict[bytes, bytes | None] = {}
        self.held_keys: list[bytes] = []
        self.room = room
        self.displaces_beyond: int | None = None
        """How many records it holds: more displace the oldest."""
        self.calls = 0
        self.fail_at = -1
        """The call that answers that nothing went well."""
        self.raise_at = -1
        """The call that breaks the contract."""
        self.hang: threading.Event | None = None
        """What puts and gets wait for."""
        self.hanging = threading.Event()
        """Set when one waits."""
        self.before_call: Callable[[], None] | None = None
        self.is_closed = False
        self.namespace: Namespace | None = None
        self._staging = staging
        self._lock = threading.Lock()

    def _is_failing(self) -> bool:
        with self._lock:
            number, self.calls = self.calls, self.calls + 1
        assert not self.is_closed, "a closed store was called"
        if self.before_call is not None:
            self.before_call()
        if self.hang is not None:
            self.hanging.set()
            assert self.hang.wait(DEADLINE_S)
        if number == self.raise_at:
            raise ValueError("a store that breaks its contract")
        return number == self.fail_at

    def enter(self, namespace: Namespace) -> None:
        self.namespace = namespace

    def has(self, keys: bytes) -> list[bool]:
        return [key in self.records for key in split(keys)]

    def hold(self, keys: bytes) -> Hold:
        leading = []
        for key in split(keys):
            if key not in self.records:
                break
            leading.append(key)
        self.held_keys += leading

        def end() -> None:
            for key in leading:
                self.held_keys.remove(key)

        return Hold(len(leading), end)

    def put(
        self, keys: bytes, records: Sequence[memoryview], *, chain_after: bytes | None = None
    ) -> list[bool]:
        assert self._count_of(keys, records) > 0
        slots = [self._staging.slot_of(view) for view in records]
        self._staging.put_from(slots, 1)
        try:
            if self._is_failing():
                return [False] * len(records)
            stored = []
            parent = chain_after
            for key, record in zip(split(keys), records, strict=True):
                is_room = key in self.records or len(self.records) < self.room
                if is_room:
                    self.records[key] = bytes(record)
                    self.parents[key] = parent
                if self.displaces_beyond is not None and len(self.records) > self.displaces_beyond:
                    del self.records[next(iter(self.records))]
                stored.append(is_room)
                parent = key if chain_after is not None else None
            return stored
        finally:
            self._staging.put_from(slots, -1)

    def get(self, keys: bytes, into: Sequence[memoryview]) -> list[bool]:
        assert self._count_of(keys, into) > 0
        slots = [self._staging.slot_of(view) for view in into]
        self._staging.use(slots, 1)
        try:
            if self._is_failing():
                for view in into:
                    view[:] = b"\xee" * self.record_bytes
                return [False] * len(into)
            found = []
            for key, view in zip(split(keys), into, strict=True):
                record = self.records.get(key)
                view[:] = record if record is not None else b"\xee" * self.record_bytes
                found.append(record is not None)
            return found
        finally:
            self._staging.use(slots, -1)

    def erase(self, keys: bytes) -> int:
        if self._is_failing():
            return 0
        return sum(self.records.pop(key, None) is not None for key in split(keys))

    def erase_matching(self, selection: Selection) -> int:
        count = len(self.records)
        self.records.clear()
        return count

    def capacity(self) -> Capacity:
        most = self.displaces_beyond
        limit_bytes = None if most is None else most * self.record_bytes
        return Capacity(len(self.records) * self.record_bytes, limit_bytes, len(self.records))

    def set_limit(self, limit_bytes: int) -> None:
        raise InvalidArgumentError("a fake has no limit; give it room")

    def statistics(self) -> StoreStatistics:
        return StoreStatistics()

    def check_integrity(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True
