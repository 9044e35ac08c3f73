"""Frames: how messages follow one another on a stream of bytes.

    0      4     5      6        7     8               12             20        20+n
    | kvms | wire| kind | descr. | 0   | body bytes: n | number       | body    | code, 16 bytes |
             version

All little-endian. `number` joins a reply to its request. The code is there on TCP only, once both
ends know a key: BLAKE2b over a count of frames, header and body. The header, and the bodies of
HELLO and ERROR, are the same in every version, so that peers of different versions can tell each
other what is wrong.
"""

from __future__ import annotations

import hmac
import re
import struct
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from typing import Final

from kvelastic.errors import KvelasticError, MessageError, MessageVersionError, native_error

MAGIC: Final = b"kvms"
WIRE_VERSION: Final = 1
HEADER: Final = struct.Struct("<4sBBBBIQ")
CODE_BYTES: Final = 16
MOST_DESCRIPTORS: Final = 16
"""Descriptors beside one message."""
MOST_BYTES_OF_A_STRANGER: Final = 512
"""A body before the peer was let in."""
_COUNT: Final = struct.Struct("<Q")
_ERROR: Final = struct.Struct("<B")
_MOST_TEXT_BYTES: Final = 440


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 0
    PROOF = 1
    REQUEST = 2
    """Wants a reply; its number is not used by another request that waits."""
    REPLY = 3
    ERROR = 4
    """In place of a reply; number 0: the connection ends."""
    NOTICE = 5
    """Wants no reply."""
    ALIVE = 6
    """Says nothing, so that the kernel notices when a host has gone."""


@dataclass(frozen=True)
class Frame:
    """One frame, its code checked and taken off."""

    kind: Kind
    number: int
    body: bytes
    descriptors: tuple[int, ...] = ()
    """Open file descriptors; whoever takes the frame closes them."""


class FrameWriter:
    """Makes frames; with a key from `use_key` on, each has its code. Not thread-safe."""

    def __init__(self) -> None:
        self._key = b""
        self._count = 0

    def use_key(self, key: bytes) -> None:
        """Every later frame has a code."""
        self._key = key

    def write(self, kind: Kind, number: int, body: bytes, descriptors: int = 0) -> bytes:
        """The bytes of one frame, which must be sent in the order of the calls."""
        frame = HEADER.pack(MAGIC, WIRE_VERSION, kind, descriptors, 0, len(body), number) + body
        if self._key:
            frame += _code(self._key, self._count, frame)
            self._count += 1
        return frame


class FrameReader:
    """Takes bytes as they come and gives whole frames; allocates what has arrived, no more.

    Not thread-safe. After an error nothing can be read any more.
    """

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._key = b""
        self._count = 0
        self._most_bytes = MOST_BYTES_OF_A_STRANGER
        self._descriptors: list[int] = []

    def use_key(self, key: bytes) -> None:
        """Every later frame must have its code."""
        self._key = key

    def allow(self, most_bytes: int) -> None:
        """The peer was let in: bodies up to this size from now on."""
        self._most_bytes = most_bytes

    @property
    def wanted_bytes(self) -> int:
        """How much to read at once: enough for the frame that is on its way."""
        return max(self._frame_bytes() - len(self._bytes), 1)

    def feed(self, data: bytes, descriptors: list[int] | None = None) -> None:
        """Bytes of the stream, and descriptors that came with them, which belong to it now.

        Raises `MessageError` where more of them wait than two messages may have.
        """
        self._bytes += data
        if descriptors:
            self._descriptors += descriptors
            if len(self._descriptors) > 2 * MOST_DESCRIPTORS:
                raise MessageError("descriptors came that no message announced")

    def next(self) -> Frame | None:
        """The next whole frame, or None until more bytes have come.

        Raises `MessageVersionError` for another version of the wire, and `MessageError` for what
        is no frame: another program's bytes, a size beyond what is allowed, a wrong code.
        """
        whole = self._frame_bytes()
        if len(self._bytes) < max(whole, HEADER.size):
            return None
        frame = bytes(self._bytes[:whole])
        del self._bytes[:whole]
        _, _, kind, descriptors, _, body_bytes, number = HEADER.unpack_from(frame)
        end = HEADER.size + body_bytes
        if self._key:
            if not hmac.compare_digest(_code(self._key, self._count, frame[:end]), frame[end:]):
                raise MessageError("a message was changed on its way, or is not the peer's")
            self._count += 1
        if descriptors > len(self._descriptors):
            raise MessageError(
                f"{descriptors} descriptors were announced, {len(self._descriptors)} came"
            )
        taken = tuple(self._descriptors[:descriptors])
        del self._descriptors[:descriptors]
        if self._descriptors and not self._bytes:
            raise MessageError("descriptors came that no message announced")
        return Frame(Kind(kind), number, frame[HEADER.size : end], taken)

    def take_descriptors(self) -> list[int]:
        """What nobody has taken, to be closed."""
        taken, self._descriptors = self._descriptors, []
        return taken

    def _frame_bytes(self) -> int:
        """Size of the frame that begins here; that of a header until one is there."""
        if len(self._bytes) < HEADER.size:
            # What differs already will not become a frame: do not wait for the rest of it.
            if not MAGIC.startswith(self._bytes[: len(MAGIC)]):
                raise MessageError("not a peer of kvelastic")
            return HEADER.size
        magic, version, kind, descriptors, zero, body_bytes, _ = HEADER.unpack_from(self._bytes)
        if magic != MAGIC:
            raise MessageError("not a peer of kvelastic")
        if version != WIRE_VERSION and kind != Kind.ERROR:
            raise MessageVersionError(
                f"the peer speaks version {version} of the wire, this kvelastic {WIRE_VERSION};"
                " run the same kvelastic on both sides"
            )
        if kind >= len(Kind) or zero or descriptors > MOST_DESCRIPTORS:
            raise MessageError("a header that no version writes")
        if body_bytes > self._most_bytes:
            raise MessageError(
                f"a message of {body_bytes} bytes is refused; {self._most_bytes} are allowed"
            )
        return HEADER.size + int(body_bytes) + (CODE_BYTES if self._key else 0)


def _code(key: bytes, count: int, frame: bytes) -> bytes:
    digest = blake2b(_COUNT.pack(count), key=key, digest_size=CODE_BYTES)
    digest.update(frame)
    return digest.digest()


def error_body(error: BaseException) -> bytes:
    """An error as both versions can read it: its code and what happened, cut to a bound."""
    known = isinstance(error, KvelasticError)
    code = error.code.encode() if isinstance(error, KvelasticError) else b"KVELASTIC_ERROR"
    # What went wrong inside is for our own log; a peer is told that, not what.
    text = str(error) if known else "the peer failed; its log says why"
    raw = text.encode()[:_MOST_TEXT_BYTES]
    return _ERROR.pack(len(code)) + code + raw


def error_of(body: bytes) -> KvelasticError:
    """The error that a peer sent. Raises `MessageError` for what `error_body` does not write."""
    code_bytes = body[0] if body else 0
    code = body[1 : 1 + code_bytes].decode("ascii", "replace")
    if not re.fullmatch(r"[A-Z_]{1,48}", code) or len(body) > MOST_BYTES_OF_A_STRANGER:
        raise MessageError("the peer sent an error that cannot be read")
    text = body[1 + code_bytes :].decode("utf-8", "replace")
    return native_error(code, "".join(c if c.isprintable() else "?" for c in text))
