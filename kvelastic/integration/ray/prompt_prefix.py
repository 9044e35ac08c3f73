"""Hashes of a prompt's prefixes, so that requests with a common prefix go to the same replica.

    prefix_of(body)      # a hash for each prefix of a multiple of 512 bytes, the longest last

Two requests share a hash if and only if their prompts begin with the same bytes, as written by the
client. A prompt has at most 64 hashes; the text after them does not affect routing.
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
    """The keys of a body that are parsed. All others are validated and skipped."""

    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")


_decode: Final = msgspec.json.Decoder(_Prompt).decode


def prefix_of(body: bytes) -> tuple[bytes, ...]:
    """Return the hashes of the prompt's prefixes; empty if there is no prompt or it is short."""
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
