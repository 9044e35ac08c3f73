"""A store that keeps demoted blocks on disk, in large files in one or more folders.

    store = DiskStore(["/mnt/nvme0/kv", "/mnt/nvme1/kv"], record_bytes, limit_bytes=200 << 30)
    store.enter(namespace)
    store.put(keys, views)

Each slot of a file holds one record. Stored records survive a restart, a SIGKILL and a power loss,
except those of the last moments. Each record has a checksum that is seeded with its key, and every
read verifies it. An incomplete record counts as `torn` and is never served. Opening a store reads
the tables of the files, not the records, and adopts the files of engines that have exited.

Only this user can access the folders (mode 0700, files 0600). They contain the KV of prompts
unencrypted, from which much of the text can be recovered. `erase` makes records unreadable through
the file system, including the bytes of records that were displaced earlier. The device may keep the
bytes until the file system reuses their blocks.

The engines of a machine share the folders, and the limit applies to the folders, not to one engine.
Space is given out first come, first served. With n live engines, an engine that has less than 1/n
of the limit gets the difference from engines that have more (room.py). An engine finds its own
records. It also finds records of engines that have exited, when it opens the store or needs space.
It does not read the records of running engines.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, Literal

from kvelastic import _vmm
from kvelastic.errors import InvalidArgumentError
from kvelastic.tiers.base import NO_KEY, Capacity, Hold, Selection, check_size, keys_at
from kvelastic.tiers.namespace import Namespace
from kvelastic.tiers.stores.disk.file import RecordTransfer, carry, map_bytes, room_for
from kvelastic.tiers.stores.disk.format import Entry, Geometry, aligned, largest_within
from kvelastic.tiers.stores.disk.state import DiskState
from kvelastic.tiers.stores.record_owner import Owner, owner_of, wanted_by
from kvelastic.units import format_size

_log = logging.getLogger("kvelastic")

MAX_RECORD_BYTES: Final = 1 << 32
MAX_LIMIT_BYTES: Final = (1 << 62) - 1
DEPTH: Final = 32
"""Maximum number of records of one call that are in flight at once."""


class DiskStore(DiskState):
    """A store on disk, shared by the engines of a machine. See the module text.

    Any thread may call; `has` and `hold` never wait for a disk. One lock guards slots, files and
    statistics. It is not held during record I/O. It is held while space is allocated or released
    and while records are erased.
    """

    name = "disk"

    def __init__(
        self,
        folders: Sequence[str | os.PathLike[str]],
        record_bytes: int,
        limit_bytes: int,
        namespace: Namespace | None = None,
        *,
        policy: str = "slru",
        daily_write_bytes: int | None = None,
        io: Literal["auto", "io_uring", "threads"] | _vmm.RecordIo = "auto",
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Open the folders and adopt the files of engines that have exited.

        `limit_bytes` bounds the files in the folders together, including other engines' files.
        `daily_write_bytes` bounds the bytes written per day (UTC) by all engines that set it,
        together. `io` may be a test double. `clock` and `wall_clock` return seconds.

        If the file system refuses a folder, the store leaves the folder out and counts an error.
        Without any usable folder the store stays empty. Raises `InvalidArgumentError` if a folder
        is accessible to other users or a size is invalid, and `DeviceUnavailableError` if io_uring
        is requested but unavailable.
        """
        if not 0 < record_bytes <= MAX_RECORD_BYTES:
            raise InvalidArgumentError(
                f"records of {record_bytes} bytes; give 1 to {MAX_RECORD_BYTES}"
            )
        check_size("limit_bytes", limit_bytes, most=MAX_LIMIT_BYTES)
        if not folders:
            raise InvalidArgumentError("a disk store without folders; give one or more")
        self._wall_clock = wall_clock
        self._io = _vmm.RecordIo(io, DEPTH) if isinstance(io, str) else io
        self._owner = owner_of(namespace or Namespace(model=""))
        super().__init__(
            folders,
            record_bytes,
            limit_bytes,
            policy,
            daily_write_bytes,
            clock,
            wall_clock,
        )
        _stores.add(self)
        room_bytes = limit_bytes - map_bytes(limit_bytes)
        if largest_within(record_bytes, room_bytes).slots == 0 < limit_bytes:
            _log.warning(
                "The disk tier's limit of %s has no room for a file with one record of %s: nothing"
                " is kept there. Set a higher one.",
                format_size(limit_bytes),
                format_size(record_bytes),
            )

    # --- the contract -----------------------------------------------------------------------------

    def enter(self, namespace: Namespace) -> None:
        """Set the namespace of later puts; a put in progress keeps the previous one."""
        with self._changed:
            self._owner = owner_of(namespace)

    def has(self, keys: bytes) -> list[bool]:
        """Return for each key whether its record is readable. Does not wait for a disk.

        Returns False for all keys while reads are suspended after errors.
        """
        count = self._count_of(keys)
        if self._closed or not self._reads.allows_calls:
            return [False] * count
        return self._index.has(keys)

    def hold(self, keys: bytes) -> Hold:
        """Hold the leading keys that are present. Does not wait for a disk.

        The hold is empty while reads are suspended after errors.
        """
        self._count_of(keys)
        if self._closed or not self._reads.allows_calls:
            return Hold()
        ticket, slots = self._index.hold(keys)
        return Hold(len(slots), partial(self._release, ticket))

    def put(
        self, keys: bytes, records: Sequence[memoryview], *, chain_after: bytes | None = None
    ) -> list[bool]:
        """Store records and return for each key whether it is present. Blocks until written."""
        count = self._count_of(keys, records, chain_after)
        transfers, owner = self._begin_put(keys, count, chain_after)
        if transfers:
            stored: list[tuple[RecordTransfer, Entry]] = []
            try:
                stored = self._write(transfers, records, owner)
            finally:
                self._end_put(transfers, stored)
        return self.has(keys)

    def get(self, keys: bytes, into: Sequence[memoryview]) -> list[bool]:
        """Read records and return for each key whether its view is complete. Blocks until read."""
        count = self._count_of(keys, into)
        transfers, tickets = self._begin_get(keys, count)
        answers = [False] * count
        torn: list[RecordTransfer] = []
        try:
            if transfers:
                results = carry(self._io.read, transfers, into)
                for transfer, (moved, checksum) in zip(transfers, results, strict=True):
                    whole = moved == self.record_bytes and checksum == transfer.checksum
                    answers[transfer.at] = whole
                    if moved >= 0 and not whole:
                        torn.append(transfer)
                self._judge(self._reads, results)
        finally:
            self._end_get(tickets, torn)
        hits = sum(answers)
        self._count(
            hits=hits, misses=count - hits, torn=len(torn), bytes_read=hits * self.record_bytes
        )
        return answers

    def erase(self, keys: bytes) -> int:
        """Erase these keys and return how many were present.

        Waits for puts in progress and for the disk.
        """
        self._count_of(keys)
        with self._alone():
            return self._erase(keys)

    def erase_matching(self, selection: Selection) -> int:
        """Erase the selected records, including those in files of exited engines; return how many.

        Running engines erase their own records. The bytes of displaced and damaged records are
        erased whatever their owner.
        """
        now_s = self._wall_clock()
        wanted = wanted_by(selection, now_s)
        with self._alone():
            table = self._table
            keys = []
            for slot in table.occupied():
                owner = table.owner(slot)
                if owner is not None and wanted(owner, table.stored_ns(slot)):
                    keys.append(table.key(slot))
            erased = self._erase(b"".join(keys))
            return erased + self._erase_left_behind(selection, now_s)

    def evict(self, count: int) -> int:
        """Displace up to `count` records by policy and return how many were displaced.

        Waits for puts in progress and for the disk.
        """
        with self._alone():
            if self._closed:
                return 0
            displaced = self._index.displace(count)
            self._count(evicted=len(displaced))
            with self._medium(self._writes):
                self._room.forget(slot for _, slot in displaced)
            return len(displaced)

    def capacity(self) -> Capacity:
        """Return the size of the records held.

        Files take more: sizes are rounded up, space reserved.
        """
        with self._changed:
            self._look()
            records = 0 if self._closed else self._index.stats()["ready"]
            return Capacity(records * self.record_bytes, self._room.limit_bytes, records)

    @property
    def least_limit_bytes(self) -> int:
        """Return the size of a file with one record."""
        return room_for(Geometry(self.record_bytes, 1).file_bytes)

    def set_limit(self, limit_bytes: int) -> None:
        """Set the limit; freed space is punched out of files, or whole files are removed."""
        check_size("limit_bytes", limit_bytes, most=MAX_LIMIT_BYTES)
        with self._changed:
            if self._closed:
                return
            with self._medium(self._growth):
                self._room.set_limit(limit_bytes)

    # --- putting ----------------------------------------------------------------------------------

    def _begin_put(
        self, keys: bytes, count: int, chain_after: bytes | None
    ) -> tuple[list[RecordTransfer], Owner]:
        """Claim slots for new records as far as space, budget and disk allow.

        Return their owner too.
        """
        nothing: list[RecordTransfer] = []
        with self._changed:
            self._changed.wait_for(lambda: not self._erasing)
            there = self._index.has(keys)
            new = count - sum(there)
            if self._closed or not self._writes.allows_calls:
                self._count(refused=new)
                return nothing, self._owner
            if new == 0:
                return nothing, self._owner
            granted = self._budget.take(new, aligned(self.record_bytes))
            keys = _with_so_many_new(keys, there, granted)
            self._count(refused=new - granted)
            self._look()
            self._grow(granted)
            slots, displaced = self._index.claim(keys, chain_after)
            self._count(refused=slots.count(-2), evicted=len(displaced))
            transfers: list[RecordTransfer] = []
            with self._medium(self._writes):
                transfers = self._place(keys, chain_after, slots, displaced)
            if not transfers:
                claimed = [keys_at(keys, at) for at, slot in enumerate(slots) if slot >= 0]
                self._index.abandon(b"".join(claimed))
                self._count(refused=len(claimed))
            self._budget.give_back(granted - len(transfers), aligned(self.record_bytes))
            self._writing += 1 if transfers else 0
            return transfers, self._owner

    def _place(
        self,
        keys: bytes,
        chain_after: bytes | None,
        slots: Sequence[int],
        displaced: Iterable[tuple[bytes, int]],
    ) -> list[RecordTransfer]:
        """Return where each record goes. Clears the displaced entries."""
        self._room.forget(slot for _, slot in displaced)
        transfers = []
        for at, slot in enumerate(slots):
            if slot >= 0:
                file, own = self._table.place(slot)
                parent = NO_KEY
                if chain_after is not None:
                    parent = keys_at(keys, at - 1) if at else chain_after
                transfers.append(
                    RecordTransfer(at, keys_at(keys, at), slot, file, own, parent=parent)
                )
        return transfers

    def _write(
        self, transfers: list[RecordTransfer], records: Sequence[memoryview], owner: Owner
    ) -> list[tuple[RecordTransfer, Entry]]:
        """Write records, then their table entries; return the completely written ones."""
        results = carry(self._io.write, transfers, records)
        stored_ns = max(0, int(self._wall_clock() * 1e9))
        stored: list[tuple[RecordTransfer, Entry]] = []
        for transfer, (moved, checksum) in zip(transfers, results, strict=True):
            if moved != self.record_bytes:
                continue
            entry = Entry(
                transfer.key,
                transfer.parent,
                owner,
                self.record_bytes,
                stored_ns,
                checksum,
                transfer.at,
            )
            try:
                transfer.file.write_entry(transfer.own_slot, entry)
            except OSError as error:
                self._failed(self._writes, error)
                break
            stored.append((transfer, entry))
        self._judge(self._writes, results)
        return stored

    def _end_put(
        self, transfers: list[RecordTransfer], stored: list[tuple[RecordTransfer, Entry]]
    ) -> None:
        with self._changed:
            whole = {transfer.at for transfer, _ in stored}
            lost = [transfer for transfer in transfers if transfer.at not in whole]
            for transfer, entry in stored:
                self._table.set(transfer.slot, entry)
            self._index.commit(b"".join(transfer.key for transfer, _ in stored))
            self._index.abandon(b"".join(transfer.key for transfer in lost))
            self._count(
                puts=len(stored),
                refused=len(lost),
                bytes_written=len(stored) * aligned(self.record_bytes),
            )
            self._table.set_residue((transfer.slot for transfer in lost), is_there=True)
            self._writing -= 1
            self._changed.notify_all()

    # --- getting ----------------------------------------------------------------------------------

    def _begin_get(self, keys: bytes, count: int) -> tuple[list[RecordTransfer], list[int]]:
        """Hold the keys that are present; return their locations and the hold tickets."""
        transfers: list[RecordTransfer] = []
        tickets: list[int] = []
        with self._changed:
            there = self.has(keys)
            at = 0
            while at < count:
                end = at
                while end < count and there[end]:
                    end += 1
                if end > at:
                    ticket, slots = self._index.hold(keys_at(keys, at, end - at))
                    tickets.append(ticket)
                    for i, slot in enumerate(slots, at):
                        key = keys_at(keys, i)
                        file, own = self._table.place(slot)
                        transfers.append(
                            RecordTransfer(i, key, slot, file, own, self._table.checksum(slot))
                        )
                at = end + 1
            self._reading += 1
        return transfers, tickets

    def _end_get(self, tickets: list[int], torn: list[RecordTransfer]) -> None:
        for ticket in tickets:
            self._release(ticket)
        with self._changed:
            self._reading -= 1
            self._changed.notify_all()
        if torn:
            with self._alone():
                # Erase only if unchanged since the read: another put may have replaced the record.
                same = [
                    p.key
                    for p in torn
                    if self._index.slot_of(p.key) == p.slot
                    and self._table.checksum(p.slot) == p.checksum
                ]
                self._erase(b"".join(same))


_stores: weakref.WeakSet[DiskStore] = weakref.WeakSet()


def _forget_in_child() -> None:
    for store in list(_stores):
        store._forget_in_child()


os.register_at_fork(after_in_child=_forget_in_child)


def _with_so_many_new(keys: bytes, there: Sequence[bool], granted: int) -> bytes:
    """Return the longest prefix of keys with at most `granted` missing ones."""
    count = 0
    for is_there in there:
        granted -= not is_there
        if granted < 0:
            break
        count += 1
    return keys_at(keys, 0, count)
