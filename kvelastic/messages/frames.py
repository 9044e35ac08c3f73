"""Frames: the format of messages on a byte stream.

    0      4     5      6        7     8               12             20        20+n
    | kvms | wire| kind | descr. | 0   | body bytes: n | number       | body    | code, 16 bytes |
             version

Integers are little-endian. `number` matches a reply to its request. The authentication code exists
only on TCP, once both ends share a key: BLAKE2b over a count of frames, header and body. The header
and the bodies of HELLO and ERROR are the same in every version, so that peers of different versions
can report errors.
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
"""Maximum descriptors passed with one message."""
MOST_UNAUTHENTICATED_BYTES: Final = 512
"""Maximum body bytes of an unauthenticated peer."""
_COUNT: Final = struct.Struct("<Q")
_ERROR: Final = struct.Struct("<B")
_MOST_TEXT_BYTES: Final = 440


class Kind(IntEnum):
    """The kind of a frame."""

    HELLO = 0
    PROOF = 1
    REQUEST = 2
    """Wants a reply; its number is unique among pending requests."""
    REPLY = 3
    ERROR = 4
    """Replaces a reply; number 0 means that the connection ends."""
    NOTICE = 5
    """A notification without a reply."""
    ALIVE = 6
    """Empty; makes the kernel detect a lost host."""


_WITH_DESCRIPTORS: Final = {Kind.REQUEST, Kind.REPLY, Kind.NOTICE}


@dataclass(frozen=True)
class Frame:
    """One frame, after its code was checked and removed."""

    kind: Kind
    number: int
    body: bytes
    descriptors: tuple[int, ...] = ()
    """Open file descriptors; the receiver must close them."""


class FrameWriter:
    """Encodes frames; after `use_key`, each has an authentication code. Not thread-safe."""

    def __init__(self) -> None:
        self._key = b""
        self._count = 0

    def use_key(self, key: bytes) -> None:
        """Append a code to each later frame."""
        self._key = key

    def write(self, kind: Kind, number: int, body: bytes, descriptors: int = 0) -> bytes:
        """Encode one frame. Frames must be sent in the order of the calls."""
        frame = HEADER.pack(MAGIC, WIRE_VERSION, kind, descriptors, 0, len(body), number) + body
        if self._key:
            frame += _code(self._key, self._count, frame)
            self._count += 1
        return frame


class FrameReader:
    """Decodes frames from a byte stream; allocates memory only for received bytes.

    Not thread-safe. After an error, the reader is unusable.
    """

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._key = b""
        self._count = 0
        self._most_bytes = MOST_UNAUTHENTICATED_BYTES
        self._most_descriptors = 0
        self._descriptors: list[int] = []

    def use_key(self, key: bytes) -> None:
        """Require a valid code on each later frame."""
        self._key = key

    def allow(self, most_bytes: int) -> None:
        """Accept descriptors, and bodies of up to `most_bytes`: the peer is authenticated."""
        self._most_bytes = most_bytes
        self._most_descriptors = MOST_DESCRIPTORS

    @property
    def wanted_bytes(self) -> int:
        """Bytes to read next, to complete the current frame."""
        return max(self._frame_bytes() - len(self._bytes), 1)

    def feed(self, data: bytes, descriptors: list[int] | None = None) -> None:
        """Append received bytes and descriptors; takes ownership of the descriptors.

        Raises `MessageError` if more descriptors are pending than two messages may have.
        """
        self._bytes += data
        if descriptors:
            self._descriptors += descriptors
            if len(self._descriptors) > 2 * MOST_DESCRIPTORS:
                raise MessageError("descriptors came that no message announced")

    def next(self) -> Frame | None:
        """Return the next complete frame, or None if more bytes are needed.

        Raises `MessageVersionError` for another wire version. Raises `MessageError` for invalid
        data: another program's bytes, a body that is too large, a wrong code, more or fewer
        descriptors than announced. The reader then keeps the descriptors.
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
        came = len(self._descriptors)
        # Those beyond `descriptors` may belong to the next frame, if its first bytes have come.
        if descriptors > came or (descriptors < came and not self._bytes):
            raise MessageError(f"{descriptors} descriptors were announced, {came} came")
        taken = tuple(self._descriptors[:descriptors])
        del self._descriptors[:descriptors]
        return Frame(Kind(kind), number, frame[HEADER.size : end], taken)

    def take_descriptors(self) -> list[int]:
        """Take the pending descriptors; the caller must close them."""
        taken, self._descriptors = self._descriptors, []
        return taken

    def _frame_bytes(self) -> int:
        """Return the size of the next frame, or of a header until one has arrived."""
        if len(self._bytes) < HEADER.size:
            # If the first bytes differ, fail now instead of waiting for more.
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
        most_descriptors = self._most_descriptors if kind in _WITH_DESCRIPTORS else 0
        if kind >= len(Kind) or zero or descriptors > most_descriptors:
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
    """Encode an error, in every version's format: its code and its truncated text."""
    known = isinstance(error, KvelasticError)
    code = error.code.encode() if isinstance(error, KvelasticError) else b"KVELASTIC_ERROR"
    # Details of internal errors belong in our log only.
    text = str(error) if known else "the peer failed; its log says why"
    raw = text.encode()[:_MOST_TEXT_BYTES]
    return _ERROR.pack(len(code)) + code + raw


def error_of(body: bytes) -> KvelasticError:
    """Decode a peer's error. Raises `MessageError` if the body is malformed."""
    code_bytes = body[0] if body else 0
    code = body[1 : 1 + code_bytes].decode("ascii", "replace")
    if not re.fullmatch(r"[A-Z_]{1,48}", code) or len(body) > MOST_UNAUTHENTICATED_BYTES:
        raise MessageError("the peer sent an error that cannot be read")
    text = body[1 + code_bytes :].decode("utf-8", "replace")
    return native_error(code, "".join(c if c.isprintable() else "?" for c in text))
