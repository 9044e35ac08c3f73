"""The owner of a record, as stored in files: enough to select records to erase, but no names."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from kvelastic.tiers.base import KEY_BYTES, Selection
from kvelastic.tiers.namespace import Namespace, encoded


class Owner(NamedTuple):
    """The owner of a record: its namespace in 40 bytes."""

    namespace: bytes
    """Fingerprint of the namespace, 16 bytes."""
    model: bytes
    """Result of `model_hash`, 16 bytes."""
    generation: int


def model_hash(model: str) -> bytes:
    """Return a 16-byte hash of a model's name."""
    return hashlib.sha256(b"kvelastic model " + encoded(model)).digest()[:KEY_BYTES]


def owner_of(namespace: Namespace) -> Owner:
    """Return the owner to store in records of a namespace."""
    generation = namespace.generation % (1 << 64)
    return Owner(namespace.fingerprint, model_hash(namespace.model), generation)


Wanted = Callable[[Owner, int], bool]
"""Returns whether a record is selected, by its owner and the time of its `put` in ns."""


def wanted_by(selection: Selection, now_s: float) -> Wanted:
    """Return the predicate of a selection. `now_s` is now, on the clock of the records' times."""
    namespace = selection.namespace
    model = None if selection.model is None else model_hash(selection.model)
    older_than_s = selection.older_than_s
    before_ns = None if older_than_s is None else int((now_s - older_than_s) * 1e9)

    @lru_cache(maxsize=1024)
    def fingerprint(generation: int) -> bytes:
        assert namespace is not None
        if not selection.every_generation:
            return namespace.fingerprint
        return replace(namespace, generation=generation).fingerprint

    def wanted(owner: Owner, stored_ns: int) -> bool:
        return (
            (namespace is None or owner.namespace == fingerprint(owner.generation))
            and (model is None or owner.model == model)
            and (before_ns is None or stored_ns < before_ns)
        )

    return wanted
