"""Memory limits of caches, parsed from the JSON of three options. Pure.

    mem_pool_cfg, host_mem_pool_cfg      {"memory_size": 1073741824, "page_shift": 16}
    buf_pool_cfg      {"buf_cfg": [{"total_size": 4194304, "blk_size": 256, "max_buf_size": 8192}]}

A tensor starts at a multiple of its *alignment*: 2 to the power of `page_shift`, or the `blk_size`
of its tier. A *tier* holds tensors of at most `max_buf_size` bytes that are too large for the
previous tier. Tiers share the pool's memory: `total_size` is checked and reserves nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from kvelastic.datadist import checks
from kvelastic.datadist.status import LLMParamError

DEFAULT_PAGE_SHIFT: Final = 16
MAX_HOST_POOL_BYTES: Final = 20 << 30
MAX_JSON_CHARS: Final = 1 << 20
_LARGEST_BLOCK_BYTES: Final = 2 << 20
_MAX_TIERS: Final = 1 << 10


@dataclass(frozen=True)
class MemPool:
    """A pool of caches: its size and the alignment of tensors."""

    memory_bytes: int | None
    """None: as much as the device's ledger grants."""
    alignment_bytes: int = 1 << DEFAULT_PAGE_SHIFT


@dataclass(frozen=True)
class BufferTier:
    """A size class of tensors."""

    alignment_bytes: int
    largest_bytes: int


def parse_mem_pool(name: str, value: str) -> MemPool:
    """Parse the pool option `name`. Raises `TypeError`, `LLMParamError`."""
    found = parse_json_object(name, value)
    _refuse_others(name, found, {"memory_size", "page_shift"})
    if "memory_size" not in found:
        raise LLMParamError(f'{name} has no "memory_size"; give the bytes of the pool')
    most = MAX_HOST_POOL_BYTES if name == "host_mem_pool_cfg" else (1 << 50)
    size = checks.integer(f"{name}: memory_size", found["memory_size"], least=1, most=most)
    shift = checks.integer(
        f"{name}: page_shift", found.get("page_shift", DEFAULT_PAGE_SHIFT), least=10, most=30
    )
    return MemPool(size, 1 << shift)


def parse_buffer_tiers(value: str) -> tuple[BufferTier, ...]:
    """Parse `buf_pool_cfg`. Raises `TypeError`, `LLMParamError`."""
    name = "buf_pool_cfg"
    found = parse_json_object(name, value)
    _refuse_others(name, found, {"buf_cfg"})
    rows = found.get("buf_cfg")
    if not isinstance(rows, list) or not 1 <= len(rows) <= _MAX_TIERS:
        raise LLMParamError(f'{name} needs "buf_cfg", a list of 1 to {_MAX_TIERS} tiers')
    tiers = [_parse_tier(f"{name}: buf_cfg[{at}]", row) for at, row in enumerate(rows)]
    for before, tier in pairwise(tiers):
        if tier.largest_bytes <= before.largest_bytes:
            raise LLMParamError(
                f"{name}: max_buf_size {tier.largest_bytes} comes after {before.largest_bytes};"
                " order the tiers so that it increases"
            )
    return tuple(tiers)


def _parse_tier(name: str, row: object) -> BufferTier:
    if not isinstance(row, dict):
        raise LLMParamError(f"{name} is no object; give total_size, blk_size and max_buf_size")
    _refuse_others(name, row, {"total_size", "blk_size", "max_buf_size"})
    if "total_size" not in row:
        raise LLMParamError(f"{name} has no total_size; give the bytes of the tier")
    block = checks.integer(
        f"{name}.blk_size", row.get("blk_size", 256), least=1, most=_LARGEST_BLOCK_BYTES
    )
    if block & (block - 1):
        raise LLMParamError(f"{name}.blk_size={block} is no power of two")
    total = checks.integer(f"{name}.total_size", row["total_size"], least=1, most=checks.MAX_UINT32)
    if total % _LARGEST_BLOCK_BYTES or total % block:
        raise LLMParamError(f"{name}.total_size={total} is no multiple of 2 MiB and of blk_size")
    largest = checks.integer(
        f"{name}.max_buf_size", row.get("max_buf_size", total - 1), least=1, most=total - 1
    )
    return BufferTier(block, largest)


def alignment_of(tiers: Sequence[BufferTier], tensor_bytes: int) -> int | None:
    """Return the alignment of a tensor's tier; None if it is larger than all tiers allow."""
    fitting = (tier for tier in tiers if tensor_bytes <= tier.largest_bytes)
    return next((tier.alignment_bytes for tier in fitting), None)


def round_up(size_bytes: int, alignment_bytes: int) -> int:
    """Round up to a multiple of the alignment."""
    return -(-size_bytes // alignment_bytes) * alignment_bytes


def parse_json_object(name: str, value: object) -> dict[str, Any]:
    """Parse an option's JSON object. Raises `TypeError`, `LLMParamError`."""
    text = checks.text(name, value)
    if len(text) > MAX_JSON_CHARS:
        raise LLMParamError(f"{name} has {len(text)} characters, more than {MAX_JSON_CHARS}")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LLMParamError(f"{name} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise LLMParamError(f"{name} is no JSON object; write it as {{...}}")
    return found


def _refuse_others(name: str, found: dict[str, Any], known: set[str]) -> None:
    if others := sorted(found.keys() - known):
        raise LLMParamError(f"{name} has {', '.join(others)}; it knows {', '.join(sorted(known))}")
