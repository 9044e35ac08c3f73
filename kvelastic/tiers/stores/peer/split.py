"""Which bytes of a record go where if two engines divide a block among different numbers of ranks.

A record is each rank's part, one after the other. A part has the same rows on every rank, and in
each row the rank's KV heads. A row is a layer, or one of several kernel blocks in it::

    4 heads, 2 rows, 1 rank    [ h0 h1 h2 h3 | h0 h1 h2 h3 ]
    2 ranks                    [ h0 h1 | h0 h1 ]  [ h2 h3 | h2 h3 ]
    8 ranks                    [ h0 | h0 ] [ h0 | h0 ]  [ h1 | h1 ] [ h1 | h1 ]  ...

With more ranks than heads, as with the one latent of MLA, neighbouring ranks have the same head.

Pure functions. `record_split` of an integration reads a `Split` from an engine's cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import Final, NamedTuple

from kvelastic.errors import UnsupportedError

FORMAT_VERSION: Final = 1
"""Version of the order of bytes that a `Split` describes. Other versions read nothing."""
MOST_RANKS: Final = 1024


class Move(NamedTuple):
    """Bytes from an offset in one record to an offset in another one."""

    source: int
    target: int
    size_bytes: int


@dataclass(frozen=True)
class Split:
    """How the records of an engine are divided among its ranks."""

    ranks: int
    rows: int
    heads: int
    """KV heads of the model, over all ranks and each counted once."""
    head_bytes: int
    """A head in a row: all its tokens, K and V, side by side."""
    common: str
    """All else that changes a record's bytes and must be equal in both engines."""

    def __post_init__(self) -> None:
        """Raise `UnsupportedError` if these ranks cannot have equal parts of the heads."""
        fits = 0 < self.ranks <= MOST_RANKS and min(self.rows, self.heads, self.head_bytes) > 0
        if not fits or (self.heads % self.ranks and self.ranks % self.heads):
            raise UnsupportedError(
                f"{self.heads} KV heads in {self.rows} rows of {self.head_bytes} bytes a head have"
                f" no equal parts for {self.ranks} ranks"
            )

    @property
    def part_heads(self) -> int:
        """KV heads of one rank."""
        return max(1, self.heads // self.ranks)

    @property
    def replicas(self) -> int:
        """How many neighbouring ranks have the same heads."""
        return max(1, self.ranks // self.heads)

    @property
    def part_bytes(self) -> int:
        """Bytes of one rank's part."""
        return self.rows * self.part_heads * self.head_bytes

    @property
    def record_bytes(self) -> int:
        """Bytes of a record."""
        return self.ranks * self.part_bytes

    def over(self, ranks: int) -> Split:
        """Return the same records over other ranks. Raises `UnsupportedError`."""
        return replace(self, ranks=ranks)

    def offset(self, row: int, head: int) -> int:
        """Return where a head of a row lies, on the first rank that has it."""
        rank = head // self.part_heads * self.replicas
        cell = row * self.part_heads + head % self.part_heads
        return rank * self.part_bytes + cell * self.head_bytes


@lru_cache(maxsize=64)
def moves(source: Split, target: Split) -> tuple[Move, ...]:
    """Return the copies that fill a target's record, but for its replicas, from a source's.

    Their sizes add up to all heads once. They are in the order of the target, and adjacent bytes
    are one copy. Both splits must be equal but for the ranks.
    """
    heads = gcd(source.part_heads, target.part_heads)
    found: list[Move] = []
    for first in range(0, target.heads, target.part_heads):
        for row in range(target.rows):
            for head in range(first, first + target.part_heads, heads):
                there, here = source.offset(row, head), target.offset(row, head)
                size_bytes = heads * target.head_bytes
                if found:
                    last = found[-1]
                    if (last.source + last.size_bytes, last.target + last.size_bytes) == (
                        there,
                        here,
                    ):
                        there, here = last.source, last.target
                        size_bytes += found.pop().size_bytes
                found.append(Move(there, here, size_bytes))
    return tuple(found)


@lru_cache(maxsize=64)
def replica_moves(split: Split) -> tuple[Move, ...]:
    """Return the copies within a record from the first rank of each head to the others."""
    return tuple(
        Move(first * split.part_bytes, rank * split.part_bytes, split.part_bytes)
        for first in range(0, split.ranks, split.replicas)
        for rank in range(first + 1, first + split.replicas)
    )
