"""Memory limits of caches, parsed from the JSON of three options. Pure.

    mem_pool_cfg, host_mem_pool_cfg      {"memory_size": 1073741824, "page_shift": 16}
    buf_pool_cfg      {"buf_cfg": [{"total_size": 4194304, "blk_size": 256, "max_buf_size": 8192}]}

A tensor starts at a multiple of its *alignment*: 2 to the power of `page_shift`, or the `blk_size`
of its tier. A *tier* holds tensors of at most `max_buf_size` bytes that are too large for the
previous tier. Tiers share the pool's memory: `total_size` is checked and reserves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta, Struct

from kvelastic.datadist.status import LLMParamError

MAX_HOST_POOL_BYTES: Final = 20 << 30
T = TypeVar("T")


@dataclass(frozen=True)
class MemPool:
    """A pool of caches: its size and the alignment of tensors."""

    memory_bytes: int | None
    """None: as much as the device's ledger grants."""
    alignment_bytes: int = 1 << 16


@dataclass(frozen=True)
class BufferTier:
    """A size class of tensors."""

    alignment_bytes: int
    largest_bytes: int


class _Pool(Struct, forbid_unknown_fields=True):
    memory_size: Annotated[int, Meta(ge=1, le=1 << 50)]
    page_shift: Annotated[int, Meta(ge=10, le=30)] = 16


class _Tier(Struct, forbid_unknown_fields=True):
    total_size: Annotated[int, Meta(ge=1, le=(1 << 32) - 1, multiple_of=2 << 20)]
    blk_size: Annotated[int, Meta(ge=1, le=2 << 20)] = 256
    max_buf_size: Annotated[int, Meta(ge=1)] | None = None


class _Tiers(Struct, forbid_unknown_fields=True):
    buf_cfg: Annotated[list[_Tier], Meta(min_length=1, max_length=1 << 10)]


def parse_mem_pool(name: str, text: str) -> MemPool:
    """Parse the pool option `name`. Raises `LLMParamError`."""
    found = parse_json(name, text, _Pool)
    if name == "host_mem_pool_cfg" and found.memory_size > MAX_HOST_POOL_BYTES:
        raise LLMParamError(
            f"{name}: memory_size={found.memory_size} is more than {MAX_HOST_POOL_BYTES}"
        )
    return MemPool(found.memory_size, 1 << found.page_shift)


def parse_buffer_tiers(name: str, text: str) -> tuple[BufferTier, ...]:
    """Parse `buf_pool_cfg`. Raises `LLMParamError`."""
    tiers = []
    for row in parse_json(name, text, _Tiers).buf_cfg:
        most = row.total_size - 1
        tier = BufferTier(row.blk_size, most if row.max_buf_size is None else row.max_buf_size)
        if row.blk_size & (row.blk_size - 1):  # so it divides 2 MiB, and total_size
            raise LLMParamError(f"{name}: blk_size={row.blk_size} is no power of two")
        if tier.largest_bytes > most:
            raise LLMParamError(f"{name}: max_buf_size={tier.largest_bytes} is more than {most}")
        tiers.append(tier)
    for before, tier in pairwise(tiers):
        if tier.largest_bytes <= before.largest_bytes:
            raise LLMParamError(
                f"{name}: max_buf_size {tier.largest_bytes} comes after {before.largest_bytes};"
                " order the tiers so that it increases"
            )
    return tuple(tiers)


def alignment_of(tiers: Sequence[BufferTier], tensor_bytes: int) -> int | None:
    """Return the alignment of a tensor's tier; None if it is larger than all tiers allow."""
    fitting = (tier for tier in tiers if tensor_bytes <= tier.largest_bytes)
    return next((tier.alignment_bytes for tier in fitting), None)


def parse_json(name: str, text: str, kind: type[T]) -> T:
    """Parse a JSON text into a value of `kind`; numbers may be quoted. Raises `LLMParamError`."""
    try:
        return msgspec.json.decode(text, type=kind, strict=False)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise LLMParamError(f"{name}={text[:200]!r} is not accepted: {error}") from None
