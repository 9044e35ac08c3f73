"""Tokens, and the seed with which a namespace begins its chain of block hashes.

Each hash (`SequenceMeta.keys`) identifies all tokens up to the end of its block. A hash has 128
bits and is not cryptographic (vmm_csrc/pool/block_keys.h). A namespace (a LoRA, a tenant, a
session) is hashed first, so two namespaces share no block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvelastic.errors import InvalidArgumentError
from kvelastic.tiers.base import KEY_BYTES

NO_SEED: Final = bytes(KEY_BYTES)
MOST_NAMES: Final = 64
MOST_NAME_CHARACTERS: Final = 4096

Tokens = npt.NDArray[np.int64]


def as_tokens(token_ids: Any, what: str = "token_ids") -> Tokens:
    """Return a contiguous 1-D array of int64, without a copy if possible.

    Takes arrays and CPU tensors. Raises `InvalidArgumentError` for another shape, for values other
    than integers, and for a tensor that is not on the CPU.
    """
    if type(token_ids) is not np.ndarray:
        try:
            token_ids = np.asarray(token_ids)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidArgumentError(
                f"{what} cannot be read as an array: {error}; pass a row of int64 on the CPU"
            ) from None
        if token_ids.size == 0 and token_ids.ndim == 1:
            return np.empty(0, np.int64)
    if token_ids.ndim != 1 or token_ids.dtype.kind not in "iu":
        raise InvalidArgumentError(
            f"{what} of shape {token_ids.shape} and dtype {token_ids.dtype}; pass a row of int64"
        )
    return np.ascontiguousarray(token_ids, np.int64)


def namespace_seed(fingerprint: bytes, names: Sequence[str] | None) -> bytes:
    """Return the start of a chain: a hash of the fingerprint and the names joined with NUL."""
    if not names:
        return fingerprint
    joined = "\0".join(namespace_names(names) or ()).encode()
    return hashlib.sha256(fingerprint + joined).digest()[:KEY_BYTES]


def namespace_names(namespace: Sequence[str] | None) -> list[str] | None:
    """Return the names of a namespace, which are later joined with NUL."""
    if namespace is None:
        return None
    if not isinstance(namespace, (list, tuple)) or len(namespace) > MOST_NAMES:
        raise InvalidArgumentError(
            f"namespace={namespace!r:.100} is not accepted; pass a list of at most {MOST_NAMES}"
            " names"
        )
    for name in namespace:
        if not isinstance(name, str) or len(name) > MOST_NAME_CHARACTERS or "\0" in name:
            raise InvalidArgumentError(
                f"{name!r:.100} in a namespace is not accepted; pass texts of at most"
                f" {MOST_NAME_CHARACTERS} characters without NUL"
            )
        try:
            name.encode()
        except UnicodeEncodeError:
            raise InvalidArgumentError(
                f"{name!r:.100} in a namespace has half of a surrogate pair; pass Unicode text"
            ) from None
    return list(namespace)
