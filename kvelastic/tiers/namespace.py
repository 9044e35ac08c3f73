"""What must never be mixed: everything that changes the bytes of a block of the same tokens."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property

FORMAT_VERSION = 1
"""Of records and keys; another one finds nothing of this."""


@dataclass(frozen=True)
class Namespace:
    """One world of keys. Two that differ in anything share no key and no record.

    `weights` is a fingerprint of the weights' contents, `adapter` one of a LoRA's; `generation`
    goes up with every change that keeps all of the names: a reset of the prefix cache, weights
    that are replaced in place.
    """

    model: str
    weights: str = ""
    dtype: str = ""
    layout: str = ""
    block_tokens: int = 0
    record_bytes: int = 0
    ranks: str = ""
    """Sizes and own place: tensor, pipeline and data parallel."""
    adapter: str = ""
    salt: str = ""
    hash_algorithm: str = ""
    generation: int = 0

    @cached_property
    def fingerprint(self) -> bytes:
        """16 bytes that stand for all of it: SHA-256 over its fields, each with its length."""
        digest = hashlib.sha256(b"kvelastic tier namespace %d" % FORMAT_VERSION)
        for field in (
            self.model,
            self.weights,
            self.dtype,
            self.layout,
            str(self.block_tokens),
            str(self.record_bytes),
            self.ranks,
            self.adapter,
            self.salt,
            self.hash_algorithm,
            str(self.generation),
        ):
            raw = encoded(field)
            digest.update(b"%d:" % len(raw) + raw)
        return digest.digest()[:16]

    def key_of(self, block_hash: bytes, group: int = 0) -> bytes:
        """The key of a block that an engine names by a hash of its own, and by its group."""
        return hashlib.sha256(self.fingerprint + group.to_bytes(4, "little") + block_hash).digest()[
            :16
        ]

    def next_generation(self) -> Namespace:
        """The same with everything stored so far out of reach."""
        return replace(self, generation=self.generation + 1)


def encoded(text: str) -> bytes:
    """UTF-8; of an argument or a path that is not UTF-8, the bytes that it was."""
    return text.encode("utf-8", "surrogateescape")
