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
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise InvalidArgumentError(f"namespace={names!r}; pass a list of names")
    if any("\0" in name for name in names):
        raise InvalidArgumentError("a name of a namespace has a NUL in it, which joins them")
    joined = "\0".join(names).encode("utf-8", "surrogatepass")
    return hashlib.sha256(fingerprint + joined).digest()[:KEY_BYTES]
