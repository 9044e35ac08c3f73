"""Namespaces of keys: all settings that change the bytes of a block for the same tokens."""

from __future__ import annotations

import hashlib
from dataclasses import astuple, dataclass, replace
from functools import cached_property

FORMAT_VERSION = 1
"""Version of the formats of records and keys. Versions do not share records."""


@dataclass(frozen=True)
class Namespace:
    """The identity of a set of keys. Namespaces that differ in any field share no keys or records.

    `weights` is a fingerprint of the contents of the weights, and `adapter` of a LoRA's.
    `generation` changes when contents change and all names stay: on a reset of the prefix cache,
    or when weights are replaced in place.
    """

    model: str
    weights: str = ""
    dtype: str = ""
    layout: str = ""
    block_tokens: int = 0
    record_bytes: int = 0
    ranks: str = ""
    """Sizes and this engine's rank: tensor, pipeline and data parallel."""
    adapter: str = ""
    salt: str = ""
    hash_algorithm: str = ""
    generation: int = 0

    @cached_property
    def fingerprint(self) -> bytes:
        """16 bytes of a SHA-256 over the fields, each prefixed with its length."""
        digest = hashlib.sha256(b"kvelastic tier namespace %d" % FORMAT_VERSION)
        for value in astuple(self):
            raw = encoded(str(value))
            digest.update(b"%d:" % len(raw) + raw)
        return digest.digest()[:16]

    def key_of(self, block_hash: bytes, group: int = 0) -> bytes:
        """Return the 16-byte key of a block, from the engine's block hash and group number."""
        return hashlib.sha256(self.fingerprint + group.to_bytes(4, "little") + block_hash).digest()[
            :16
        ]

    def next_generation(self) -> Namespace:
        """Return this namespace with the next generation, which finds no earlier records."""
        return replace(self, generation=self.generation + 1)


def encoded(text: str) -> bytes:
    """Encode as UTF-8. Restores the original bytes of arguments and paths that are not UTF-8."""
    return text.encode("utf-8", "surrogateescape")
