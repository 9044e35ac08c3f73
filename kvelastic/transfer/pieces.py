"""Pieces of memory as messages carry them: pairs of address and size, little-endian, in one run.

packed = packed_of([(address, size), ...])      # native code passes over it, not Python
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Final, overload

from kvelastic import _vmm

Piece = tuple[int, int]
"""An address and a number of bytes."""

MOST_PIECES: Final = 16384
"""Under one lease; more are several leases."""
MOST_BYTES: Final = 64 << 20
"""Under one lease, so that a copy is over long before the lease is."""
PIECE_BYTES: Final = 16


class PackedPieces(Sequence[Piece]):
    """Pieces that are counted and summed, and made into pairs only where somebody looks at them."""

    __slots__ = ("_pairs", "packed", "size_bytes")

    def __init__(self, packed: bytes) -> None:
        """Raises `InvalidArgumentError` for a list that is cut off, or that no memory has."""
        self.packed: Final = packed
        self.size_bytes: Final = _vmm.bytes_of_pieces(packed)
        """Of all of them."""
        self._pairs: list[Piece] | None = None

    def __len__(self) -> int:
        return len(self.packed) // PIECE_BYTES

    @overload
    def __getitem__(self, at: int) -> Piece: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Piece]: ...
    def __getitem__(self, at: int | slice) -> Piece | Sequence[Piece]:
        return self._as_pairs()[at]

    def __iter__(self) -> Iterator[Piece]:
        return iter(self._as_pairs())

    def _as_pairs(self) -> list[Piece]:
        if self._pairs is None:
            numbers = array("Q", self.packed)
            self._pairs = list(zip(numbers[::2], numbers[1::2], strict=True))
        return self._pairs


def packed_of(pieces: Sequence[Piece]) -> PackedPieces:
    """Raises `InvalidArgumentError` for what is not pairs of address and size."""
    if isinstance(pieces, PackedPieces):
        return pieces
    return PackedPieces(_vmm.pack_pieces(pieces))


def portions(
    sources: Sequence[Piece], targets: Sequence[Piece]
) -> Sequence[tuple[bytes, bytes, int]]:
    """The same copies in parts of at most `MOST_PIECES` and `MOST_BYTES`: packed, and their bytes.

    Raises `InvalidArgumentError` where the sides differ in bytes, and as `packed_of`.
    """
    return _vmm.portions_of_pieces(
        packed_of(sources).packed, packed_of(targets).packed, MOST_PIECES, MOST_BYTES
    )
