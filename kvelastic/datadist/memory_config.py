"""Memory limits of caches, parsed from the JSON of three options. Pure.

    mem_pool_cfg, host_mem_pool_cfg      {"memory_size": 1073741824, "page_shift": 16}
    buf_pool_cfg      {"buf_cfg": [{"total_size": 4194304, "blk_size": 256, "max_buf_size": 8192}]}

A tensor starts at a multiple of its *alignment*: 2 to the power of `page_shift`, or the `blk_size`
of its tier. A *tier* holds tensors of at most `max_buf_size` bytes that are too large for the
previous tier. Tiers share the pool's memory: `total_size` is checked and reserves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from kvelastic.datadist.status import LLMParamError

MAX_HOST_POOL_BYTES: Final = 20 << 30
T = TypeVar("T")


class MemPool(Struct, forbid_unknown_fields=True):
    """A pool of caches: its size and the alignment of tensors."""

    memory_size: Annotated[int, Meta(ge=1, le=1 << 50)] | UnsetType
    """Unset: as much as the device's ledger grants."""
    page_shift: Annotated[int, Meta(ge=10, le=30)] = 16

    @property
    def alignment_bytes(self) -> int:
        """Alignment of tensors."""
        return 1 << self.page_shift


class BufferTier(Struct, forbid_unknown_fields=True):
    """A size class of tensors."""

    total_size: Annotated[int, Meta(ge=1, le=(1 << 32) - 1, multiple_of=2 << 20)]
    blk_size: Annotated[int, Meta(ge=1, le=2 << 20)] = 256
    max_buf_size: Annotated[int, Meta(ge=1)] | None = None

    @property
    def largest_bytes(self) -> int:
        """Size of the largest tensor."""
        return self.total_size - 1 if self.max_buf_size is None else self.max_buf_size


class _Tiers(Struct, forbid_unknown_fields=True):
    buf_cfg: Annotated[list[BufferTier], Meta(min_length=1, max_length=1 << 10)]


def parse_mem_pool(name: str, text: str) -> MemPool:
    """Parse the pool option `name`. Raises `LLMParamError`."""
    found = parse_json(name, text, MemPool)
    most = MAX_HOST_POOL_BYTES if name == "host_mem_pool_cfg" else inf
    if found.memory_size is not UNSET and found.memory_size > most:
        raise LLMParamError(f"{name}: memory_size={found.memory_size} is more than {most}")
    return found


def parse_buffer_tiers(name: str, text: str) -> list[BufferTier]:
    """Parse `buf_pool_cfg`. Raises `LLMParamError`."""
    tiers = parse_json(name, text, _Tiers).buf_cfg
    for tier in tiers:
        if tier.blk_size & (tier.blk_size - 1):  # so it divides 2 MiB, and total_size
            raise LLMParamError(f"{name}: blk_size={tier.blk_size} is no power of two")
        if tier.largest_bytes >= tier.total_size:
            raise LLMParamError(
                f"{name}: max_buf_size={tier.largest_bytes} is more than {tier.total_size - 1}"
            )
    for before, tier in pairwise(tiers):
        if tier.largest_bytes <= before.largest_bytes:
            raise LLMParamError(
                f"{name}: max_buf_size {tier.largest_bytes} comes after {before.largest_bytes};"
                " order the tiers so that it increases"
            )
    return tiers


def alignment_of(tiers: Sequence[BufferTier], tensor_bytes: int) -> int | None:
    """Return the alignment of a tensor's tier; None if it is larger than all tiers allow."""
    fitting = (tier for tier in tiers if tensor_bytes <= tier.largest_bytes)
    return next((tier.blk_size for tier in fitting), None)


def parse_json(name: str, text: str, kind: type[T]) -> T:
    """Parse a JSON text into a value of `kind`; numbers may be quoted. Raises `LLMParamError`."""
    try:
        return msgspec.json.decode(text, type=kind, strict=False)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise LLMParamError(f"{name}={text[:200]!r} is not accepted: {error}") from None
