"""Pieces of memory in message format: packed pairs of address and size, little-endian.

packed = packed_of([(address, size), ...])      # native code iterates over it
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Final, overload

from kvelastic import _vmm

Piece = tuple[int, int]
"""An address and a size in bytes."""

MOST_PIECES: Final = 16384
"""Maximum pieces per lease; a larger copy uses several leases."""
MOST_BYTES: Final = 64 << 20
"""Maximum bytes per lease, so that a copy finishes long before the lease expires."""
PIECE_BYTES: Final = 16


class PackedPieces(Sequence[Piece]):
    """Packed pieces with count and total size. They are unpacked only on access."""

    __slots__ = ("_pairs", "packed", "size_bytes")

    def __init__(self, packed: bytes) -> None:
        """Wrap packed pieces. Raises `InvalidArgumentError` if truncated or not valid memory."""
        self.packed: Final = packed
        self.size_bytes: Final = _vmm.bytes_of_pieces(packed)
        """Total bytes of the pieces."""
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
    """Pack pieces. Raises `InvalidArgumentError` unless they are pairs of address and size."""
    if isinstance(pieces, PackedPieces):
        return pieces
    return PackedPieces(_vmm.pack_pieces(pieces))


def portions(
    sources: Sequence[Piece], targets: Sequence[Piece]
) -> Sequence[tuple[bytes, bytes, int]]:
    """Split a copy into parts of at most `MOST_PIECES` and `MOST_BYTES`.

    Returns (packed sources, packed targets, bytes) for each part. Raises `InvalidArgumentError` if
    the sides differ in total size, and the errors of `packed_of`.
    """
    return _vmm.portions_of_pieces(
        packed_of(sources).packed, packed_of(targets).packed, MOST_PIECES, MOST_BYTES
    )
