"""Adoption of the files of exited engines into a store, in short steps.

    adoption.begin(file)          # the file is locked and in the slot table; its slots are closed
    while not adoption.is_over:
        adoption.step()           # about 10 ms under the store's lock; other calls run in between

First the tables of the files are read. Then the records are restored in the index, oldest first
across all files, so that the newest are displaced last. Slots without a record stay closed, and
their file space is released.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from kvelastic import _vmm
from kvelastic.tiers.stores.disk.file import DataFile
from kvelastic.tiers.stores.disk.slots import SlotTable

PART: Final = 1 << 12
"""Entries per step. A step of a million entries would block other calls for seconds."""


class Adoption:
    """Files being adopted. The store's lock guards it; no folder lock is needed."""

    def __init__(
        self,
        index: _vmm.TierIndex,
        table: SlotTable,
        park: Callable[[Iterable[int]], None],
        release: Callable[[Iterable[int]], object],
    ) -> None:
        """`park` receives slots without a record; `release` receives slots whose space is freed."""
        self.torn = 0
        """Number of incomplete entries found."""
        self.files: set[DataFile] = set()
        """Files being adopted. Their slots must not be allocated."""
        self._index = index
        self._table = table
        self._park = park
        self._release = release
        self._found = _vmm.FoundRecords()
        self._unread: deque[tuple[DataFile, int]] = deque()
        """Files to read, each with the first slot not yet read."""

    @property
    def is_over(self) -> bool:
        """Whether no file is being adopted."""
        return not self.files

    def begin(self, file: DataFile) -> None:
        """Start to adopt a file. Its slots must be in the table and closed."""
        self.files.add(file)
        self._unread.append((file, 0))

    def step(self) -> None:
        """Read or restore up to `PART` entries.

        Raises `OSError` if the file system fails; the remaining records of that file are not found.
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
                self._park(range(first + end, first + file.geometry.slots))  # unreadable
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
        for slot in refused:  # the index has another record of this key
            file, own = self._table.place(slot)
            file.clear_entry(own)
        self._give_back(refused)

    def _give_back(self, slots: list[int]) -> None:
        # These slots may still have space, or bytes of displaced records.
        self._park(slots)
        self._table.set_residue(slots, is_there=True)
        self._release(slots)


def _numbers(kind: str, raw: bytes) -> array[int]:
    numbers = array(kind)
    numbers.frombytes(raw)
    return numbers
