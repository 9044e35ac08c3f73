"""Files of engines that are gone become a store's own, part by part.

    adoption.begin(file)          # locked, and in the slot table; its slots are closed
    while not adoption.is_over:
        adoption.step()           # some 10 ms under the store's lock; others have it in between

First the tables are read, then their records are restored in the index, the oldest of all files
first, so that the newest are the last to be displaced. Slots without a record stay closed, and
their room in the files is given back.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from kvelastic import _vmm
from kvelastic.tiers.disk_file import DataFile
from kvelastic.tiers.disk_slots import SlotTable

PART: Final = 1 << 12
"""Entries that a step reads, or restores: a step of a million would keep others out for seconds."""


class Adoption:
    """See the module. The store's lock guards it, and no lock of a folder is needed."""

    def __init__(
        self,
        index: _vmm.TierIndex,
        table: SlotTable,
        park: Callable[[Iterable[int]], None],
        release: Callable[[Iterable[int]], object],
    ) -> None:
        """`park` gets slots that have no record, and `release` those whose room is given back."""
        self.torn = 0
        """Entries that are not whole."""
        self.files: set[DataFile] = set()
        """Those that are being adopted: no slot of theirs may be given out."""
        self._index = index
        self._table = table
        self._park = park
        self._release = release
        self._found = _vmm.FoundRecords()
        self._unread: deque[tuple[DataFile, int]] = deque()
        """Files, and from which of their slots on the table is to be read."""

    @property
    def is_over(self) -> bool:
        """Whether nothing is being adopted."""
        return not self.files

    def begin(self, file: DataFile) -> None:
        """Adopt a file whose slots are in the table, and closed."""
        self.files.add(file)
        self._unread.append((file, 0))

    def step(self) -> None:
        """Read or restore up to `PART` entries.

        Raises `OSError` for what the file system says; the rest of such a file is not found.
        """
        if self._unread:
            self._read()
        elif self._found.left:
            self._restore()
        if not self._unread and not self._found.left:
            self.files.clear()
            self._found = _vmm.FoundRecords()

    def _read(self) -> None:
        file, own = self._unread.popleft()
        first = self._table.range_of(file).start
        end = own
        try:
            count = min(PART, file.geometry.slots - own)
            empty, torn = self._found.add(
                file.read_entries(own, count),
                file.file_id,
                own,
                first + own,
                file.geometry.record_bytes,
                file.whole_slots,
            )
            self.torn += len(torn)
            for slot in torn:
                file.clear_entry(slot)
            self._give_back([first + slot for slot in empty + torn])
            end = own + count
        finally:
            if own < end < file.geometry.slots:
                self._unread.appendleft((file, end))
            else:
                self._park(range(first + end, first + file.geometry.slots))  # what is unreadable
                self._found.end_file()

    def _restore(self) -> None:
        raw_slots, keys, checksums, times, owners, refused = self._found.restore(self._index, PART)
        slots = _numbers("I", raw_slots)
        self._table.set_found(
            slots,
            keys,
            _numbers("Q", checksums),
            _numbers("Q", times),
            _numbers("I", owners),
            self._found.owners(),
        )
        for slot in refused:  # there is another record of this key
            file, own = self._table.place(slot)
            file.clear_entry(own)
        self._give_back(refused)

    def _give_back(self, slots: list[int]) -> None:
        # Whether they have room, or bytes of records that were displaced, is not known.
        self._park(slots)
        self._table.set_residue(slots, is_there=True)
        self._release(slots)


def _numbers(kind: str, raw: bytes) -> array[int]:
    numbers = array(kind)
    numbers.frombytes(raw)
    return numbers
