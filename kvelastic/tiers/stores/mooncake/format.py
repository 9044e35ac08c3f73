"""Format of a record on a server: a header and the bytes of the block.

    offset  bytes
    0       8      magic, with the format's version
    8       8      bytes of the record that follows
    16      16     its key
    32      16     fingerprint of its namespace
    48      4      CRC-32 of the 48 bytes before it and of the record
    52      12     zeros

Integers are little-endian. If key, namespace or checksum does not match, the read is a miss. The
checksum detects damage; it does not authenticate the writer.
"""

from __future__ import annotations

import struct
import zlib

MAGIC = b"kvtier\x00\x01"
HEADER_BYTES = 64
_FIELDS = struct.Struct("<8sQ16s16s")
_CHECKSUM = struct.Struct("<I12x")


def server_key(fingerprint: bytes, key: bytes) -> str:
    """Return the record's key on the server."""
    return f"{fingerprint.hex()}-{key.hex()}"


def write_header(into: memoryview, key: bytes, fingerprint: bytes) -> None:
    """Write the header of the record that follows it in `into`."""
    fields = _FIELDS.pack(MAGIC, len(into) - HEADER_BYTES, key, fingerprint)
    into[: _FIELDS.size] = fields
    checksum = zlib.crc32(into[HEADER_BYTES:], zlib.crc32(fields))
    into[_FIELDS.size : HEADER_BYTES] = _CHECKSUM.pack(checksum)


def is_whole(stored: memoryview, key: bytes, fingerprint: bytes) -> bool:
    """Whether the bytes are the intact record of that key and namespace."""
    if len(stored) < HEADER_BYTES:
        return False
    fields = _FIELDS.pack(MAGIC, len(stored) - HEADER_BYTES, key, fingerprint)
    if stored[: _FIELDS.size] != fields:
        return False
    checksum = zlib.crc32(stored[HEADER_BYTES:], zlib.crc32(fields))
    return stored[_FIELDS.size : HEADER_BYTES] == _CHECKSUM.pack(checksum)
