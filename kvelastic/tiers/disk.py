"""Demoted blocks on disks: a record a slot, in large files of one or more folders.

    store = DiskStore(["/mnt/nvme0/kv", "/mnt/nvme1/kv"], record_bytes, limit_bytes=200 << 30)
    store.enter(namespace)
    store.put(keys, views)

What is put is found again after a restart, a SIGKILL or a loss of power, except for the last
moments; what is not whole by then is counted as `torn` and never served: each record has a checksum
that is seeded with its key, and every read compares it. Opening reads the tables of the files, no
records. Files of engines that are gone are taken over.

The folders are this user's alone (0700, files 0600). What lies there is the KV of prompts, in
clear: whoever can read it can read much of what was said. `erase` makes records unreadable through
the file system; what the medium itself keeps of overwritten blocks is the medium's affair.

How engines of a machine share the folders and the limit: see disk_room.py.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, Literal, Protocol

from kvelastic import _vmm
from kvelastic.errors import IntegrityError, InvalidArgumentError
from kvelastic.tiers.base import (
    KEY_BYTES,
    NO_KEY,
    Capacity,
    Lease,
    Selection,
    Store,
    StoreStatistics,
)
from kvelastic.tiers.disk_file import DataFile
from kvelastic.tiers.disk_folder import Folder
from kvelastic.tiers.disk_format import Entry, aligned, entries
from kvelastic.tiers.disk_quota import Quotas
from kvelastic.tiers.disk_room import Room
from kvelastic.tiers.disk_slots import SlotTable
from kvelastic.tiers.namespace import Namespace
from kvelastic.tiers.quiet import Quiet
from kvelastic.tiers.record_owner import Owner, model_hash, owner_of
from kvelastic.tiers.write_budget import WriteBudget

_log = logging.getLogger("kvelastic")

MAX_RECORD_BYTES: Final = 1 << 32
DEPTH: Final = 32
"""How many records of one call are under way at once."""

Answers = list[tuple[int, int]]


class RecordFiles(Protocol):
    """What reads and writes records: a `_vmm.RecordIo`, or one that fails on demand (tests)."""

    def write(
        self, places: Sequence[tuple[int, int]], views: Sequence[object], keys: bytes
    ) -> Answers:
        """See `_vmm.RecordIo.write`."""

    def read(
        self, places: Sequence[tuple[int, int]], views: Sequence[object], keys: bytes
    ) -> Answers:
        """See `_vmm.RecordIo.read`."""


@dataclass(frozen=True)
class _Piece:
    """One record on its way."""

    at: int
    """In the keys of the call."""
    key: bytes
    slot: int
    file: DataFile
    own_slot: int
    checksum: int = 0
    parent: bytes = NO_KEY

    @property
    def place(self) -> tuple[int, int]:
        return self.file.record_fd, self.file.geometry.record_offset(self.own_slot)


class _DiskLease(Lease):
    def __init__(self, store: DiskStore, ticket: int | None, count: int) -> None:
        self.count = count
        self._store = store
        self._ticket = ticket

    def release(self) -> None:
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self._store.release(ticket)


class DiskStore(Store):
    """See the module. Any thread may call; `has` and `lease` never wait for a disk.

    One lock guards slots, files and figures. It is not held while records are read or written; it
    is held while room is taken or given back and while records are erased.
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
        quotas: Mapping[str, float] | None = None,
        io: Literal["auto", "io_uring", "threads"] | RecordFiles = "auto",
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Open the folders, and take over what engines which are gone have left there.

        `limit_bytes` is what all files of all folders together may take, whoever's they are.
        `quotas` gives models a part of it (0 to 1) that they do not exceed; one that is not named
        has no bound of its own. `daily_write_bytes` bounds what all engines write a day (UTC);
        those that are given one count together. `io` may be an object of the tests. `clock` and
        `wall_clock` answer seconds.

        A folder that the file system refuses is left out and counted as an error; with none, the
        store is empty and stores nothing. Raises `InvalidArgumentError` for a folder that is not
        this user's alone, and for sizes that cannot be; `DeviceUnavailableError` where io_uring
        is asked for and cannot be used.
        """
        if not 0 < record_bytes <= MAX_RECORD_BYTES:
            raise InvalidArgumentError(
                f"records of {record_bytes} bytes; give 1 to {MAX_RECORD_BYTES}"
            )
        _check_limit(limit_bytes)
        if not folders:
            raise InvalidArgumentError("a disk store without folders; give one or more")
        self.record_bytes = record_bytes
        self._clock = clock
        self._wall_clock = wall_clock
        self._io: RecordFiles = _vmm.RecordIo(io, DEPTH) if isinstance(io, str) else io
        self._figures = StoreStatistics()
        self._changed = threading.Condition(threading.RLock())
        self._reading = 0
        self._writing = 0
        self._erasing = 0
        self._closed = False
        self._reads = Quiet(clock)
        self._writes = Quiet(clock)
        self._growth = Quiet(clock)
        self._owner = owner_of(namespace or Namespace(model=""))
        shares = {model_hash(model): share for model, share in (quotas or {}).items()}
        self._quotas = Quotas(shares)
        self._table = SlotTable(self._quotas)
        self._index = _vmm.TierIndex(1, policy)
        self._paths = [os.path.abspath(os.fspath(path)) for path in folders]  # noqa: PTH100
        self._folders: list[Folder] = []
        try:
            self._open_folders()
            self._room = Room(
                self._index, self._table, self._folders, record_bytes, limit_bytes, clock
            )
            first = self._folders[0].fd if self._folders else -1
            self._budget = WriteBudget(first, daily_write_bytes, wall_clock)
            with self._medium(self._growth):
                self._room.adopt()
        except BaseException:
            for folder in self._folders:
                folder.close()
            raise
        _stores.add(self)

    # --- the contract -----------------------------------------------------------------------------

    def enter(self, namespace: Namespace) -> None:
        """Records put from now on are of `namespace`; what is under way stays of the last one."""
        with self._changed:
            self._owner = owner_of(namespace)

    def has(self, keys: bytes) -> list[bool]:
        """As `Store.has`."""
        count = self._count_of(keys)
        if self._closed or not self._reads.is_over:
            return [False] * count
        return self._index.has(keys)

    def lease(self, keys: bytes) -> Lease:
        """As `Store.lease`. While the disk is left alone after errors, nothing is there."""
        self._count_of(keys)
        if self._closed or not self._reads.is_over:
            return _DiskLease(self, None, 0)
        ticket, slots = self._index.lease(keys)
        return _DiskLease(self, ticket, len(slots))

    def release(self, ticket: int) -> None:
        """End a lease; `Lease.release` calls it."""
        freed = self._index.release(ticket)
        if freed and not self._closed:
            with self._changed:
                self._wipe(slot for _, slot in freed)

    def put(
        self, keys: bytes, records: Sequence[memoryview], *, chain_after: bytes | None = None
    ) -> list[bool]:
        """As `Store.put`. Blocks until the records are written."""
        count = self._count_of(keys, records)
        self._count_of(chain_after or b"")
        pieces, owner = self._begin_put(keys, count, chain_after)
        if pieces:
            stored: list[tuple[_Piece, Entry]] = []
            try:
                stored = self._write(pieces, records, owner)
            finally:
                self._end_put(pieces, stored)
        return self.has(keys)

    def get(self, keys: bytes, into: Sequence[memoryview]) -> list[bool]:
        """As `Store.get`. Blocks until the records are read."""
        count = self._count_of(keys, into)
        pieces, tickets = self._begin_get(keys, count)
        answers = [False] * count
        torn: list[_Piece] = []
        try:
            if pieces:
                results = self._call(self._io.read, pieces, [into[p.at] for p in pieces])
                for piece, (moved, checksum) in zip(pieces, results, strict=True):
                    whole = moved == self.record_bytes and checksum == piece.checksum
                    answers[piece.at] = whole
                    if moved >= 0 and not whole:
                        torn.append(piece)
                self._judge(self._reads, results)
        finally:
            self._end_get(tickets, torn)
        hits = sum(answers)
        self._count(
            hits=hits, misses=count - hits, torn=len(torn), bytes_read=hits * self.record_bytes
        )
        return answers

    def erase(self, keys: bytes) -> int:
        """As `Store.erase`. Waits for puts that are under way, and for the medium."""
        self._count_of(keys)
        with self._alone():
            return self._erase(keys)

    def erase_matching(self, selection: Selection) -> int:
        """As `Store.erase_matching`, of what this engine has; its neighbours erase their own."""
        before_ns = None
        if selection.older_than_s is not None:
            before_ns = int((self._wall_clock() - selection.older_than_s) * 1e9)
        model = None if selection.model is None else model_hash(selection.model)
        wanted = None if selection.namespace is None else selection.namespace.fingerprint
        with self._alone():
            keys = []
            for slot in self._table.occupied():
                owner = self._table.owner(slot)
                if owner is None or (wanted is not None and owner.namespace != wanted):
                    continue
                if model is not None and owner.model != model:
                    continue
                if before_ns is None or self._table.stored_ns(slot) < before_ns:
                    keys.append(self._table.key(slot))
            return self._erase(b"".join(keys))

    def capacity(self) -> Capacity:
        """As `Store.capacity`: records by their own size; files are rounded up, and made ahead."""
        with self._changed:
            self._look()
            records = 0 if self._closed else self._index.stats()["ready"]
            return Capacity(records * self.record_bytes, self._room.limit_bytes, records)

    def set_limit(self, limit_bytes: int) -> None:
        """As `Store.set_limit`. What it gives back is punched out of the files, or whole files."""
        _check_limit(limit_bytes)
        with self._changed:
            if self._closed:
                return
            with self._medium(self._growth):
                self._room.set_limit(limit_bytes)

    def statistics(self) -> StoreStatistics:
        """As `Store.statistics`."""
        with self._changed:
            now = self._figures
            return replace(
                now,
                evicted=now.evicted + self._room.evicted,
                torn=now.torn + self._room.torn,
            )

    def check_integrity(self) -> None:
        """As `Store.check_integrity`: index, slots, and the tables in the files. Waits for puts."""
        with self._alone():
            if self._closed:
                return
            self._index.check_integrity()
            try:
                self._room.check()
                self._check_tables()
                for slot in self._table.occupied():
                    key = self._table.key(slot)
                    found = self._index.slot_of(key)
                    assert found == slot, f"slot {slot} has {key.hex()}, the index has {found}"
                records = sum(1 for _ in self._table.occupied())
                ready = self._index.stats()["ready"]
                assert records == ready, f"{records} slots with records, {ready} in the index"
            except AssertionError as broken:
                raise IntegrityError(f"disk store: {broken}") from None

    def _check_tables(self) -> None:
        """Whether the files say of each record what is known of it."""
        with self._medium(self._reads):
            for file in self._table.files():
                first = self._table.range_of(file).start
                found = dict(entries(file.read_table(), file.file_id))
                for slot in self._table.range_of(file):
                    entry = found.get(slot - first)
                    if self._table.has_record(slot):
                        key = self._table.key(slot)
                        assert entry is not None, f"no entry of {key.hex()} in {file.name}"
                        assert entry.key == key, (
                            f"{file.name} has {entry.key.hex()} for {key.hex()}"
                        )
                    else:
                        assert entry is None or self._figures.errors, (
                            f"an entry left in {file.name}"
                        )

    def close(self) -> None:
        """As `Store.close`. Waits for puts that are under way."""
        with self._alone():
            if self._closed:
                return
            self._changed.wait_for(lambda: not self._reading)
            self._closed = True
            self._budget.close()
            for file in self._table.files():
                file.close()
            for folder in self._folders:
                folder.close()

    @property
    def engine(self) -> str:
        """How records are read and written: io_uring, threads, or what the tests gave."""
        return getattr(self._io, "engine", type(self._io).__name__)

    # --- putting ----------------------------------------------------------------------------------

    def _begin_put(
        self, keys: bytes, count: int, chain_after: bytes | None
    ) -> tuple[list[_Piece], Owner]:
        with self._changed:
            self._changed.wait_for(lambda: not self._erasing)
            if self._closed:
                self._count(refused=count)
                return [], self._owner
            new = count - sum(self._index.has(keys))
            if new == 0:
                return [], self._owner
            if not self._writes.is_over:
                self._count(refused=new)
                return [], self._owner
            self._look()
            self._make_room(new)
            slots, displaced = self._index.claim(keys, chain_after)
            try:
                pieces = self._place(keys, chain_after, slots, displaced)
            except OSError as error:
                self._failed(self._writes, error)
                self._index.abandon(_keys_at(keys, [i for i, s in enumerate(slots) if s >= 0]))
                self._count(refused=new)
                return [], self._owner
            granted = self._budget.take(len(pieces), aligned(self.record_bytes))
            self._index.abandon(b"".join(piece.key for piece in pieces[granted:]))
            self._count(refused=slots.count(-2) + len(pieces) - granted)
            if granted:
                self._writing += 1
            return pieces[:granted], self._owner

    def _make_room(self, new: int) -> None:
        """Take room for new records, as far as the limit and the model's quota allow."""
        slots = self._room.limit_bytes // aligned(self.record_bytes)
        over = self._quotas.over(self._owner.model, new, slots)
        if over:
            self._count(evicted=self._erase(b"".join(over), wipe=False))
        stats = self._index.stats()
        free = stats["slots"] - stats["ready"] - stats["pending"]
        if free < new and self._growth.is_over:
            with self._medium(self._growth):
                self._room.grow(new - free)

    def _place(
        self,
        keys: bytes,
        chain_after: bytes | None,
        slots: Sequence[int],
        displaced: Iterable[tuple[bytes, int]],
    ) -> list[_Piece]:
        """Where each record goes; whatever lay there is forgotten, in the files as well."""
        for _, slot in displaced:
            self._table.clear(slot)
            self._count(evicted=1)
        pieces = []
        for at, slot in enumerate(slots):
            if slot >= 0:
                file, own = self._table.place(slot)
                parent = NO_KEY
                if chain_after is not None:
                    parent = _keys_at(keys, [at - 1]) if at else chain_after
                pieces.append(_Piece(at, _keys_at(keys, [at]), slot, file, own, parent=parent))
        for _, slot in displaced:
            file, own = self._table.place(slot)
            file.clear_entry(own)
        return pieces

    def _write(
        self, pieces: list[_Piece], records: Sequence[memoryview], owner: Owner
    ) -> list[tuple[_Piece, Entry]]:
        """Write records, then their entries; answers those that are whole in the files."""
        results = self._call(self._io.write, pieces, [records[p.at] for p in pieces])
        stored_ns = int(self._wall_clock() * 1e9)
        stored: list[tuple[_Piece, Entry]] = []
        for piece, (moved, checksum) in zip(pieces, results, strict=True):
            if moved != self.record_bytes:
                continue
            entry = Entry(
                piece.key,
                piece.parent,
                owner.namespace,
                owner.model,
                owner.generation,
                self.record_bytes,
                stored_ns,
                checksum,
                piece.at,
            )
            try:
                piece.file.write_entry(piece.own_slot, entry)
            except OSError as error:
                self._failed(self._writes, error)
                break
            stored.append((piece, entry))
        self._judge(self._writes, results)
        return stored

    def _end_put(self, pieces: list[_Piece], stored: list[tuple[_Piece, Entry]]) -> None:
        with self._changed:
            whole = {piece.at for piece, _ in stored}
            lost = [piece for piece in pieces if piece.at not in whole]
            for piece, entry in reversed(stored):  # ends of chains first: see Quotas
                self._table.set(piece.slot, entry)
            self._index.commit(b"".join(piece.key for piece, _ in stored))
            self._index.abandon(b"".join(piece.key for piece in lost))
            self._count(
                puts=len(stored),
                refused=len(lost),
                bytes_written=len(stored) * aligned(self.record_bytes),
            )
            self._writing -= 1
            self._changed.notify_all()

    # --- getting ----------------------------------------------------------------------------------

    def _begin_get(self, keys: bytes, count: int) -> tuple[list[_Piece], list[int]]:
        """Hold those that are there; answers where they lie, and the tickets of the leases."""
        pieces: list[_Piece] = []
        tickets: list[int] = []
        with self._changed:
            there = self.has(keys)
            at = 0
            while at < count:
                end = at
                while end < count and there[end]:
                    end += 1
                if end > at:
                    ticket, slots = self._index.lease(keys[at * KEY_BYTES : end * KEY_BYTES])
                    tickets.append(ticket)
                    for i, slot in enumerate(slots, at):
                        key = _keys_at(keys, [i])
                        file, own = self._table.place(slot)
                        pieces.append(_Piece(i, key, slot, file, own, self._table.checksum(slot)))
                        self._table.use(slot)
                at = end + 1
            self._reading += 1
        return pieces, tickets

    def _end_get(self, tickets: list[int], torn: list[_Piece]) -> None:
        for ticket in tickets:
            self.release(ticket)
        with self._changed:
            self._reading -= 1
            self._changed.notify_all()
        if torn:
            with self._alone():
                # Only what still lies where it was read: it may have been put anew meanwhile.
                same = [
                    p.key
                    for p in torn
                    if self._index.slot_of(p.key) == p.slot
                    and self._table.checksum(p.slot) == p.checksum
                ]
                self._erase(b"".join(same))

    # --- erasing ----------------------------------------------------------------------------------

    def _erase(self, keys: bytes, *, wipe: bool = True) -> int:
        """Forget keys, in the files first. Under the lock, with no put under way for these.

        With `wipe` the records cannot be read from the files any more when this returns, except
        those that are leased: these when their leases end.
        """
        if self._closed or not keys:
            return 0
        slots = [self._index.slot_of(key) for key in _each(keys)]
        slots = [slot for slot in slots if slot >= 0]
        for slot in slots:
            self._table.clear(slot)
        for file, own in self._table.by_file(slots).items():
            with self._medium(self._writes):
                for slot in own:
                    file.clear_entry(slot)
                if wipe:
                    file.sync()
        freed = self._index.erase(keys)
        if wipe:
            self._wipe(slot for _, slot in freed)
        return len(slots)

    def _wipe(self, slots: Iterable[int]) -> None:
        """Make what lay in slots unreadable, in the file system's journal as well."""
        for file, own in self._table.by_file(slots).items():
            with self._medium(self._writes):
                file.wipe(own)
                file.sync()

    # --- the medium -------------------------------------------------------------------------------

    def _call(
        self,
        call: Callable[[Sequence[tuple[int, int]], Sequence[object], bytes], Answers],
        pieces: list[_Piece],
        views: list[memoryview],
    ) -> Answers:
        """Read or write; where a file system refuses O_DIRECT after all, through the page cache."""
        keys = b"".join(piece.key for piece in pieces)
        results = call([piece.place for piece in pieces], views, keys)
        refused = [
            i
            for i, (moved, _) in enumerate(results)
            if moved == -errno.EINVAL and pieces[i].file.is_direct
        ]
        if refused:
            with self._changed:
                for i in refused:
                    pieces[i].file.use_page_cache()
            again = call(
                [pieces[i].place for i in refused],
                [views[i] for i in refused],
                b"".join(pieces[i].key for i in refused),
            )
            for i, answer in zip(refused, again, strict=True):
                results[i] = answer
        return results

    def _judge(self, quiet: Quiet, results: Answers) -> None:
        failed = [-moved for moved, _ in results if moved < 0]
        if failed:
            error = OSError(failed[0], os.strerror(failed[0]))
            self._failed(quiet, error, len(failed))
        else:
            with self._changed:
                quiet.worked()

    def _failed(self, quiet: Quiet, error: OSError, calls: int = 1) -> None:
        _log.debug("disk tier: %s", error)
        with self._changed:
            self._count(errors=calls)
            quiet.failed()

    @contextmanager
    def _medium(self, quiet: Quiet) -> Iterator[None]:
        """Count what the file system refuses, and leave it alone for a while."""
        try:
            yield
        except OSError as error:
            self._failed(quiet, error)

    def _look(self) -> None:
        """See what neighbours want, and whether folders that were gone are back."""
        if not self._closed and self._growth.is_over:
            with self._medium(self._growth):
                self._open_folders()
                self._room.look()

    def _open_folders(self) -> None:
        """Open those that are not open yet, or that somebody has replaced."""
        for folder in self._folders[:]:
            in_use = any(file.folder == folder.fd for file in self._table.files())
            if not in_use and not folder.is_there():
                self._folders.remove(folder)
                folder.close()
        open_paths = {folder.path for folder in self._folders}
        for path in self._paths:
            if path not in open_paths:
                self._open_folder(path)

    def _open_folder(self, path: str) -> None:
        try:
            folder = Folder(path)
        except OSError as error:
            _log.warning("the disk tier goes without %s: %s", path, error)
            self._failed(self._growth, error)
            return
        if any(folder.identity == other.identity for other in self._folders):
            folder.close()
            raise InvalidArgumentError(f"{path} is named twice; name each folder once")
        self._folders.append(folder)

    # --- the lock ---------------------------------------------------------------------------------

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock while no put is under way; those that come wait."""
        with self._changed:
            self._erasing += 1
            try:
                self._changed.wait_for(lambda: not self._writing)
                yield
            finally:
                self._erasing -= 1
                self._changed.notify_all()

    def _count(self, **more: int) -> None:
        with self._changed:
            now = self._figures
            self._figures = replace(
                now, **{name: getattr(now, name) + count for name, count in more.items()}
            )

    def _forget_in_child(self) -> None:
        """After a fork: the files and their locks are the parent's."""
        self._changed = threading.Condition(threading.RLock())
        self._closed = True
        self._budget.close()
        for file in self._table.files():
            file.close()
        for folder in self._folders:
            folder.forget()


_stores: weakref.WeakSet[DiskStore] = weakref.WeakSet()


def _forget_in_child() -> None:
    for store in list(_stores):
        store._forget_in_child()


os.register_at_fork(after_in_child=_forget_in_child)


def _check_limit(limit_bytes: int) -> None:
    if not 0 <= limit_bytes < 1 << 62:
        raise InvalidArgumentError(f"a limit of {limit_bytes} bytes; give 0 or more")


def _keys_at(keys: bytes, positions: Iterable[int]) -> bytes:
    return b"".join(keys[at * KEY_BYTES : (at + 1) * KEY_BYTES] for at in positions)


def _each(keys: bytes) -> Iterator[bytes]:
    return (keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES))
