"""A request's tokens as whole blocks with their keys."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from kvelastic._vmm import block_keys
from kvelastic.errors import InvalidArgumentError
from kvelastic.flexkv.common.hash_utils import NO_SEED, as_tokens, namespace_seed
from kvelastic.tiers.base import KEY_BYTES


class SequenceMeta:
    """Tokens and the chain of their blocks' keys, which is computed at the first use."""

    def __init__(
        self,
        token_ids: Any,
        tokens_per_block: int = 16,
        namespace: Sequence[str] | None = None,
        *,
        seed: bytes = NO_SEED,
    ) -> None:
        """`seed` is the namespace's fingerprint (see `hash_utils`).

        Raises `InvalidArgumentError` unless the tokens are a 1-D array of integers.
        """
        if tokens_per_block < 1:
            raise InvalidArgumentError(f"tokens_per_block={tokens_per_block}; give 1 or more")
        self.token_ids = as_tokens(token_ids)
        self.tokens_per_block = tokens_per_block
        self.length = len(self.token_ids)
        self.num_blocks = self.length // tokens_per_block
        self.seed = namespace_seed(seed, namespace)

    @cached_property
    def keys(self) -> bytes:
        """The keys of the whole blocks, concatenated."""
        return block_keys(self.token_ids, self.tokens_per_block, self.seed)

    @property
    def block_hashes(self) -> npt.NDArray[np.uint64]:
        """The keys as numbers: a row of two for each block, the lower half first."""
        return np.frombuffer(self.keys, np.uint64).reshape(-1, 2)

    def key(self, block: int) -> bytes:
        """Return the key of one block. Raises `InvalidArgumentError` for an unknown block."""
        if not 0 <= block < self.num_blocks:
            raise InvalidArgumentError(f"block {block} is not one of {self.num_blocks}")
        return self.keys[block * KEY_BYTES : (block + 1) * KEY_BYTES]

    def parent(self, block: int) -> bytes:
        """Return the key of the preceding block; zeros for the first block."""
        return self.key(block - 1) if block > 0 else bytes(KEY_BYTES)

    def __len__(self) -> int:
        return self.length
