"""A record as it lies on a server: a header that says what it is, and the bytes of the block.

    offset  bytes
    0       8      magic, with the format's version
    8       8      bytes of the record that follows
    16      16     its key
    32      16     fingerprint of its namespace
    48      4      CRC-32 of all of it, these four bytes excepted
    52      12     zeros

Integers are little-endian. What does not fit its key, its namespace and its checksum is no record:
it is a miss. A checksum finds what was damaged; it does not tell who wrote it.
"""

from __future__ import annotations

import struct
import zlib

MAGIC = b"kvtier\x00\x01"
HEADER_BYTES = 64
_FIELDS = struct.Struct("<8sQ16s16s")
_CHECKSUM = struct.Struct("<I12x")


def server_key(fingerprint: bytes, key: bytes) -> str:
    """What the record is called on the server."""
    return f"{fingerprint.hex()}-{key.hex()}"


def write_header(into: memoryview, key: bytes, fingerprint: bytes) -> None:
    """Describe the record that lies in `into` behind the header's place."""
    fields = _FIELDS.pack(MAGIC, len(into) - HEADER_BYTES, key, fingerprint)
    into[: _FIELDS.size] = fields
    checksum = zlib.crc32(into[HEADER_BYTES:], zlib.crc32(fields))
    into[_FIELDS.size : HEADER_BYTES] = _CHECKSUM.pack(checksum)


def is_whole(stored: memoryview, key: bytes, fingerprint: bytes) -> bool:
    """Whether this is the record of that key and namespace, with every byte as it was written."""
    if len(stored) < HEADER_BYTES:
        return False
    fields = _FIELDS.pack(MAGIC, len(stored) - HEADER_BYTES, key, fingerprint)
    if stored[: _FIELDS.size] != fields:
        return False
    checksum = zlib.crc32(stored[HEADER_BYTES:], zlib.crc32(fields))
    return stored[_FIELDS.size : HEADER_BYTES] == _CHECKSUM.pack(checksum)
