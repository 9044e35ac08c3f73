"""Demoted blocks in the host's memory: an elastic pool of its own.

    store = HostStore(record_bytes, 8 << 30, settings=settings, name="llama-tier")
    store.enter(namespace)
    store.put(keys, records)
    store.close()

The pool is an instance like an engine's: `kvctl list` shows it, `kvctl limit` sets its limit,
and it is a member of the host's ledger, with a priority one below its engine's: a model that needs
host memory takes it from here. Pages come as records come; nothing is set aside.

Who goes first: within the limit, what the policy of the index says. Where memory is taken for
others, or the limit is lowered with `kvctl`, the pool gives pages back at once and evicts the
records that were used least lately; it moves those of a page into holes of others first. Leased
records stay through all of it, and what the pool took is gone from the index before anybody is told
of it.

Records do not survive the process. There is no checksum: what is read is what was put, or gone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from kvelastic import _vmm, device
from kvelastic.config import Config, load
from kvelastic.device import Device
from kvelastic.errors import IntegrityError, InvalidArgumentError, KvelasticError
from kvelastic.layout import PageLayout
from kvelastic.pool import ElasticPool, local_range, open_pool
from kvelastic.sizes import MAX_PRIORITY, format_size
from kvelastic.tiers.base import (
    KEY_BYTES,
    Capacity,
    Lease,
    Reservation,
    Selection,
    Store,
    StoreStatistics,
)
from kvelastic.tiers.displacing import displace, unlikely_keys
from kvelastic.tiers.host_blocks import HostBlocks
from kvelastic.tiers.host_places import HostPlaces, HostReservation
from kvelastic.tiers.host_slots import GONE
from kvelastic.tiers.namespace import Namespace

_log = logging.getLogger("kvelastic")

ALIGNMENT_BYTES = 4096
"""Blocks begin at multiples of a system page, so that a disk can be read straight into them."""

THERE, NO_ROOM = -1, -2
"""What a claim answers for a key that is there or on its way, and where no slot is to be had."""

WAKE_WAIT_S = 5.0
"""How long a pool that slept for want of a limit waits to be awake again."""


class HostStore(Store):
    """See the module. Any thread; a call waits for others only as long as they keep their books.

    `limit_bytes` is of whole pages with all that they hold; `capacity().used_bytes` is compared
    with it. A limit below one page holds nothing: the pool sleeps then.
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
        """Make the pool and join the host's ledger; maps nothing yet.

        `max_records` bounds the records besides the limit, which is of whole pages. `settings` give
        the ledger's group, the host's capacity and the engine's priority; `name` is the instance's
        (None: automatic), `on` another device than `device.host(settings)`. Raises
        `InvalidArgumentError` for a bad size or policy, and what `open_pool` raises.
        """
        _refuse_negative("limit_bytes", limit_bytes)
        if isinstance(record_bytes, bool) or not isinstance(record_bytes, int) or record_bytes < 1:
            raise InvalidArgumentError(f"record_bytes={record_bytes!r}; it must be 1 or more")
        self.record_bytes = record_bytes
        settings = load() if settings is None else settings
        place = device.host(settings) if on is None else on
        self._layout = PageLayout.solve(
            -(-record_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES,
            1,
            page_size_bytes=settings.page_size_bytes,
            fewest_blocks=1,
        )
        # The range is as long as the largest limit that can be set: addresses cost nothing.
        pages = max(place.capacity_bytes // self._layout.page_bytes, 1)
        self._index = _vmm.TierIndex(1, policy)
        self._index_slots = self._index_reach = 1
        self._ballast: list[bytes] = []
        self._max_records = max_records
        self._ballast += self._new_ballast(1)
        self._pool = self._open(settings, place, pages, name, model)
        self._native: _vmm.Pool | None = self._pool.blocks
        """The pool's blocks until the store is closed; read without a lock."""
        self._name = self._pool.name
        self._blocks = HostBlocks(self._pool.blocks, self._forget)
        self._places = HostPlaces()
        # In this order: the limit's, the pool's session, this one, the pool's own and the index's.
        self._limit_lock = threading.Lock()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._busy = 0
        self._world: int | None = None
        self._closed = False
        self._sleeps_for_limit = False
        self._counts = dict.fromkeys(StoreStatistics.__dataclass_fields__, 0)
        self.set_limit(limit_bytes)
        if self._limit_room() == 0 < limit_bytes:
            _log.warning(
                "The host tier's limit of %s is less than a page with a record, of %s: nothing is"
                " kept there. Set a higher one.",
                format_size(limit_bytes),
                format_size(self._layout.page_bytes),
            )

    def _open(
        self, settings: Config, place: Device, pages: int, name: str | None, model: str
    ) -> ElasticPool:
        own = replace(
            settings,
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
            devices=[place],
            memory=local_range(place),
            model=model,
            name=name,
            movable=True,
        )
        pool.start_keeper()
        return pool

    @property
    def instance(self) -> str:
        """What `kvctl` calls the pool."""
        return self._name

    # --- records ---------------------------------------------------------------------------------

    def enter(self, namespace: Namespace) -> None:
        """As `Store.enter`."""
        with self._lock:
            self._world = self._blocks.slots.world_of(namespace)

    def has(self, keys: bytes) -> list[bool]:
        """As `Store.has`."""
        count = self._count_of(keys)
        return self._index.has(keys) if self._followed() else [False] * count

    def leading(self, keys: bytes) -> tuple[int, int]:
        """As `Store.leading`."""
        self._count_of(keys)
        return self._index.leading(keys) if self._followed() else (0, 0)

    def _followed(self) -> bool:
        """Learn what the pool has evicted; False once the store is closed."""
        native = self._native
        if native is not None and native.has_evicted:
            with self._lock:
                if not self._closed:
                    self._blocks.follow()
        return not self._closed

    def lease(self, keys: bytes) -> Lease:
        """As `Store.lease`; leased records are blocks in use, which nobody takes."""
        self._count_of(keys)
        with self._lock:
            if self._closed:
                return _HostLease(self, 0, None, [])
            self._blocks.follow()
            while True:
                ticket, slots = self._index.lease(keys)
                blocks = self._blocks.hold(slots)
                if GONE not in blocks:
                    return _HostLease(self, len(slots), ticket, blocks)
                self._blocks.release(blocks)  # some were evicted meanwhile: fewer lead now
                self._end_lease(ticket)

    def _release_lease(self, ticket: int, blocks: list[int]) -> None:
        with self._lock:
            if not self._closed:
                self._end_lease(ticket)
                self._blocks.release(blocks)
                self._follow_limit()

    def _end_lease(self, ticket: int) -> None:
        self._blocks.drop([slot for _, slot in self._index.release(ticket)])

    def reserve(self, keys: bytes, *, chain_after: bytes | None = None) -> Reservation | None:
        """As `Store.reserve`. Waits for no memory: that comes with the records, if it comes."""
        self._count_of(keys)
        self._check_chain(chain_after)
        with self._lock:
            if self._entered() is None:
                return None
            self._blocks.follow()
            _, known = self._index.leading(keys)
            missing = len(keys) // KEY_BYTES - known
            if missing > self._limit_room():
                return None  # before anything is displaced for it
            if missing:
                self._make_room(missing, self._pool.blocks.available_size())
            slots, displaced = self._index.claim(keys, chain_after)
            if displaced:
                self._drop_displaced(displaced)
            there = slots.count(THERE)
            count = len(slots) - there - slots.count(NO_ROOM)
            ticket = self._places.add(keys, slots, count)
            if NO_ROOM in slots:
                self._index.abandon(self._places.give_up(ticket))
                return None
            return HostReservation(slots, ticket, self._give_up)

    def _give_up(self, ticket: int) -> None:
        """A reservation ends."""
        with self._lock:
            keys = self._places.give_up(ticket)
            if keys and not self._closed:
                self._index.abandon(keys)
                self._follow_limit()

    def put(
        self, keys: bytes, records: Sequence[memoryview], *, chain_after: bytes | None = None
    ) -> list[bool]:
        """As `Store.put`."""
        count = self._count_of(keys, records)
        self._check_chain(chain_after)
        with self._lock:
            world = self._entered()
            if world is None:
                self._counts["refused"] += count
                return [False] * count
            self._busy += 1
        try:
            missing = count - sum(self._index.has(keys))
            failed = self._get_memory(missing)
            with self._lock:
                self._counts["errors"] += failed
                self._blocks.follow()
                self._make_room(missing, self._pool.blocks.available_mapped())
                slots, displaced = self._index.claim(keys, chain_after)
                self._drop_displaced(displaced)
                for at, slot in self._places.take(keys).items():
                    slots[at] = slot
            self._fill(keys, records, slots, world)
            return self._index.has(keys)
        finally:
            with self._lock:
                self._end_work()

    def _entered(self) -> int | None:
        """Whose records come now; None where none is taken. The lock is held."""
        if self._world is None:
            raise InvalidArgumentError("nothing can be put before enter() names a namespace")
        return None if self._closed or self._pool.blocks.is_asleep else self._world

    def _fill(
        self, keys: bytes, records: Sequence[memoryview], slots: Sequence[int], world: int
    ) -> None:
        """Write what there are slots for; what finds no memory is refused."""
        new = [at for at, slot in enumerate(slots) if slot >= 0]
        blocks: list[int] = []
        written = False
        failed = False
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
                failed = True
        finally:
            with self._lock:
                kept = new[: len(blocks)] if written else []
                lost = new[len(kept) :]
                self._counts["errors"] += failed
                self._counts["refused"] += len(lost) + slots.count(NO_ROOM)
                self._index.abandon(b"".join(_key(keys, at) for at in lost))
                if not written and blocks:
                    self._pool.blocks.free(blocks)
                self._blocks.follow()
                now_s = time.monotonic()
                for at, block in zip(kept, blocks, strict=False):
                    self._blocks.fill(slots[at], block, _key(keys, at), world, now_s)
                gone = self._index.commit(b"".join(_key(keys, at) for at in kept))
                self._blocks.drop([slot for _, slot in gone])  # erased while they were written
                self._counts["puts"] += len(kept) - len(gone)
                self._counts["refused"] += len(gone)
                self._counts["bytes_written"] += len(kept) * self.record_bytes
                if written:
                    self._blocks.release(blocks)

    def evict(self, count: int) -> int:
        """As `Store.evict`."""
        _refuse_negative("count", count)
        with self._lock:
            if self._closed:
                return 0
            self._blocks.follow()
            displaced = displace(self._index, count)
            self._drop_displaced(displaced)
            return len(displaced)

    def get(self, keys: bytes, into: Sequence[memoryview]) -> list[bool]:
        """As `Store.get`."""
        count = self._count_of(keys, into)
        with self._lock:
            if self._closed:
                self._counts["misses"] += count
                return [False] * count
            self._blocks.follow()
            slots = [self._index.slot_of(_key(keys, at)) for at in range(count)]
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
                    self._counts["hits"] += hits
                    self._counts["misses"] += count - hits
                    self._counts["bytes_read"] += hits * self.record_bytes
                self._end_work()
        return found

    def erase(self, keys: bytes) -> int:
        """As `Store.erase`."""
        self._count_of(keys)
        with self._lock:
            return self._erase(keys)

    def erase_matching(self, selection: Selection) -> int:
        """As `Store.erase_matching`; the age of a record is the time since it was put."""
        with self._lock:
            self._blocks.follow()
            return self._erase(self._blocks.slots.keys_matching(selection, time.monotonic()))

    def _erase(self, keys: bytes) -> int:
        if self._closed:
            return 0
        self._blocks.follow()
        each = [_key(keys, at) for at in range(len(keys) // KEY_BYTES)]
        there = sum(self._index.has(b"".join(dict.fromkeys(each))))
        self._blocks.drop([slot for _, slot in self._index.erase(keys)])
        return there

    # --- room ------------------------------------------------------------------------------------

    def capacity(self) -> Capacity:
        """As `Store.capacity`; used is what is mapped."""
        with self._lock:
            if self._closed:
                return Capacity(0, 0, 0)
            self._blocks.follow()
            pool = self._pool.blocks
            limit_bytes = min(pool.limit_state()["limit_bytes"], self._pool.places.capacity_bytes)
            return Capacity(pool.mapped_bytes, limit_bytes, self._index.stats()["ready"])

    @property
    def least_limit_bytes(self) -> int:
        """As `Store.least_limit_bytes`: a page."""
        return self._layout.page_bytes

    def set_limit(self, limit_bytes: int) -> None:
        """As `Store.set_limit`; the same as `kvctl limit` but for who goes: the policy says it."""
        _refuse_negative("limit_bytes", limit_bytes)
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
                # One that an operator has put to sleep is woken by nobody else.
                self._sleeps_for_limit |= not self._pool.blocks.is_asleep
                self._pool.blocks.sleep()
            elif self._sleeps_for_limit:
                self._pool.blocks.wake(timeout_s=WAKE_WAIT_S)
                self._sleeps_for_limit = False
        except KvelasticError:  # of the driver, or of a ledger that has no room
            with self._lock:
                self._counts["errors"] += 1
        finally:
            with self._lock:
                self._end_work()

    def _move_together(self, limit_bytes: int) -> None:
        """Before a lower limit: the pool alone, with the pages over the limit closed, would evict
        some of what the policy has left, for want of a place to move it to."""
        pool = self._pool.blocks
        if not self._layout.page_bytes <= limit_bytes < pool.mapped_bytes:
            return
        try:
            while pool.compact():
                pass
        except KvelasticError:
            with self._lock:
                self._counts["errors"] += 1

    def _limit_bytes(self) -> int:
        return int(self._pool.blocks.limit_state()["effective_limit_bytes"])

    def _get_memory(self, count: int) -> bool:
        """Have pages mapped for `count` records where there are any; True: the driver failed."""
        try:
            self._pool.blocks.ensure(count)
        except KvelasticError:
            return True
        return False

    def _make_room(self, count: int, available: int) -> None:
        """Give the index as many free slots as there are free blocks, `count` at most.

        So the index is full when memory is, and the policy says who goes, not the pool.
        `available` blocks are free or cached: those of mapped pages, or those that could be had.
        """
        free = max(available - self._pool.blocks.stats()["blocks_cached"], 0)
        have = self._index.stats()
        in_slots = have["ready"] + have["pending"] - len(self._ballast)
        self._set_room(min(in_slots + min(count, free), self._limit_room()))

    def _follow_limit(self, limit_bytes: int | None = None) -> None:
        """Have the index hold no more records than the limit has room for."""
        room = self._index_slots - len(self._ballast)
        self._set_room(min(room, self._limit_room(limit_bytes)))

    def _limit_room(self, limit_bytes: int | None = None) -> int:
        """Records within a limit; None: that of the pool, whoever has set it."""
        if limit_bytes is None:
            limit_bytes = 0 if self._sleeps_for_limit else self._limit_bytes()
        pages = min(limit_bytes // self._layout.page_bytes, self._pool.blocks.geometry.pages)
        room = max(pages * self._layout.blocks_per_page - 1, 0)  # one is the null block
        return room if self._max_records is None else min(room, self._max_records)

    def _set_room(self, room: int) -> None:
        """Have the index hold `room` records at most; what is over it goes by policy.

        The index cannot shrink by policy, so what it may not hold is filled with *ballast*: keys
        that are claimed and never put.
        """
        now = self._index_slots - len(self._ballast)
        if room > now:
            back = [self._ballast.pop() for _ in range(min(room - now, len(self._ballast)))]
            self._index.abandon(b"".join(back))
            if room > self._index_slots:
                if room > self._index_reach:  # so that its tables are not copied each time
                    self._index_reach = 2 * room
                    self._index.resize(self._index_reach)
                self._index.resize(room)
                self._index_slots = room
        elif room < now:
            self._ballast += self._new_ballast(now - room)

    def _new_ballast(self, count: int) -> list[bytes]:
        """Displace `count` records, leased ones excepted; answers the keys that hold their room."""
        names = unlikely_keys(count)
        slots, displaced = self._index.claim(b"".join(names), None)
        if displaced:
            self._drop_displaced(displaced)
        return [name for name, slot in zip(names, slots, strict=True) if slot >= 0]

    def _drop_displaced(self, displaced: Sequence[tuple[bytes, int]]) -> None:
        self._counts["evicted"] += len(displaced)
        self._blocks.drop([slot for _, slot in displaced])

    def _forget(self, keys: bytes) -> None:
        """The pool has evicted these."""
        self._counts["evicted"] += len(keys) // KEY_BYTES
        self._index.erase(keys)

    # --- life ------------------------------------------------------------------------------------

    def statistics(self) -> StoreStatistics:
        """As `Store.statistics`."""
        with self._lock:
            if not self._closed:
                self._blocks.follow()
            return StoreStatistics(**self._counts)

    def check_integrity(self) -> None:
        """As `Store.check_integrity`; blocks of puts on their way are not counted up."""
        with self._lock:
            if self._closed:
                return
            self._busy += 1
        pool = self._pool.blocks
        pool.enter()  # blocks that the pool moves are taken twice meanwhile
        try:
            with self._lock:
                pool.check_integrity()
                self._index.check_integrity()
                self._places.check_integrity()
                self._blocks.check_integrity(quiet=self._busy == 1)
                slots = self._blocks.slots
                known = sum(self._index.slot_of(slots.key_of(at)) == at for at in slots.slots())
                ready = self._index.stats()["ready"]
                if known != ready:
                    raise IntegrityError(
                        f"the index has {ready} records, and {known} lie in blocks"
                    )
        finally:
            pool.exit()
            with self._lock:
                self._end_work()

    def close(self) -> None:
        """As `Store.close`; waits for copies on their way. All records are gone."""
        with self._lock:
            self._closed = True
            while self._busy:
                self._idle.wait()
            native, self._native = self._native, None
        if native is not None:
            self._pool.close(discard=True)
            # Descriptors are closed with the last reference, and `_blocks` refers back to this.
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


class _HostLease(Lease):
    """Records that are blocks in use until `release()`."""

    def __init__(self, store: HostStore, count: int, ticket: int | None, blocks: list[int]) -> None:
        self.count = count
        self._store = store
        self._ticket = ticket
        self._blocks = blocks
        self._lock = threading.Lock()

    def release(self) -> None:
        """As `Lease.release`."""
        with self._lock:
            ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self._store._release_lease(ticket, self._blocks)


def _key(keys: bytes, at: int) -> bytes:
    return keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]


def _refuse_negative(what: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidArgumentError(f"{what}={value!r} is not accepted; give bytes, 0 or more")
