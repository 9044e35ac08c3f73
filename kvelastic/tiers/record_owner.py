"""Whose records they are, as files say it: enough to erase them by, and no names."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from kvelastic.tiers.base import KEY_BYTES, Selection
from kvelastic.tiers.namespace import Namespace, encoded


class Owner(NamedTuple):
    """A namespace in 40 bytes."""

    namespace: bytes
    """Fingerprint."""
    model: bytes
    """As of `model_hash`."""
    generation: int


def model_hash(model: str) -> bytes:
    """16 bytes that stand for the name of a model."""
    return hashlib.sha256(b"kvelastic model " + encoded(model)).digest()[:KEY_BYTES]


def owner_of(namespace: Namespace) -> Owner:
    """What records of a namespace carry."""
    generation = namespace.generation % (1 << 64)
    return Owner(namespace.fingerprint, model_hash(namespace.model), generation)


Wanted = Callable[[Owner, int], bool]
"""Whether a selection names a record of this owner, stored at that time (ns since the epoch)."""


def wanted_by(selection: Selection, now_s: float) -> Wanted:
    """The test of a selection for records of files; `now_s` is the wall clock's."""
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
