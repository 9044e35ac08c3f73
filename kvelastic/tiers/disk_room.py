"""How much of the folders a disk store has: takes room, shares it, gives it back by policy.

A slot without room is *parked*: the index believes that it is pending under a key that nobody has,
so it is never given out. To give room back, slots are claimed for such keys, and the index
displaces what its policy says; their place in the files is given back to the file system.

**How engines share a folder.** The limit is of the folders: the blocks of all files there. Room is
taken as it is needed, a file or a part of one at a time, by whoever comes first, and only while the
sum stays within the limit. With n engines alive, a share is the limit divided by n. An engine that
has less than its share and finds no room says so, and an engine that has more than its own gives
back by policy down to it, at its next put or question for the capacity. An engine with a lower
limit than its neighbours' takes nothing while they are above it, and gives back what it has.
"""

from __future__ import annotations

import errno
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Final

from kvelastic import _vmm
from kvelastic.errors import IntegrityError
from kvelastic.sizes import GIB_BYTES, MIB_BYTES
from kvelastic.tiers.base import KEY_BYTES
from kvelastic.tiers.disk_adoption import Adoption
from kvelastic.tiers.disk_file import DataFile, map_bytes, runs
from kvelastic.tiers.disk_folder import Folder, all_locked
from kvelastic.tiers.disk_format import Geometry, aligned, largest_within
from kvelastic.tiers.disk_slots import SlotTable

LOOK_EVERY_S: Final = 1.0
"""How often an engine looks at what its neighbours have and want."""
_MANY_FILES: Final = 64
_CLAIM: Final = 1024
_GIVE: Final = 1 << 12
"""Slots that one look gives back; more would keep others out of the store for long."""
_CLOSED: Final = b""
"""In the place of a parked slot's key: the index knows that it has no room."""
_STEPS: Final = 2
"""Of an adoption, in one call: some 20 ms."""


class Room:
    """The slots of one store. The store's lock guards it.

    Raises `OSError` for what the file systems say; whatever was done until then stays done.
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
        """Records that went for want of room."""
        self.owes = False
        """Whether more is held than may be: the rest is leased."""
        self._index = index
        self._table = table
        self._folders = folders
        self._record_bytes = record_bytes
        self._stride_bytes = aligned(record_bytes)
        self._clock = clock
        self._parked: dict[int, bytes] = {}
        self._made = 0
        self._adoption = Adoption(index, table, self._park_closed, self._release)
        self._others: dict[Folder, list[str]] = {}
        self._look_at_s = float("-inf")
        self._grow_at_s = float("-inf")
        self._park(index.stats()["slots"])  # slot 0

    @property
    def torn(self) -> int:
        """Entries of files that were taken over, and that are not whole."""
        return self._adoption.torn

    def set_limit(self, limit_bytes: int) -> None:
        """Hold no more than this from now on, and look at once how much room there is."""
        self.limit_bytes = limit_bytes
        self._grow_at_s = self._look_at_s = float("-inf")
        self.finish_adoption()
        self.fit()

    def adopt(self) -> None:
        """Take over all that engines which are gone have left, at once."""
        self.begin_to_adopt()
        self.finish_adoption()
        self.fit()

    def begin_to_adopt(self) -> None:
        """Take over files of engines that are gone; `look` and `grow` restore their records."""
        with all_locked(self._folders):
            files = self._take_over()
        self._begin_to_adopt(files)

    def finish_adoption(self) -> None:
        """Restore all records of files that are being adopted. Some 2 us for each."""
        while not self._adoption.is_over:
            self._adoption.step()

    def _go_on_adopting(self) -> None:
        """A bounded part: whoever waits for the store's lock has it in between."""
        for _ in range(_STEPS):
            if not self._adoption.is_over:
                self._adoption.step()

    def grow(self, wanted: int) -> int:
        """Take room for `wanted` slots, as far as the limit goes; answers how many more there are.

        Asks at most every `LOOK_EVERY_S` where there was none.
        """
        if wanted <= 0 or self._clock() < self._grow_at_s:
            return 0
        self._grow_at_s = self._clock() + LOOK_EVERY_S
        left: list[DataFile] | None = None
        with all_locked(self._folders):
            got = self._refill(wanted)
            while got < wanted and (more := self._add_file()):
                got += more
            if got < wanted and self._adoption.is_over:
                left = self._take_over()
        if left is not None:
            self._begin_to_adopt(left)
            self._go_on_adopting()  # records of a small engine are there at once; `look` does more
        with all_locked(self._folders):
            got += self._refill(wanted - got)
            self._say_want(wanted - got)
        if got >= wanted or not self._adoption.is_over:
            self._grow_at_s = float("-inf")
        return got

    def look(self) -> None:
        """Keep to the limit and to what neighbours are owed; at most every `LOOK_EVERY_S`."""
        self._go_on_adopting()
        if self._clock() < self._look_at_s:
            return
        self._look_at_s = self._clock() + LOOK_EVERY_S
        self._drop_removed()
        if self.fit(_GIVE):
            self._look_at_s = float("-inf")

    def fit(self, most: int | None = None) -> bool:
        """Give back what is above the limit, and what neighbours wait for above a fair share.

        Some `most` slots at once; True where there are more to give.
        While files are being adopted, nothing: the oldest records are not in the index yet.
        """
        if not self._adoption.is_over:
            return False
        with all_locked(self._folders):
            for _ in range(3):  # a file's own header and table go only with the file
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
        """Raises `IntegrityError` where a parked slot has a record."""
        for slot in self._parked:
            if self._table.has_record(slot):
                raise IntegrityError(f"disk store: slot {slot} is parked and has a record")

    def _take_over(self) -> list[DataFile]:
        """Lock files of engines that are gone, which are to be adopted. Under the folders' locks.

        All else that is done of them goes without these, as it takes longer with each record: a
        neighbour waits for some calls for each file.
        """
        begun = []
        for folder in self._folders:
            whole, others = folder.take_over()
            for file in whole:
                if file.geometry.record_bytes == self._record_bytes:
                    begun.append(file)
                    continue
                others.append(file.name)
                file.close()
            self._others[folder] = others
        return begun

    def _begin_to_adopt(self, begun: list[DataFile]) -> None:
        """They are this store's; `look` and `grow` restore their records."""
        for file, slots in zip(begun, self._add(begun), strict=True):
            self._index.close(slots.start, len(slots))
            self._adoption.begin(file)

    def _park_closed(self, slots: Iterable[int]) -> None:
        """These have no room; they were closed in the index before."""
        self._parked.update(dict.fromkeys(slots, _CLOSED))

    def _held_bytes(self) -> int:
        return sum(folder.held_bytes() for folder in self._folders)

    def _own_bytes(self) -> int:
        return sum(file.held_bytes for file in self._table.files())

    def _share(self) -> tuple[int, int]:
        """A fair share of the limit, and the bytes that others wait for."""
        seen = [folder.engines() for folder in self._folders]
        engines = max((count for count, _ in seen), default=1)
        return self.limit_bytes // engines, max((waited for _, waited in seen), default=0)

    def _room_bytes(self) -> int:
        """What may be taken: what neighbours wait for is left to them by who has its share."""
        room = self.limit_bytes - self._held_bytes()
        share, waited = self._share()
        return min(room, share - self._own_bytes()) if waited else room

    def _owed_bytes(self) -> int:
        share, waited = self._share()
        return min(waited, self._own_bytes() - share)

    def _say_want(self, missing: int) -> None:
        wanted_bytes = 0
        if missing > 0:
            share, _ = self._share()
            # In steps: what the neighbours lose is not all needed at once.
            step = max(missing * self._stride_bytes, share // 8)
            wanted_bytes = max(0, min(step, share - self._own_bytes()))
        for folder in self._folders:
            folder.wait_for(wanted_bytes)

    def _refill(self, wanted: int) -> int:
        """Give room to parked slots of files that there are."""
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
        """Make one more file; answers its slots, 0 where there is no room."""
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
            size //= 4  # the file system has less room than the limit: what there is
            geometry = largest_within(self._record_bytes, size)
        if failed is not None:
            raise failed
        return 0

    def _by_files(self) -> list[Folder]:
        """The folders, those with the fewest files first."""
        files = self._table.files()
        return sorted(self._folders, key=lambda one: sum(file.folder == one.fd for file in files))

    def _use(self, file: DataFile) -> int:
        """A new file's slots are given out from now on; answers how many."""
        if self._held_bytes() > self.limit_bytes:
            file.remove()  # a file system that needs more for it than others do
            return 0
        return sum(map(len, self._add([file])))

    def _add(self, files: list[DataFile]) -> list[range]:
        """The slots of files, free in the index from now on."""
        before = self._table.slots
        ranges = [self._table.add_file(file) for file in files]
        if self._table.slots > before:
            self._index.resize(self._table.slots)
        for slots in ranges:
            if slots.start < before:  # a removed file's, which are parked
                self._unpark([slot for slot in slots if slot in self._parked])
        return ranges

    def _give(self, over_bytes: int) -> bool:
        """Give back about so much, by policy; False where nothing could be given."""
        slots = self._park(-(-over_bytes // self._stride_bytes))
        if not self._release(slots):
            return self._give_files(over_bytes)
        gone = self._remove_empty_files()
        return bool(slots) or gone

    def _park(self, count: int) -> list[int]:
        """Take up to `count` slots out of use; what lies there is displaced by policy."""
        taken: list[int] = []
        gone: list[int] = []
        while len(taken) < count:
            keys = [self._parking_key() for _ in range(min(_CLAIM, count - len(taken)))]
            slots, displaced = self._index.claim(b"".join(keys), None)
            gone.extend(slot for _, slot in displaced)
            got = {slot: key for slot, key in zip(slots, keys, strict=True) if slot >= 0}
            self._parked.update(got)
            taken.extend(got)
            if len(got) < len(keys):
                break  # the rest is leased
        self.evicted += len(gone)
        self._forget(gone)
        return taken

    def _free(self) -> int:
        stats = self._index.stats()
        return int(stats["slots"] - stats["ready"] - stats["pending"] - stats["closed"])

    def _parking_key(self) -> bytes:
        self._made += 1
        return b"parked: ".ljust(KEY_BYTES - 8) + self._made.to_bytes(8, "little")

    def _unpark(self, slots: Iterable[int]) -> None:
        keys = {slot: self._parked.pop(slot) for slot in slots}
        self._index.open([slot for slot, key in keys.items() if key == _CLOSED])
        self._index.abandon(b"".join(keys.values()))

    def _forget(self, slots: Iterable[int]) -> None:
        """Records were displaced: nobody finds them at the next open either."""
        gone = [slot for slot in slots if self._table.has_record(slot)]
        for slot in gone:
            self._table.clear(slot)
        for file, own in self._table.by_file(gone).items():
            for slot in own:
                file.clear_entry(slot)

    def _release(self, slots: Iterable[int]) -> bool:
        """Give the room of parked slots back; False where the file system cannot."""
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
        """Remove files whose slots are all parked; their slots stay parked for the next file."""
        gone = False
        for file in self._settled_files():
            if all(slot in self._parked for slot in self._table.range_of(file)):
                self._table.remove_file(file)
                file.remove()
                gone = True
        return gone

    def _give_files(self, over_bytes: int) -> bool:
        """Where no part of a file can be given back: whole files, those that hold least first."""
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
        """Park all slots of a file; False where some are in use."""
        slots = self._table.range_of(file)
        held = [slot for slot in slots if self._table.has_record(slot)]
        keys = b"".join(self._table.key(slot) for slot in held)
        self.evicted += len(held)
        self._index.erase(keys)
        self._forget(held)
        free = self._park(self._free())
        self._unpark([slot for slot in free if slot not in slots])
        return all(slot in self._parked for slot in slots)

    def _settled_files(self) -> list[DataFile]:
        """All but those that are being adopted."""
        return [file for file in self._table.files() if file not in self._adoption.files]

    def _drop_removed(self) -> None:
        """Files that somebody has removed: their records are gone, and their room is."""
        for file in self._settled_files():
            if file.is_removed and self._empty(file):
                self._table.remove_file(file)
                file.close()


def _try_create(folder: Folder, geometry: Geometry) -> DataFile | OSError:
    try:
        return DataFile.create(folder.fd, geometry)
    except OSError as error:
        return error
