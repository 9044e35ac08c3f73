"""Transfers of one call's records between memory and the files of a disk store."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvelastic.tiers.base import NO_KEY
from kvelastic.tiers.stores.disk.file import DataFile
from kvelastic.tiers.stores.disk.format import Entry
from kvelastic.tiers.stores.record_owner import Owner

Answers = list[tuple[int, int]]
"""For each record: bytes moved or minus errno, and the checksum of the bytes in memory now."""

Way = Callable[[Sequence[tuple[int, int]], Sequence[object], bytes], Answers]


@dataclass(frozen=True)
class RecordTransfer:
    """The transfer of one record."""

    at: int
    """Position among the keys of the call."""
    key: bytes
    slot: int
    """Slot number in the store."""
    file: DataFile
    own_slot: int
    """Slot number in the file."""
    checksum: int = 0
    """For a read: the expected checksum."""
    parent: bytes = NO_KEY
    """For a write: key of the preceding block in the chain."""

    @property
    def place(self) -> tuple[int, int]:
        """File descriptor and offset of the record."""
        return self.file.record_fd, self.file.geometry.record_offset(self.own_slot)

    def entry(self, owner: Owner, length_bytes: int, stored_ns: int, checksum: int) -> Entry:
        """Return the table entry to write after the record."""
        return Entry(self.key, self.parent, owner, length_bytes, stored_ns, checksum, self.at)


def carry(way: Way, transfers: Sequence[RecordTransfer], views: Sequence[memoryview]) -> Answers:
    """Read or write the records; `views` is indexed by `RecordTransfer.at`. Blocks.

    If a file system accepted O_DIRECT but refuses the I/O, the transfer is repeated through the
    page cache, and the file uses the page cache from then on.
    """
    answers = _call(way, transfers, views)
    refused = [
        i
        for i, (moved, _) in enumerate(answers)
        if moved == -errno.EINVAL and transfers[i].file.is_direct
    ]
    for i in refused:
        transfers[i].file.use_page_cache()
    if refused:
        again = _call(way, [transfers[i] for i in refused], views)
        for i, answer in zip(refused, again, strict=True):
            answers[i] = answer
    return answers


def _call(way: Way, transfers: Sequence[RecordTransfer], views: Sequence[memoryview]) -> Answers:
    return way(
        [transfer.place for transfer in transfers],
        [views[transfer.at] for transfer in transfers],
        b"".join(transfer.key for transfer in transfers),
    )
