"""Whose records they are, as files say it: enough to erase them by, and no names."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from kvelastic.tiers.base import KEY_BYTES
from kvelastic.tiers.namespace import Namespace


class Owner(NamedTuple):
    """A namespace in 40 bytes."""

    namespace: bytes
    """Fingerprint."""
    model: bytes
    """As of `model_hash`."""
    generation: int


def model_hash(model: str) -> bytes:
    """16 bytes that stand for the name of a model."""
    return hashlib.sha256(b"kvelastic model " + model.encode()).digest()[:KEY_BYTES]


def owner_of(namespace: Namespace) -> Owner:
    """What records of a namespace carry."""
    generation = namespace.generation % (1 << 64)
    return Owner(namespace.fingerprint, model_hash(namespace.model), generation)
