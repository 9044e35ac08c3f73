"""A store that keeps demoted blocks in host memory, in an elastic pool.

    store = HostStore(record_bytes, 8 << 30, settings=settings, name="llama-tier")
    store.enter(namespace)
    store.put(keys, records)
    store.close()

The pool is an instance: `kvctl list` shows it and `kvctl limit` sets its limit. It is a member of
the host's ledger, with a priority one below its engine's, so a model that needs host memory
reclaims it from here. Pages are mapped as records arrive; none are reserved.

Eviction: within the limit, the policy of the index decides. If memory is reclaimed for another
instance, or `kvctl` lowers the limit, the pool releases pages at once. It evicts the least recently
used records and first moves the other records of a page into free blocks of other pages. Held
records are never evicted. Evicted records leave the index before any caller learns of the eviction.

Records do not survive the process. There is no checksum: a read returns what was put, or a miss.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from kvelastic import _vmm
from kvelastic.config import Config, load
from kvelastic.device import selection
from kvelastic.device.selection import Device
from kvelastic.errors import IntegrityError, InvalidArgumentError, KvelasticError
from kvelastic.pool.layout import PageLayout
from kvelastic.pool.pool import ElasticPool, local_range, open_pool
from kvelastic.tiers.base import (
    KEY_BYTES,
    Capacity,
    Hold,
    Reservation,
    Selection,
    Store,
    StoreStatistics,
    check_size,
    each_key,
    keys_at,
)
from kvelastic.tiers.namespace import Namespace
from kvelastic.tiers.stores.host.blocks import HostBlocks
from kvelastic.tiers.stores.host.reservations import SlotReservations
from kvelastic.tiers.stores.host.slots import GONE
from kvelastic.tiers.stores.record_owner import owner_of, wanted_by
from kvelastic.units import MAX_PRIORITY, format_size

_log = logging.getLogger("kvelastic")

ALIGNMENT_BYTES = 4096
"""Alignment of blocks: a system page, so that a disk can be read directly into them."""

THERE, NO_ROOM = -1, -2
"""Results of a claim: the key is present or in progress; no slot is available."""

WAKE_WAIT_S = 5.0
"""How long to wait until a pool that slept because of a low limit is awake."""


class HostStore(Store):
    """A store in host memory. See the module text.

    Any thread may call. A call waits for other calls only while they update bookkeeping.
    `limit_bytes` counts whole mapped pages, as does `capacity().used_bytes`. With a limit below one
    page the store keeps nothing and its pool sleeps.
    """

    name = "host"

    def __init__(
        self,
        record_bytes: int,
        limit_bytes: int,
        *,
        settings: Config | None = None,
        name: str | None = None,
        model: str = "",
        policy: str = "slru",
        on: Device | None = None,
        max_records: int | None = None,
    ) -> None:
        """Create the pool and join the host's ledger. Maps no memory yet.

        `max_records` bounds the number of records, in addition to the limit in whole pages.
        `settings` provides the ledger's group, the host's capacity and the engine's priority.
        `name` is the instance's name (None: automatic). `on` replaces the default device
        `device.selection.host(settings)`. Raises `InvalidArgumentError` for an invalid size or
        policy, and whatever `open_pool` raises.
        """
        check_size("limit_bytes", limit_bytes)
        super().__init__(record_bytes)
        settings = load() if settings is None else settings
        device = selection.host(settings) if on is None else on
        self._layout = PageLayout.solve(
            -(-record_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES,
            1,
            page_size_bytes=settings.page_size_bytes,
            fewest_blocks=1,
        )
        # The range covers the largest limit that can be set: address space is free.
        pages = max(device.capacity_bytes // self._layout.page_bytes, 1)
        self._index = _vmm.TierIndex(1, policy)
        self._index_slots = self._index_reach = 1
        self._closed_slots: list[int] = []
        """Slots for which there is no room: closed in the index."""
        self._max_records = max_records
        self._set_room(0)
        self._pool = self._open(settings, device, pages, name, model)
        self._native: _vmm.Pool | None = self._pool.blocks
        """The pool's blocks; None once closed. Read without a lock."""
        self._blocks = HostBlocks(self._pool.blocks, self._forget)
        self._reservations = SlotReservations()
        # Lock order: _limit_lock, the pool's session, _lock, the pool's lock, the index's lock.
        self._limit_lock = threading.Lock()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._busy = 0
        self._owner_id: int | None = None
        self._closed = False
        self._sleeps_for_limit = False
        self.set_limit(limit_bytes)
        if self._limit_room() == 0 < limit_bytes:
            _log.warning(
                "The host tier's limit of %s is less than a page with a record, of %s: nothing is"
                " kept there. Set a higher one.",
                format_size(limit_bytes),
                format_size(self._layout.page_bytes),
            )

    def _open(
        self, settings: Config, device: Device, pages: int, name: str | None, model: str
    ) -> ElasticPool:
        own = replace(
            settings,
            kvcached_segment=False,
            limit=None,
            minimum=0,
            priority=max(settings.priority - 1, -MAX_PRIORITY),
            max_cached_tokens=-1,
            page_prealloc_enabled=False,
            min_reserved_pages=0,
            max_reserved_pages=0,
        )
        pool = open_pool(
            own,
            self._layout,
            pages,
            num_blocks=pages * self._layout.blocks_per_page,
            block_tokens=1,
            engine="tier",
            devices=[device],
            memory=local_range(device),
            model=model,
            name=name,
            movable=True,
        )
        pool.start_maintenance()
        return pool

    # --- records ---------------------------------------------------------------------------------

    def enter(self, namespace: Namespace) -> None:
        """Set the namespace of later puts."""
        with self._lock:
            self._owner_id = self._blocks.slots.owner_id_of(owner_of(namespace))

    def has(self, keys: bytes) -> list[bool]:
        """Return for each key whether its record is present."""
        count = self._count_of(keys)
        return self._index.has(keys) if self._followed() else [False] * count

    def leading(self, keys: bytes) -> tuple[int, int]:
        """Return how many leading keys are ready, and how many are ready or in progress."""
        self._count_of(keys)
        return self._index.leading(keys) if self._followed() else (0, 0)

    def _followed(self) -> bool:
        """Apply the pool's evictions to the index; return False once the store is closed."""
        native = self._native
        if native is not None and native.has_evicted:
            with self._lock:
                if not self._closed:
                    self._blocks.follow()
        return not self._closed

    def hold(self, keys: bytes) -> Hold:
        """Hold the leading keys that are present. Their blocks count as used, so they stay."""
        self._count_of(keys)
        with self._lock:
            if self._closed:
                return Hold()
            self._blocks.follow()
            while True:
                ticket, slots = self._index.hold(keys)
                blocks = self._blocks.hold(slots)
                if GONE not in blocks:
                    return Hold(len(slots), partial(self._release_lease, ticket, blocks))
                self._blocks.release(blocks)  # the pool evicted some: fewer keys lead now
                self._end_hold(ticket)

    def _release_lease(self, ticket: int, blocks: list[int]) -> None:
        with self._lock:
            if not self._closed:
                self._end_hold(ticket)
                self._blocks.release(blocks)
                self._follow_limit()

    def _end_hold(self, ticket: int) -> None:
        self._blocks.drop([slot for _, slot in self._index.release(ticket)])

    def reserve(self, keys: bytes, *, chain_after: bytes | None = None) -> Reservation | None:
        """Reserve slots for the missing keys; return None if not all fit.

        Does not wait for memory: the puts allocate it.
        """
        count = self._count_of(keys, None, chain_after)
        with self._lock:
            if self._entered() is None:
                return None
            self._blocks.follow()
            _, known = self._index.leading(keys)
            missing = count - known
            if missing > self._limit_room():
                return None  # check this before anything is displaced
            if missing:
                self._make_room(missing, self._pool.blocks.available_size())
            slots, displaced = self._index.claim(keys, chain_after)
            if displaced:
                self._drop_displaced(displaced)
            new = count - slots.count(THERE) - slots.count(NO_ROOM)
            ticket = self._reservations.add(keys, slots, new)
            if NO_ROOM in slots:
                self._index.abandon(self._reservations.give_up(ticket))
                return None
            return Reservation(slots, partial(self._give_up, ticket))

    def _give_up(self, ticket: int) -> None:
        """End a reservation."""
        with self._lock:
            keys = self._reservations.give_up(ticket)
            if keys and not self._closed:
                self._index.abandon(keys)
                self._follow_limit()

    def put(
        self, keys: bytes, records: Sequence[memoryview], *, chain_after: bytes | None = None
    ) -> list[bool]:
        """Store records and return for each key whether it is present. May map pages."""
        count = self._count_of(keys, records, chain_after)
        with self._lock:
            owner_id = self._entered()
            if owner_id is None:
                self._count(refused=count)
                return [False] * count
            self._busy += 1
        try:
            missing = count - sum(self._index.has(keys))
            try:
                self._pool.blocks.ensure(missing)  # maps pages if memory is available
            except KvelasticError:
                self._count(errors=1)
            with self._lock:
                self._blocks.follow()
                self._make_room(missing, self._pool.blocks.available_mapped())
                slots, displaced = self._index.claim(keys, chain_after)
                self._drop_displaced(displaced)
                for at, slot in self._reservations.take(keys).items():
                    slots[at] = slot
            self._fill(keys, records, slots, owner_id)
            return self._index.has(keys)
        finally:
            with self._lock:
                self._end_work()

    def _entered(self) -> int | None:
        """Return the current owner id; None if no record is accepted. The lock is held."""
        if self._owner_id is None:
            raise InvalidArgumentError("nothing can be put before enter() names a namespace")
        return None if self._closed or self._pool.blocks.is_asleep else self._owner_id

    def _fill(
        self, keys: bytes, records: Sequence[memoryview], slots: Sequence[int], owner_id: int
    ) -> None:
        """Write the records that got slots; refuse those for which there is no memory."""
        new = [at for at, slot in enumerate(slots) if slot >= 0]
        blocks: list[int] = []
        written = False
        try:
            try:
                blocks = self._blocks.take(len(new))
                _vmm.write_blocks(self._range, blocks, [records[at] for at in new[: len(blocks)]])
                written = True
            except BufferError as error:
                raise InvalidArgumentError(f"a record cannot be read: {error}") from None
            except InvalidArgumentError:
                raise
            except KvelasticError:
                self._count(errors=1)
        finally:
            with self._lock:
                kept = new[: len(blocks)] if written else []
                lost = new[len(kept) :]
                self._index.abandon(b"".join(keys_at(keys, at) for at in lost))
                if not written and blocks:
                    self._pool.blocks.free(blocks)
                self._blocks.follow()
                now_ns = time.monotonic_ns()
                for at, block in zip(kept, blocks, strict=False):
                    self._blocks.fill(slots[at], block, keys_at(keys, at), owner_id, now_ns)
                gone = self._index.commit(b"".join(keys_at(keys, at) for at in kept))
                self._blocks.drop([slot for _, slot in gone])  # erased during the write
                self._count(
                    puts=len(kept) - len(gone),
                    refused=len(lost) + slots.count(NO_ROOM) + len(gone),
                    bytes_written=len(kept) * self.record_bytes,
                )
                if written:
                    self._blocks.release(blocks)

    def evict(self, count: int) -> int:
        """Displace up to `count` records by policy and return how many were displaced."""
        check_size("count", count)
        with self._lock:
            if self._closed:
                return 0
            self._blocks.follow()
            displaced = self._index.displace(count)
            self._drop_displaced(displaced)
            return len(displaced)

    def get(self, keys: bytes, into: Sequence[memoryview]) -> list[bool]:
        """Read records and return for each key whether its view is complete."""
        count = self._count_of(keys, into)
        with self._lock:
            if self._closed:
                self._count(misses=count)
                return [False] * count
            self._blocks.follow()
            slots = [self._index.slot_of(key) for key in each_key(keys)]
            blocks = self._blocks.hold(slots)
            found = [block != GONE for block in blocks]
            self._busy += 1
        read = False
        try:
            _vmm.read_blocks(
                self._range,
                [block for block in blocks if block != GONE],
                [view for view, there in zip(into, found, strict=True) if there],
            )
            read = True
        except BufferError as error:
            raise InvalidArgumentError(f"a view cannot be written: {error}") from None
        finally:
            with self._lock:
                self._blocks.release(blocks)
                if read:
                    hits = sum(found)
                    self._count(hits=hits, misses=count - hits, bytes_read=hits * self.record_bytes)
                self._end_work()
        return found

    def erase(self, keys: bytes) -> int:
        """Erase these keys and return how many were present."""
        self._count_of(keys)
        with self._lock:
            return self._erase(keys)

    def erase_matching(self, selection: Selection) -> int:
        """Erase the selected records and return how many; age counts from the put."""
        with self._lock:
            self._blocks.follow()
            wanted = wanted_by(selection, time.monotonic())
            return self._erase(self._blocks.slots.keys_matching(wanted))

    def _erase(self, keys: bytes) -> int:
        if self._closed:
            return 0
        self._blocks.follow()
        there = sum(self._index.has(b"".join(dict.fromkeys(each_key(keys)))))
        self._blocks.drop([slot for _, slot in self._index.erase(keys)])
        return there

    # --- room ------------------------------------------------------------------------------------

    def capacity(self) -> Capacity:
        """Return the mapped bytes, the limit and the number of records."""
        with self._lock:
            if self._closed:
                return Capacity(0, 0, 0)
            self._blocks.follow()
            pool = self._pool.blocks
            limit_bytes = min(
                pool.limit_state()["limit_bytes"], self._pool.device_set.capacity_bytes
            )
            return Capacity(pool.mapped_bytes, limit_bytes, self._index.stats()["ready"])

    @property
    def least_limit_bytes(self) -> int:
        """Return the size of one page."""
        return self._layout.page_bytes

    def set_limit(self, limit_bytes: int) -> None:
        """Set the limit as `kvctl limit` does, but the index's policy selects the victims."""
        check_size("limit_bytes", limit_bytes)
        with self._limit_lock:
            self._set_limit(limit_bytes)

    def _set_limit(self, limit_bytes: int) -> None:
        with self._lock:
            if self._closed:
                return
            self._blocks.follow()
            self._follow_limit(limit_bytes)
            self._busy += 1
        try:
            self._move_together(limit_bytes)
            self._pool.blocks.set_limit(limit_bytes)
            if limit_bytes < self._layout.page_bytes:
                # Wake only a pool that this store put to sleep, not one put to sleep by an
                # operator.
                self._sleeps_for_limit |= not self._pool.blocks.is_asleep
                self._pool.blocks.sleep()
            elif self._sleeps_for_limit:
                self._pool.blocks.wake(timeout_s=WAKE_WAIT_S)
                self._sleeps_for_limit = False
        except KvelasticError:  # from the driver, or a ledger without space
            self._count(errors=1)
        finally:
            with self._lock:
                self._end_work()

    def _move_together(self, limit_bytes: int) -> None:
        """Compact the pool before its limit is lowered.

        Otherwise the pool, with the pages over the limit closed, would evict records that the
        policy keeps, because it has no free block to move them to.
        """
        pool = self._pool.blocks
        if not self._layout.page_bytes <= limit_bytes < pool.mapped_bytes:
            return
        try:
            while pool.compact():
                pass
        except KvelasticError:
            self._count(errors=1)

    def _make_room(self, count: int, available: int) -> None:
        """Give the index as many free slots as there are free blocks, at most `count`.

        The index is then full when memory is full, so its policy selects the victims, not the pool.
        `available` counts free and cached blocks, in mapped pages only or in mappable pages too.
        """
        free = max(available - self._pool.blocks.stats()["blocks_cached"], 0)
        have = self._index.stats()
        in_slots = have["ready"] + have["pending"]
        self._set_room(min(in_slots + min(count, free), self._limit_room()))

    def _follow_limit(self, limit_bytes: int | None = None) -> None:
        """Shrink the index to the number of records that fit the limit."""
        room = self._index_slots - len(self._closed_slots)
        self._set_room(min(room, self._limit_room(limit_bytes)))

    def _limit_room(self, limit_bytes: int | None = None) -> int:
        """Return the number of records within a limit; None: the pool's current limit."""
        if limit_bytes is None:
            pool_limit_bytes = int(self._pool.blocks.limit_state()["effective_limit_bytes"])
            limit_bytes = 0 if self._sleeps_for_limit else pool_limit_bytes
        pages = min(limit_bytes // self._layout.page_bytes, self._pool.blocks.geometry.pages)
        room = max(pages * self._layout.blocks_per_page - 1, 0)  # one is the null block
        return room if self._max_records is None else min(room, self._max_records)

    def _set_room(self, room: int) -> None:
        """Let the index hold at most `room` records; records above that are evicted by policy."""
        now = self._index_slots - len(self._closed_slots)
        if room > now:
            kept = max(len(self._closed_slots) - (room - now), 0)
            self._index.open(self._closed_slots[kept:])
            del self._closed_slots[kept:]
            if room > self._index_slots:
                if room > self._index_reach:  # doubles, so that tables are not copied each time
                    self._index_reach = 2 * room
                    self._index.resize(self._index_reach)
                self._index.resize(room)
                self._index_slots = room
        elif room < now:
            slots, displaced = self._index.close_by_policy(now - room)
            self._closed_slots += slots
            if displaced:
                self._drop_displaced(displaced)

    def _drop_displaced(self, displaced: Sequence[tuple[bytes, int]]) -> None:
        self._count(evicted=len(displaced))
        self._blocks.drop([slot for _, slot in displaced])

    def _forget(self, keys: bytes) -> None:
        """Remove records that the pool evicted from the index."""
        self._count(evicted=len(keys) // KEY_BYTES)
        self._index.erase(keys)

    # --- life ------------------------------------------------------------------------------------

    def statistics(self) -> StoreStatistics:
        """Return the counts since the store was opened."""
        with self._lock:
            if not self._closed:
                self._blocks.follow()
        return super().statistics()

    def check_integrity(self) -> None:
        """Compare index, slots and pool. Blocks of puts in progress are not counted."""
        with self._lock:
            if self._closed:
                return
            self._busy += 1
        pool = self._pool.blocks
        try:
            # In a session the pool moves no block: those are used twice during a move.
            with pool.session(), self._lock:
                pool.check_integrity()
                self._index.check_integrity()
                self._reservations.check_integrity()
                self._blocks.check_integrity(quiet=self._busy == 1)
                slots = self._blocks.slots
                known = sum(self._index.slot_of(slots.key_of(at)) == at for at in slots.slots())
                ready = self._index.stats()["ready"]
                if known != ready:
                    raise IntegrityError(
                        f"the index has {ready} records, and {known} lie in blocks"
                    )
        finally:
            with self._lock:
                self._end_work()

    def close(self) -> None:
        """Close the pool and drop all records. Waits for copies in progress."""
        with self._lock:
            self._closed = True
            while self._busy:
                self._idle.wait()
            native, self._native = self._native, None
        if native is not None:
            self._pool.close(discard=True)
            # Descriptors close with the last reference, and `_blocks` refers back to this object.
            del self._pool, self._blocks

    def _end_work(self) -> None:
        self._busy -= 1
        if not self._busy:
            self._idle.notify_all()

    @property
    def _range(self) -> _vmm.Range:
        memory = self._pool.memory
        assert isinstance(memory, _vmm.Range)
        return memory
