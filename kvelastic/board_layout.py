"""The bytes that boards have in common: files in /dev/shm on which a process shows its figures.

    page 0          magic and version
    2 snapshots     figures; the process writes the older one, readers take the newer whole one
    16 requests     of operators, who share a lock; the one of a revision is at revision % 16
    16 answers      of the process, at the place of the request

Each cell ends with a checksum over what it is and holds. So a cell is whole or nothing, whoever is
killed half-way and whatever the order in which memory becomes visible; no one waits for anybody.
Everything is read as if it could lie: `opened` answers None for what was not sealed.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Final

RING: Final = 16
"""Requests and answers that there is room for."""
SNAPSHOTS: Final = 2
CELL_BYTES: Final = 512
"""Of a request or an answer."""
MOST_REVISION: Final = 1 << 62

_HEADER: Final = struct.Struct("<8sI")
_HEADER_BYTES: Final = 4096
_SUM: Final = struct.Struct("<I")


@dataclass(frozen=True)
class BoardLayout:
    """Where the cells of one kind of board lie, and what seals them."""

    subject: str
    """What messages call such a board."""
    magic: bytes
    """Eight bytes."""
    version: int
    snapshot_bytes: int

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self.answer_at(0) + RING * CELL_BYTES

    def snapshot_at(self, number: int) -> int:
        """Where the snapshot of that number lies in the file; they alternate."""
        return _HEADER_BYTES + number % SNAPSHOTS * self.snapshot_bytes

    def request_at(self, revision: int) -> int:
        """Where the request of that revision lies."""
        at = _HEADER_BYTES + SNAPSHOTS * self.snapshot_bytes
        return at + revision % RING * CELL_BYTES

    def answer_at(self, revision: int) -> int:
        """Where the answer of that revision lies."""
        return self.request_at(0) + (RING + revision % RING) * CELL_BYTES

    def pack_header(self) -> bytes:
        """The beginning of the file."""
        return _HEADER.pack(self.magic, self.version)

    def version_of(self, raw: bytes) -> int | None:
        """The version of a board that begins like this; None: it is no such board."""
        if len(raw) < _HEADER.size:
            return None
        magic, version = _HEADER.unpack_from(raw)
        return int(version) if magic == self.magic else None

    def sealed(self, what: bytes, body: bytes, size: int) -> bytes:
        """A cell of that size, which must have room for the body and a checksum of 4 bytes."""
        body = body.ljust(size - _SUM.size, b"\0")
        return body + _SUM.pack(self._sum(what, body))

    def opened(self, what: bytes, raw: bytes, size: int) -> bytes | None:
        """The body of a cell, padded; None: it is not whole, or something else."""
        if len(raw) != size:
            return None
        body = raw[: -_SUM.size]
        (expected,) = _SUM.unpack_from(raw, len(body))
        return body if self._sum(what, body) == expected else None

    def _sum(self, what: bytes, body: bytes) -> int:
        return zlib.crc32(body, zlib.crc32(self.magic + what))
