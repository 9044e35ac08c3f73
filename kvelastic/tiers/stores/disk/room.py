"""File space of a disk store: allocation, sharing between engines, and release by policy.

A slot without file space is *parked*: it is closed in the index, so no claim uses it. To release
space, the store closes slots. The index displaces records by policy, and the store returns their
file space to the file system.

**Sharing between engines.** The limit applies to the folders: the blocks of the files in them. An
engine allocates space when it needs some, a file or a part of a file at a time, first come, first
served, while the sum stays within the limit. With n live engines, the fair share is 1/n of the
limit. An engine below its share that finds no space publishes a request. At its next put or
capacity query, an engine above its share releases space by policy, down to its share. An engine
whose limit is lower than its neighbours' allocates nothing while the sum is above its limit, and
releases its own space.
"""

from __future__ import annotations

import errno
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Final

from kvelastic import _vmm
from kvelastic.errors import IntegrityError
from kvelastic.tiers.stores.disk.adoption import Adoption
from kvelastic.tiers.stores.disk.file import DataFile, map_bytes, runs
from kvelastic.tiers.stores.disk.folder import Folder, all_locked
from kvelastic.tiers.stores.disk.format import Geometry, aligned, largest_within
from kvelastic.tiers.stores.disk.slots import SlotTable
from kvelastic.units import GIB_BYTES, MIB_BYTES

LOOK_EVERY_S: Final = 1.0
"""How often an engine checks what its neighbours hold and request."""
_MANY_FILES: Final = 64
_CLOSE: Final = 1024
"""Slots closed in one call of the index, which other calls wait for."""
_GIVE: Final = 1 << 12
"""Slots released per check. More would block other calls to the store for long."""
_STEPS: Final = 2
"""Adoption steps per call: about 20 ms."""


class Room:
    """File space of one store's slots. The store's lock guards it.

    Methods raise `OSError` if the file system fails; completed work is kept.
    """

    def __init__(
        self,
        index: _vmm.TierIndex,
        table: SlotTable,
        folders: list[Folder],
        record_bytes: int,
        limit_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self.limit_bytes = limit_bytes
        self.evicted = 0
        """Records evicted to release space."""
        self.owes = False
        """Whether it takes more than allowed because loads hold the rest."""
        self._index = index
        self._table = table
        self._folders = folders
        self._record_bytes = record_bytes
        self._stride_bytes = aligned(record_bytes)
        self._clock = clock
        self._parked: set[int] = set()
        self._adoption = Adoption(index, table, self._parked.update, self._release)
        self._others: dict[Folder, list[str]] = {}
        self._look_at_s = float("-inf")
        self._grow_at_s = float("-inf")
        self._park(index.stats()["slots"])  # slot 0

    @property
    def torn(self) -> int:
        """Number of damaged entries in adopted files."""
        return self._adoption.torn

    def set_limit(self, limit_bytes: int) -> None:
        """Set the limit and apply it at once. First finishes any adoption."""
        self.limit_bytes = limit_bytes
        self._grow_at_s = self._look_at_s = float("-inf")
        self.finish_adoption()
        self.fit()

    def adopt(self) -> None:
        """Adopt all files of exited engines. Returns when all their records are restored."""
        self.begin_to_adopt()
        self.finish_adoption()
        self.fit()

    def begin_to_adopt(self) -> None:
        """Start to adopt files of exited engines; `look` and `grow` restore their records."""
        with all_locked(self._folders):
            files = self._take_over()
        self._begin_to_adopt(files)

    def finish_adoption(self) -> None:
        """Restore all records of files being adopted. Takes about 2 us per record."""
        while not self._adoption.is_over:
            self._adoption.step()

    def _go_on_adopting(self) -> None:
        """Do a bounded part of the adoption; other calls get the store's lock in between."""
        for _ in range(_STEPS):
            if not self._adoption.is_over:
                self._adoption.step()

    def grow(self, wanted: int) -> int:
        """Allocate space for `wanted` slots within the limit; return how many were gained.

        If the limit or the disk left no space, later calls return 0 for `LOOK_EVERY_S`. After an
        `OSError`, the next call tries again: the caller decides when.
        """
        if wanted <= 0 or self._clock() < self._grow_at_s:
            return 0
        left: list[DataFile] | None = None
        with all_locked(self._folders):
            got = self._refill(wanted)
            while got < wanted and (more := self._add_file()):
                got += more
            if got < wanted and self._adoption.is_over:
                left = self._take_over()
        if left is not None:
            self._begin_to_adopt(left)
            self._go_on_adopting()  # restores a small engine at once; `look` continues
        with all_locked(self._folders):
            got += self._refill(wanted - got)
            self._report_missing(wanted - got)
        if got < wanted and self._adoption.is_over:
            self._grow_at_s = self._clock() + LOOK_EVERY_S
        return got

    def look(self) -> None:
        """Apply the limit and the neighbours' requests, at most every `LOOK_EVERY_S`.

        After an `OSError`, the next call tries again.
        """
        self._go_on_adopting()
        if self._clock() < self._look_at_s:
            return
        self._drop_removed()
        if not self.fit(_GIVE):
            self._look_at_s = self._clock() + LOOK_EVERY_S

    def fit(self, most: int | None = None) -> bool:
        """Release space above the limit, and space above a fair share that neighbours wait for.

        Releases about `most` slots at most; returns True if there is more to release. Does nothing
        during an adoption, because the oldest records are not in the index yet.
        """
        if not self._adoption.is_over:
            return False
        with all_locked(self._folders):
            for _ in range(3):  # header and table are freed only with the whole file
                over = max(self._held_bytes() - self.limit_bytes, self._owed_bytes())
                self.owes = over > 0 and bool(self._table.files())
                if over <= 0:
                    return False
                part = over if most is None else min(over, most * self._stride_bytes)
                if not self._give(part):
                    return False
                if part < over:
                    return True
        return False

    def check(self) -> None:
        """Raises `IntegrityError` if a parked slot has a record."""
        for slot in self._parked:
            if self._table.has_record(slot):
                raise IntegrityError(f"disk store: slot {slot} is parked and has a record")

    def _take_over(self) -> list[DataFile]:
        """Lock the files of exited engines for adoption. The caller holds the folders' locks.

        The adoption itself runs without these locks because it takes time per record. Here a
        neighbour waits only for a few system calls per file.
        """
        begun: list[DataFile] = []
        with ExitStack() as undo:
            for folder in self._folders:
                whole, others, _ = folder.take_over()
                for file in whole:
                    if file.geometry.record_bytes == self._record_bytes:
                        begun.append(file)
                        undo.callback(file.close)
                        continue
                    others.append(file.name)
                    file.close()
                self._others[folder] = others
            undo.pop_all()
        return begun

    def _begin_to_adopt(self, begun: list[DataFile]) -> None:
        """Add the files to this store; `look` and `grow` restore their records."""
        for file, slots in zip(begun, self._add(begun), strict=True):
            self._index.close(slots.start, len(slots))
            self._adoption.begin(file)

    def _held_bytes(self) -> int:
        return sum(folder.held_bytes() for folder in self._folders)

    def _own_bytes(self) -> int:
        return sum(file.held_bytes for file in self._table.files())

    def _share(self) -> tuple[int, int]:
        """Return the fair share of the limit and the bytes that other engines wait for."""
        seen = [folder.engines() for folder in self._folders]
        engines = max((count for count, _ in seen), default=1)
        return self.limit_bytes // engines, max((waited for _, waited in seen), default=0)

    def _room_bytes(self) -> int:
        """Return the bytes available; if neighbours wait, at most up to the fair share."""
        room = self.limit_bytes - self._held_bytes()
        share, waited = self._share()
        return min(room, share - self._own_bytes()) if waited else room

    def _owed_bytes(self) -> int:
        share, waited = self._share()
        return min(waited, self._own_bytes() - share)

    def _report_missing(self, missing: int) -> None:
        wanted_bytes = 0
        if missing > 0:
            share, _ = self._share()
            # Request in steps: the missing space is not all needed at once, and neighbours lose
            # records.
            step = max(missing * self._stride_bytes, share // 8)
            wanted_bytes = max(0, min(step, share - self._own_bytes()))
        for folder in self._folders:
            folder.wait_for(wanted_bytes)

    def _refill(self, wanted: int) -> int:
        """Allocate space for parked slots of existing files."""
        room = self._room_bytes() * 160 // (self._stride_bytes * 161 + 160)  # see map_bytes
        got = 0
        batch = max(wanted, self._file_bytes() // self._stride_bytes // 8)
        all_parked = sorted(self._parked) if room > 0 else []
        for file in self._settled_files():
            slots = self._table.range_of(file)
            begin, end = (bisect_left(all_parked, slot) for slot in (slots.start, slots.stop))
            for start, length in runs(all_parked[begin:end]):
                count = min(length, room, batch - got)
                if count <= 0:
                    return got
                file.reserve(start - slots.start, count)
                self._unpark(range(start, start + count))
                got += count
                room -= count
        return got

    def _file_bytes(self) -> int:
        least = 64 * MIB_BYTES
        return max(min(self.limit_bytes // 16, GIB_BYTES), self.limit_bytes // 256, least)

    def _add_file(self) -> int:
        """Create one more file and return its number of slots; 0 if there is no space."""
        while True:
            room = self._room_bytes()
            size = min(self._file_bytes(), room)
            geometry = largest_within(self._record_bytes, size - map_bytes(size))
            if geometry.slots > 0:
                break
            if not any(
                folder.remove_oldest(self._others.get(folder, [])) for folder in self._folders
            ):
                return 0
        many = len(self._table.files()) >= _MANY_FILES
        if many and size < self.limit_bytes // _MANY_FILES:
            return 0
        failed: OSError | None = None
        while geometry.slots > 0:
            for folder in self._by_files():
                made = _try_create(folder, geometry)
                if isinstance(made, DataFile):
                    return self._use(made)
                failed = made
            if failed is None or failed.errno != errno.ENOSPC:
                break
            size //= 4  # less free space than the limit allows: use what there is
            geometry = largest_within(self._record_bytes, size)
        if failed is not None:
            raise failed
        return 0

    def _by_files(self) -> list[Folder]:
        """Return the folders, those with the fewest files first."""
        files = self._table.files()
        return sorted(self._folders, key=lambda one: sum(file.folder == one.fd for file in files))

    def _use(self, file: DataFile) -> int:
        """Make a new file's slots available; return how many."""
        if self._held_bytes() > self.limit_bytes:
            file.remove()  # this file system needs more space per file than expected
            return 0
        return sum(map(len, self._add([file])))

    def _add(self, files: list[DataFile]) -> list[range]:
        """Add files to the slot table and the index; return their slots, which are free."""
        before = self._table.slots
        ranges = [self._table.add_file(file) for file in files]
        if self._table.slots > before:
            self._index.resize(self._table.slots)
        for slots in ranges:
            if slots.start < before:  # the range of a removed file, whose slots are parked
                self._unpark([slot for slot in slots if slot in self._parked])
        return ranges

    def _give(self, over_bytes: int) -> bool:
        """Release about `over_bytes` by policy; return False if nothing could be released."""
        slots = self._park(-(-over_bytes // self._stride_bytes))
        if not self._release(slots):
            return self._give_files(over_bytes)
        gone = self._remove_empty_files()
        return bool(slots) or gone

    def _park(self, count: int) -> list[int]:
        """Take up to `count` slots out of use; the index displaces their records by policy."""
        taken: list[int] = []
        gone: list[int] = []
        while len(taken) < count:
            wanted = min(_CLOSE, count - len(taken))
            slots, displaced = self._index.close_by_policy(wanted)
            gone.extend(slot for _, slot in displaced)
            taken.extend(slots)
            if len(slots) < wanted:
                break  # loads hold the others
        self._parked.update(taken)
        self.evicted += len(gone)
        self.forget(gone)
        return taken

    def _unpark(self, slots: Sequence[int]) -> None:
        self._index.open(slots)
        self._parked.difference_update(slots)

    def forget(self, slots: Iterable[int]) -> None:
        """Clear the entries of displaced records, in memory and in the files."""
        gone = [slot for slot in slots if self._table.has_record(slot)]
        for slot in gone:
            self._table.clear(slot)
        for file, own in self._table.by_file(gone).items():
            file.clear_entries(own)

    def _release(self, slots: Iterable[int]) -> bool:
        """Release the space of parked slots; return False if the file system cannot punch holes."""
        try:
            for file, own in self._table.by_file(slots).items():
                file.release(own)
                first = self._table.range_of(file).start
                self._table.set_residue((first + each for each in own), is_there=False)
        except OSError as error:
            if error.errno in {errno.EOPNOTSUPP, errno.ENOSYS}:
                return False
            raise
        return True

    def _remove_empty_files(self) -> bool:
        """Remove files whose slots are all parked; the next file reuses these slots."""
        gone = False
        for file in self._settled_files():
            if all(slot in self._parked for slot in self._table.range_of(file)):
                self._table.remove_file(file)
                file.remove()
                gone = True
        return gone

    def _give_files(self, over_bytes: int) -> bool:
        """Without hole punching: release whole files, those with the fewest records first."""
        given = 0
        for file in sorted(self._settled_files(), key=self._records_in):
            if given >= over_bytes:
                break
            if self._empty(file):
                given += file.held_bytes
                self._remove_empty_files()
        return given > 0

    def _records_in(self, file: DataFile) -> int:
        return sum(self._table.has_record(slot) for slot in self._table.range_of(file))

    def _empty(self, file: DataFile) -> bool:
        """Park all slots of a file; return False if some are in use."""
        slots = self._table.range_of(file)
        held = [slot for slot in slots if self._table.has_record(slot)]
        keys = b"".join(self._table.key(slot) for slot in held)
        self.evicted += len(held)
        self._index.erase(keys)
        self.forget(held)
        self._parked.update(self._index.close(slots.start, len(slots)))
        return all(slot in self._parked for slot in slots)

    def _settled_files(self) -> list[DataFile]:
        """Return all files except those being adopted."""
        return [file for file in self._table.files() if file not in self._adoption.files]

    def _drop_removed(self) -> None:
        """Drop files whose names were removed: their records are lost and their space is free."""
        for file in self._settled_files():
            if file.is_removed and self._empty(file):
                self._table.remove_file(file)
                file.close()


def _try_create(folder: Folder, geometry: Geometry) -> DataFile | OSError:
    try:
        return DataFile.create(folder.fd, geometry)
    except OSError as error:
        return error
