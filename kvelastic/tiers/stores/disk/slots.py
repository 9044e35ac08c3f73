"""Per-slot data of a disk store, in flat arrays, and the mapping from slots to files.

Slots are numbered over all files, and each file has a range of them. Slot 0 belongs to no file, so
that the index of a store without files is not empty.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

from kvelastic.tiers.base import KEY_BYTES, keys_at
from kvelastic.tiers.stores.disk.file import DataFile
from kvelastic.tiers.stores.disk.format import Entry
from kvelastic.tiers.stores.record_owner import Owner


class SlotTable:
    """Per-slot data without I/O. The store's lock guards it."""

    def __init__(self) -> None:
        self.slots = 1
        self._keys = bytearray(KEY_BYTES)
        self._checksums = array("Q", [0])
        self._stored_ns = array("Q", [0])
        self._owners = array("I", [0])
        self._residue = bytearray(1)
        self._known: list[Owner] = []
        self._numbers: dict[Owner, int] = {}
        self._firsts: list[int] = [0]
        self._files: list[DataFile | None] = [None]

    def add_file(self, file: DataFile) -> range:
        """Return the slots of a new file.

        Reuses the range of a removed file if one is large enough.
        """
        need = file.geometry.slots
        for i, gone in enumerate(self._files):
            if gone is None and i > 0 and self._range(i) >= need:
                self._files[i] = file
                first = self._firsts[i]
                self._residue[first : first + need] = bytes(need)
                return range(first, first + need)
        first = self.slots
        self._firsts.append(first)
        self._files.append(file)
        self.slots += need
        self._keys.extend(bytes(need * KEY_BYTES))
        self._residue.extend(bytes(need))
        for numbers in (self._checksums, self._stored_ns, self._owners):
            numbers.frombytes(bytes(need * numbers.itemsize))
        return range(first, first + need)

    def remove_file(self, file: DataFile) -> None:
        """Forget a file. Its slots map to no file until the range is reused."""
        self._files[self._files.index(file)] = None

    def files(self) -> list[DataFile]:
        """Return all files."""
        return [file for file in self._files if file is not None]

    def range_of(self, file: DataFile) -> range:
        """Return the slots of a file."""
        first = self._firsts[self._files.index(file)]
        return range(first, first + file.geometry.slots)

    def place(self, slot: int) -> tuple[DataFile, int]:
        """Return the file and the slot's number in it.

        Raises LookupError if the slot has no file.
        """
        i = bisect_right(self._firsts, slot) - 1
        file = self._files[i]
        own = slot - self._firsts[i]
        if file is None or own >= file.geometry.slots:
            raise LookupError(slot)
        return file, own

    def by_file(self, slots: Iterable[int]) -> dict[DataFile, list[int]]:
        """Group slots by file, as numbers within the file; skips slots without a file."""
        out: dict[DataFile, list[int]] = {}
        for slot in slots:
            try:
                file, own = self.place(slot)
            except LookupError:
                continue
            out.setdefault(file, []).append(own)
        return out

    def set(self, slot: int, entry: Entry) -> None:
        """Set the record of a slot."""
        at = slot * KEY_BYTES
        self._keys[at : at + KEY_BYTES] = entry.key
        self._checksums[slot] = entry.checksum
        self._stored_ns[slot] = entry.stored_ns
        self._owners[slot] = self._number_of(entry.owner)
        self._residue[slot] = 0

    def set_found(
        self,
        slots: Sequence[int],
        keys: bytes,
        checksums: Sequence[int],
        times_ns: Sequence[int],
        owners: Sequence[int],
        known: Sequence[bytes],
    ) -> None:
        """Set records found in files.

        `owners` are indices into `known`, whose items have 40 bytes.
        """
        numbers = [self._number_of(_owner(raw)) for raw in known]
        fields = zip(slots, checksums, times_ns, owners, strict=True)
        for at, (slot, checksum, stored_ns, owner) in enumerate(fields):
            self._keys[slot * KEY_BYTES : (slot + 1) * KEY_BYTES] = keys_at(keys, at)
            self._checksums[slot] = checksum
            self._stored_ns[slot] = stored_ns
            self._owners[slot] = numbers[owner]
            self._residue[slot] = 0

    def clear(self, slot: int) -> None:
        """Mark a slot as without a record."""
        if self.has_record(slot):
            self._owners[slot] = 0
            self._residue[slot] = 1

    def has_record(self, slot: int) -> bool:
        """Whether the slot has a record."""
        return self._owners[slot] != 0

    def key(self, slot: int) -> bytes:
        """Return the key of the slot's record."""
        return bytes(self._keys[slot * KEY_BYTES : (slot + 1) * KEY_BYTES])

    def checksum(self, slot: int) -> int:
        """Return the checksum of the slot's record."""
        return self._checksums[slot]

    def stored_ns(self, slot: int) -> int:
        """Return when the slot's record was stored, in ns since the epoch."""
        return self._stored_ns[slot]

    def owner(self, slot: int) -> Owner | None:
        """Return the owner of the slot's record; None if the slot has none."""
        number = self._owners[slot]
        return self._known[number - 1] if number else None

    def occupied(self) -> Iterator[int]:
        """Iterate over all slots with a record."""
        return (slot for slot, number in enumerate(self._owners) if number)

    def set_residue(self, slots: Iterable[int], *, is_there: bool) -> None:
        """Set whether the file may still have record bytes in these slots without a record."""
        for slot in slots:
            self._residue[slot] = is_there

    def residue(self) -> Iterator[int]:
        """Iterate over the slots without a record whose file may still have record bytes."""
        slot = self._residue.find(1)
        while slot >= 0:
            yield slot
            slot = self._residue.find(1, slot + 1)

    def _number_of(self, owner: Owner) -> int:
        """Return a number from 1 for an owner; 0 means no owner."""
        if owner not in self._numbers:
            self._known.append(owner)
            self._numbers[owner] = len(self._known)
        return self._numbers[owner]

    def _range(self, i: int) -> int:
        end = self._firsts[i + 1] if i + 1 < len(self._firsts) else self.slots
        return end - self._firsts[i]


def _owner(raw: bytes) -> Owner:
    generation = int.from_bytes(raw[2 * KEY_BYTES :], "little")
    return Owner(raw[:KEY_BYTES], raw[KEY_BYTES : 2 * KEY_BYTES], generation)
