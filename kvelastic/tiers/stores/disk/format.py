"""Format of a file of the disk tier: a header, a table of entries, and the records.

::

    0            header: magic, version, sizes, the file's number; a checksum over them
    4096         the table: one entry of 128 bytes for each slot; zeros: the slot is empty
    data_offset  the records, each at a multiple of 4096

All integers are little-endian. An entry lies within one sector. Its checksum also covers the file's
number and the slot, so an entry copied elsewhere is invalid. The checksum of a record is seeded
with its key. These checksums detect torn, truncated, flipped and misplaced data. They do not
authenticate it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvelastic import _vmm
from kvelastic.tiers.base import KEY_BYTES
from kvelastic.tiers.stores.record_owner import Owner

VERSION: Final = 1
HEADER_BYTES: Final = 4096
ENTRY_BYTES: Final = 128
ALIGNMENT_BYTES: Final = 4096
FILE_ID_BYTES: Final = 16
MAX_SLOTS: Final = 1 << 24
"""Maximum per file. A header with a higher number is invalid."""

_MAGIC: Final = b"KVELDISK"
_HEADER: Final = struct.Struct("<8sIIQQQQ16s")
_ENTRY: Final = struct.Struct("<16s16s16s16sQQQQQ")
_CHECKSUM: Final = struct.Struct("<Q")
_SUMMED_BYTES: Final = ENTRY_BYTES - _CHECKSUM.size
EMPTY_ENTRY: Final = bytes(ENTRY_BYTES)


def aligned(size_bytes: int) -> int:
    """Round up to the alignment that O_DIRECT requires."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Geometry(NamedTuple):
    """Offsets and sizes of a file with `slots` records of `record_bytes`."""

    record_bytes: int
    slots: int

    @property
    def stride_bytes(self) -> int:
        """Distance from one record to the next."""
        return aligned(self.record_bytes)

    @property
    def data_offset(self) -> int:
        """Offset of the first record."""
        return HEADER_BYTES + aligned(self.slots * ENTRY_BYTES)

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self.data_offset + self.slots * self.stride_bytes

    def record_offset(self, slot: int) -> int:
        """Return the offset of a slot's record."""
        return self.data_offset + slot * self.stride_bytes

    @staticmethod
    def entry_offset(slot: int) -> int:
        """Return the offset of a slot's entry."""
        return HEADER_BYTES + slot * ENTRY_BYTES


def largest_within(record_bytes: int, file_bytes: int) -> Geometry:
    """Return the geometry with the most records in `file_bytes`; 0 slots if none fits."""
    each = aligned(record_bytes) + ENTRY_BYTES
    slots = min(MAX_SLOTS, max(0, file_bytes - HEADER_BYTES) // each)
    while slots > 0 and Geometry(record_bytes, slots).file_bytes > file_bytes:
        slots -= 1  # the table's last system page; runs once or twice
    return Geometry(record_bytes, slots)


@dataclass(frozen=True)
class Entry:
    """The table entry of one record."""

    key: bytes
    parent: bytes
    """Key of the preceding block in the chain; NO_KEY if none or unknown."""
    owner: Owner
    length_bytes: int
    stored_ns: int
    """Time of the put, since the epoch."""
    checksum: int
    position: int
    """Position in its put. Of records with the same time, later ones are ends of chains."""


def pack_header(geometry: Geometry, file_id: bytes) -> bytes:
    """Return the first system page of a file."""
    raw = _HEADER.pack(
        _MAGIC,
        VERSION,
        ENTRY_BYTES,
        geometry.record_bytes,
        geometry.stride_bytes,
        geometry.slots,
        geometry.data_offset,
        file_id,
    )
    raw += _CHECKSUM.pack(_vmm.record_checksum(raw, file_id))
    return raw.ljust(HEADER_BYTES, b"\0")


def unpack_header(raw: bytes, file_bytes: int) -> tuple[Geometry, bytes] | None:
    """Return the geometry and the file's number; None if invalid or of another version."""
    end = _HEADER.size + _CHECKSUM.size
    if len(raw) < end:
        return None
    magic, version, entry_bytes, record_bytes, stride_bytes, slots, data_offset, file_id = (
        _HEADER.unpack_from(raw)
    )
    (checksum,) = _CHECKSUM.unpack_from(raw, _HEADER.size)
    if (magic, version, entry_bytes) != (_MAGIC, VERSION, ENTRY_BYTES):
        return None
    if checksum != _vmm.record_checksum(raw[: _HEADER.size], file_id):
        return None
    if not 0 < slots <= MAX_SLOTS or record_bytes == 0:
        return None
    geometry = Geometry(record_bytes, slots)
    said = (stride_bytes, data_offset)
    # A truncated file is accepted: the records before the cut are readable.
    if said != (geometry.stride_bytes, geometry.data_offset) or file_bytes < data_offset:
        return None
    return geometry, file_id


def pack_entry(entry: Entry, file_id: bytes, slot: int) -> bytes:
    """Return the 128 bytes of a table entry."""
    raw = _ENTRY.pack(
        entry.key,
        entry.parent,
        *entry.owner,
        entry.length_bytes,
        entry.stored_ns,
        entry.checksum,
        entry.position,
    ).ljust(_SUMMED_BYTES, b"\0")
    return raw + _CHECKSUM.pack(_vmm.record_checksum(raw, _place(file_id, slot)))


def unpack_entry(raw: bytes, file_id: bytes, slot: int) -> Entry | None:
    """Return the entry; None if it is damaged or belongs to another slot or file."""
    (checksum,) = _CHECKSUM.unpack_from(raw, _SUMMED_BYTES)
    if checksum != _vmm.record_checksum(raw[:_SUMMED_BYTES], _place(file_id, slot)):
        return None
    key, parent, namespace, model, generation, *others = _ENTRY.unpack_from(raw)
    return Entry(key, parent, Owner(namespace, model, generation), *others)


def entries(table: bytes, file_id: bytes) -> Iterator[tuple[int, Entry | None]]:
    """Yield each slot that is not empty, with its entry; None for a damaged entry."""
    for slot in range(len(table) // ENTRY_BYTES):
        raw = table[slot * ENTRY_BYTES : (slot + 1) * ENTRY_BYTES]
        if raw != EMPTY_ENTRY:
            yield slot, unpack_entry(raw, file_id, slot)


def _place(file_id: bytes, slot: int) -> bytes:
    return file_id[: KEY_BYTES - 8] + slot.to_bytes(8, "little")
