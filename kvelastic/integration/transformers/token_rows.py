"""Where the keys and values of a token lie in addresses that grow with the sequence.

Attention reads the keys of a layer as `[batch, heads, tokens, dim]`, in which tokens may be any
constant distance apart. So tokens come in order, a *row* each, and a longer sequence is only more
rows behind the last one; nothing that was written moves.

One lane (the default): a row holds all layers, so that memory grows by one page at a time::

    lane 0    |unused| row of token 0                      | row of token 1          | ...
                     | K layer 0 | V layer 0 | K layer 1 ...| K layer 0 | V layer 0 ...
    pages     [ page 0               ][ page 1               ][ page 2 - not mapped yet

    address(token, part) = base + unused + token * row + offset of the part

A lane for each part (`KVELASTIC_CONTIGUOUS_LAYOUT=false`): the rows of one layer's K lie side by
side. A page then has one extent in every lane, so memory grows by the granularity times the lanes::

    lane 0    |unused| K token 0 | K token 1 | K token 2 ...     layer 0
    lane 1    |unused| V token 0 | V token 1 | V token 2 ...     layer 0
    lane 2    |unused| K token 0 | ...                           layer 1

A part of a row is `[batch, heads, dim]`, dense. `unused` is one block of the pool, its null block.
Pure arithmetic; knows no memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Final, NamedTuple

ALIGNMENT_BYTES: Final = 64
"""Every part begins at a multiple of it: a cache line, and enough for all loads of GPU kernels."""
LARGE_ROW_BYTES: Final = 4096
"""From here on a further cache line a row is less than 2 % of it."""


class Strides(NamedTuple):
    """What `torch.as_strided` wants of a part, in elements: batch, heads, tokens, dim."""

    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]
    offset: int


@dataclass(frozen=True)
class TokenRows:
    """The rows of one cache; immutable. Parts are counted K, V of layer 0, K, V of layer 1, ..."""

    layers: int
    batch: int
    key: tuple[int, int]
    """Heads and dim."""
    value: tuple[int, int]
    itemsize: int
    lane_stride_bytes: int
    """From one lane to the next."""
    unused_bytes: int
    """At the start of each lane."""
    is_one_lane: bool

    @property
    def lanes(self) -> int:
        """How many runs of addresses grow together."""
        return 1 if self.is_one_lane else 2 * self.layers

    def part_bytes(self, part: int) -> int:
        """Bytes of one token in a part, with what aligns the next one."""
        heads, dim = self.value if part % 2 else self.key
        size_bytes = self.batch * heads * dim * self.itemsize
        return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    @cached_property
    def _offsets(self) -> list[int]:
        """Of each part in its row, and the bytes of a whole row of all parts."""
        return [0, *accumulate(self.part_bytes(part) for part in range(2 * self.layers))]

    def row_bytes(self, lane: int) -> int:
        """Bytes from a token to the next one in a lane.

        Large rows are an odd number of cache lines: at a distance of a power of two, the keys of
        one head fall into few sets of a cache (on the host a longer prompt took twice the time).
        """
        size_bytes = self._offsets[-1] if self.is_one_lane else self.part_bytes(lane)
        is_even = size_bytes // ALIGNMENT_BYTES % 2 == 0
        return size_bytes + (ALIGNMENT_BYTES if is_even and size_bytes >= LARGE_ROW_BYTES else 0)

    def parts_of(self, lane: int) -> range:
        """The parts that lie in a lane."""
        return range(2 * self.layers) if self.is_one_lane else range(lane, lane + 1)

    def lane_of(self, part: int) -> int:
        """The lane that a part lies in."""
        return 0 if self.is_one_lane else part

    def start_bytes(self, lane: int) -> int:
        """Where the first row of a lane begins, from the base of the range."""
        return lane * self.lane_stride_bytes + self.unused_bytes

    def needed_bytes(self, tokens: int) -> int:
        """Bytes from the start of a lane that so many tokens need, in the widest lane."""
        if tokens == 0:
            return 0
        return self.unused_bytes + tokens * max(map(self.row_bytes, range(self.lanes)))

    def view(self, part: int, begin: int, end: int) -> Strides:
        """Tokens `begin` to `end` of a part, over the whole range."""
        lane = self.lane_of(part)
        first_bytes = self.start_bytes(lane) + begin * self.row_bytes(lane)
        return self.view_at(part, first_bytes, end - begin)

    def view_at(self, part: int, row_start_bytes: int, tokens: int) -> Strides:
        """So many tokens of a part whose first row begins there, wherever that is."""
        heads, dim = self.value if part % 2 else self.key
        row_bytes = self.row_bytes(self.lane_of(part))
        offset_bytes = self._offsets[part] if self.is_one_lane else 0
        return Strides(
            shape=(self.batch, heads, tokens, dim),
            strides=(heads * dim, dim, row_bytes // self.itemsize, 1),
            offset=(row_start_bytes + offset_bytes) // self.itemsize,
        )
