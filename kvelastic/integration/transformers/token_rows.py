"""The layout of keys and values in a range of addresses that grows with the sequence.

Attention reads the keys of a layer as `[batch, heads, tokens, dim]`, in which tokens may have any
constant stride. So tokens are stored in order, one *row* each. A longer sequence appends rows, and
stored rows never move.

One lane (the default): a row holds all layers, so that memory grows by one page at a time::

    lane 0    |unused| row of token 0                      | row of token 1          | ...
                     | K layer 0 | V layer 0 | K layer 1 ...| K layer 0 | V layer 0 ...
    pages     [ page 0               ][ page 1               ][ page 2 - not mapped yet

    address(token, part) = base + unused + token * row + offset of the part

One lane per part (`KVELASTIC_CONTIGUOUS_LAYOUT=false`): the rows of one layer's K are contiguous.
A page then has one extent in every lane, so memory grows by the granularity times the lanes::

    lane 0    |unused| K token 0 | K token 1 | K token 2 ...     layer 0
    lane 1    |unused| V token 0 | V token 1 | V token 2 ...     layer 0
    lane 2    |unused| K token 0 | ...                           layer 1

A part of a row is `[batch, heads, dim]`, dense. `unused` is one block of the pool, its null block.
Pure arithmetic; touches no memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Final, NamedTuple

ALIGNMENT_BYTES: Final = 64
"""Alignment of every part: a cache line, and sufficient for all loads of GPU kernels."""
LARGE_ROW_BYTES: Final = 4096
"""Row size from which an additional cache line is less than 2 % of the row."""


class Strides(NamedTuple):
    """The arguments of `torch.as_strided` for a part, in elements: batch, heads, tokens, dim."""

    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]
    offset: int


@dataclass(frozen=True)
class TokenRows:
    """The rows of one cache; immutable. Parts are numbered K, V of layer 0, K, V of layer 1, ..."""

    layers: int
    batch: int
    key: tuple[int, int]
    """Heads and dim of keys; `value` has those of values."""
    value: tuple[int, int]
    itemsize: int
    lane_stride_bytes: int
    """Distance between two lanes."""
    unused_bytes: int
    """Size of the unused block at the start of each lane."""
    is_one_lane: bool

    @property
    def lanes(self) -> int:
        """Number of address ranges that grow together."""
        return 1 if self.is_one_lane else 2 * self.layers

    def part_bytes(self, part: int) -> int:
        """Return the size of one token in a part, padded to the alignment."""
        heads, dim = self.value if part % 2 else self.key
        size_bytes = self.batch * heads * dim * self.itemsize
        return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    @cached_property
    def _offsets(self) -> list[int]:
        """Offset of each part in its row; the last element is the size of a row of all parts."""
        return [0, *accumulate(self.part_bytes(part) for part in range(2 * self.layers))]

    def row_bytes(self, lane: int) -> int:
        """Return the distance between two tokens in a lane.

        Large rows have an odd number of cache lines. With a stride of a power of two the keys of
        one head would map to few cache sets (on the host a longer prompt took twice the time).
        """
        size_bytes = self._offsets[-1] if self.is_one_lane else self.part_bytes(lane)
        is_even = size_bytes // ALIGNMENT_BYTES % 2 == 0
        return size_bytes + (ALIGNMENT_BYTES if is_even and size_bytes >= LARGE_ROW_BYTES else 0)

    def lane_of(self, part: int) -> int:
        """Return the lane of a part."""
        return 0 if self.is_one_lane else part

    def start_bytes(self, lane: int) -> int:
        """Return the offset of a lane's first row from the base of the range."""
        return lane * self.lane_stride_bytes + self.unused_bytes

    def needed_bytes(self, tokens: int) -> int:
        """Return the bytes that `tokens` tokens need from the start of the widest lane."""
        if tokens == 0:
            return 0
        return self.unused_bytes + tokens * max(map(self.row_bytes, range(self.lanes)))

    def view(self, part: int, begin: int, end: int) -> Strides:
        """Return the strides of tokens `begin` to `end` of a part, in the whole range."""
        lane = self.lane_of(part)
        first_bytes = self.start_bytes(lane) + begin * self.row_bytes(lane)
        return self.view_at(part, first_bytes, end - begin)

    def view_at(self, part: int, row_start_bytes: int, tokens: int) -> Strides:
        """Return the strides of `tokens` tokens of a part whose first row is at an offset."""
        heads, dim = self.value if part % 2 else self.key
        row_bytes = self.row_bytes(self.lane_of(part))
        offset_bytes = self._offsets[part] if self.is_one_lane else 0
        return Strides(
            shape=(self.batch, heads, tokens, dim),
            strides=(heads * dim, dim, row_bytes // self.itemsize, 1),
            offset=(row_start_bytes + offset_bytes) // self.itemsize,
        )
