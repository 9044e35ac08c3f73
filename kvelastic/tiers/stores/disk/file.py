"""One file of the disk tier: creation, takeover after the writer's death, entries, space, records.

The process that writes a file holds flock() on it. The kernel releases it when the process ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from kvelastic import _vmm
from kvelastic.tiers.base import NO_KEY
from kvelastic.tiers.owned_files import open_file
from kvelastic.tiers.stores.disk.format import (
    EMPTY_ENTRY,
    ENTRY_BYTES,
    FILE_ID_BYTES,
    HEADER_BYTES,
    Entry,
    Geometry,
    pack_entry,
    pack_header,
    unpack_header,
)

SUFFIX: Final = ".kv"
_RangeCall = Callable[[int, int, int], int]

Answers = list[tuple[int, int]]
"""For each record: bytes moved or minus errno, and the checksum of the bytes in memory now."""

_Way = Callable[[Sequence[tuple[int, int]], Sequence[object], bytes], Answers]


def held_bytes(state: os.stat_result) -> int:
    """Return the bytes a file may take of its file system: its blocks and its largest extent map.

    A file system keeps a map of a file's extents, and `st_blocks` includes it. If each system page
    is a separate extent, the map takes 1/160 of the blocks.
    """
    blocks_bytes = state.st_blocks * 512
    return blocks_bytes + map_bytes(blocks_bytes)


def map_bytes(blocks_bytes: int) -> int:
    """Return the largest size of the extent map for `blocks_bytes` of a file."""
    return blocks_bytes // 160 + 4096 if blocks_bytes else 0


def room_for(file_bytes: int) -> int:
    """Return the smallest space that holds `file_bytes` and their extent map."""
    room_bytes = -(-(file_bytes + 4096) * 160 // 159)
    return room_bytes if room_bytes - map_bytes(room_bytes) >= file_bytes else room_bytes + 1


class DataFile:
    """A file that this process writes. Slots are numbered from 0. The store's lock guards it.

    Methods raise `OSError` if the file system fails.
    """

    def __init__(self, folder: int, name: str, fd: int, geometry: Geometry, file_id: bytes) -> None:
        self.folder = folder
        self.name = name
        self.geometry = geometry
        self.file_id = file_id
        self._fd = fd
        self._direct_fd = -1
        self.is_direct = False
        """Whether record I/O bypasses the page cache."""
        with suppress(OSError):  # tmpfs and some others lack O_DIRECT
            self._direct_fd = open_file(folder, name, os.O_RDWR | os.O_DIRECT)
            self.is_direct = os.path.sameopenfile(fd, self._direct_fd)

    @staticmethod
    def create(folder: int, geometry: Geometry) -> DataFile:
        """Create a file with all of its space allocated. The caller holds the folder's lock."""
        file_id = os.urandom(FILE_ID_BYTES)
        name = file_id[:8].hex() + SUFFIX
        fd = open_file(folder, name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(fd, 0, geometry.file_bytes)
            _write_all(fd, pack_header(geometry, file_id), 0)
            return DataFile(folder, name, fd, geometry, file_id)
        except BaseException:
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)
            os.close(fd)
            raise

    @staticmethod
    def take_over(folder: int, name: str) -> DataFile | None:
        """Open a file whose writer has exited; None if it is alive or the header is invalid.

        The caller holds the folder's lock.
        """
        fd = open_file(folder, name, os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            header = unpack_header(os.pread(fd, HEADER_BYTES, 0), os.fstat(fd).st_size)
            if header is not None:
                return DataFile(folder, name, fd, *header)
        except BlockingIOError:
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None

    @property
    def record_fd(self) -> int:
        """Descriptor for record I/O."""
        return self._direct_fd if self.is_direct else self._fd

    @property
    def is_removed(self) -> bool:
        """Whether the file's name has been removed."""
        return os.fstat(self._fd).st_nlink == 0

    @property
    def held_bytes(self) -> int:
        """Bytes the file may take of its file system. See the function `held_bytes`."""
        return held_bytes(os.fstat(self._fd))

    def use_page_cache(self) -> None:
        """Stop using O_DIRECT, for a file system that accepts the flag but refuses the I/O."""
        self.is_direct = False  # keep the descriptor: a call may be in progress

    def read_table(self) -> bytes:
        """Return the entries of all slots; zeros beyond the end of the file."""
        return self.read_entries(0, self.geometry.slots)

    def read_entries(self, first: int, count: int) -> bytes:
        """Return the entries of `count` slots; zeros beyond the end of the file."""
        want = count * ENTRY_BYTES
        parts = []
        at = self.geometry.entry_offset(first)
        while want > 0 and (part := os.pread(self._fd, want, at)):
            parts.append(part)
            at += len(part)
            want -= len(part)
        return b"".join(parts) + bytes(want)

    @property
    def whole_slots(self) -> int:
        """Slots whose records lie within the file. Fewer than all if the file was truncated."""
        geometry = self.geometry
        reach = os.fstat(self._fd).st_size - geometry.data_offset - geometry.record_bytes
        return min(geometry.slots, max(0, reach // geometry.stride_bytes + 1))

    def write_entry(self, slot: int, entry: Entry) -> None:
        """Write a slot's table entry. The record must be written already."""
        raw = pack_entry(entry, self.file_id, slot)
        _write_all(self._fd, raw, self.geometry.entry_offset(slot))

    def clear_entry(self, slot: int) -> None:
        """Mark a slot empty."""
        _write_all(self._fd, EMPTY_ENTRY, self.geometry.entry_offset(slot))

    def clear_entries(self, slots: Iterable[int]) -> None:
        """Mark slots empty."""
        for slot in slots:
            self.clear_entry(slot)

    def sync(self) -> None:
        """Block until everything written so far is on the disk."""
        os.fdatasync(self._fd)

    def wipe(self, slots: Iterable[int]) -> None:
        """Make records unreadable but keep their space allocated."""
        for first, count in runs(slots):
            self._checked(_vmm.zero_range, first, count)

    def release(self, slots: Iterable[int]) -> None:
        """Return the slots' space to the file system; raises EOPNOTSUPP if it is unsupported."""
        for first, count in runs(slots):
            self._checked(_vmm.release_range, first, count)

    def reserve(self, first: int, count: int) -> None:
        """Allocate space for slots that have none."""
        stride = self.geometry.stride_bytes
        os.posix_fallocate(self._fd, self.geometry.record_offset(first), count * stride)

    def remove(self) -> None:
        """Close and remove the file."""
        with suppress(FileNotFoundError):
            os.unlink(self.name, dir_fd=self.folder)
        self.close()

    def close(self) -> None:
        """Close the file; another process may then take it over. Idempotent."""
        for fd in (self._direct_fd, self._fd):
            if fd >= 0:
                os.close(fd)
        self._direct_fd = self._fd = -1

    def _checked(self, call: _RangeCall, first: int, count: int) -> None:
        stride = self.geometry.stride_bytes
        failed = call(self._fd, self.geometry.record_offset(first), count * stride)
        if failed:
            raise OSError(failed, os.strerror(failed), self.name)


def runs(slots: Iterable[int]) -> list[tuple[int, int]]:
    """Group slots into (first, count) of adjacent ones, in ascending order."""
    out: list[tuple[int, int]] = []
    for slot in sorted(slots):
        if out and sum(out[-1]) == slot:
            out[-1] = (out[-1][0], out[-1][1] + 1)
        else:
            out.append((slot, 1))
    return out


def _write_all(fd: int, raw: bytes, offset: int) -> None:
    while raw:
        written = os.pwrite(fd, raw, offset)
        if written == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        raw, offset = raw[written:], offset + written


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


def carry(way: _Way, transfers: Sequence[RecordTransfer], views: Sequence[memoryview]) -> Answers:
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


def _call(way: _Way, transfers: Sequence[RecordTransfer], views: Sequence[memoryview]) -> Answers:
    return way(
        [transfer.place for transfer in transfers],
        [views[transfer.at] for transfer in transfers],
        b"".join(transfer.key for transfer in transfers),
    )
