"""Names for the beginnings of a prompt, so that requests that share one go to the same replica.

    prefix_of(body)      # one name for each 512 bytes that the prompt begins with, the longest last

Two requests have a name in common if and only if their prompts begin with the same bytes (as the
client wrote them). A prompt has 64 names at most: what follows does not decide where it goes.
"""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

PIECE_BYTES: Final = 512
MOST_PIECES: Final = 64
_MOST_BYTES: Final = MOST_PIECES * PIECE_BYTES
_NAME_BYTES: Final = 8


class _Prompt(msgspec.Struct):
    """All that is read of a body; the rest is checked and skipped."""

    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")


_decode: Final = msgspec.json.Decoder(_Prompt).decode


def prefix_of(body: bytes) -> tuple[bytes, ...]:
    """The names of what the body's prompt begins with; none where it has no prompt, or is short."""
    try:
        found = _decode(body)
    except (msgspec.DecodeError, RecursionError):
        return ()
    text = bytes(memoryview(found.messages or found.prompt or found.input)[:_MOST_BYTES])
    digest = hashlib.blake2b(digest_size=_NAME_BYTES)
    names = []
    for start in range(0, len(text) - PIECE_BYTES + 1, PIECE_BYTES):
        digest.update(text[start : start + PIECE_BYTES])
        names.append(digest.digest())
    return tuple(names)
