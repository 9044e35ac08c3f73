"""Pieces of memory as messages carry them: pairs of address and size."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Final

from kvelastic.errors import InvalidArgumentError

Piece = tuple[int, int]
"""An address and a number of bytes."""

MOST_PIECES: Final = 16384
"""Under one lease; more are several leases."""
MOST_BYTES: Final = 64 << 20
"""Under one lease, so that a copy is over long before the lease is."""
PIECE_BYTES: Final = 16
_MOST: Final = 1 << 63


def pack(pieces: Sequence[Piece]) -> bytes:
    """Raises `InvalidArgumentError` for numbers that are not an address or a size."""
    try:
        return array("Q", [number for piece in pieces for number in piece]).tobytes()
    except (OverflowError, TypeError) as error:
        raise InvalidArgumentError(f"pieces are pairs of address and size: {error}") from None


def unpack(packed: bytes) -> list[Piece]:
    """Raises `InvalidArgumentError` for a list that is cut off, or that no memory has."""
    if len(packed) % PIECE_BYTES:
        raise InvalidArgumentError("a list of pieces that is cut off")
    numbers = array("Q", packed)
    pieces = list(zip(numbers[::2], numbers[1::2], strict=True))
    if any(address >= _MOST or size >= _MOST for address, size in pieces):
        raise InvalidArgumentError("an address or a size that no memory has")
    return pieces


def total(pieces: Sequence[Piece]) -> int:
    """Bytes of all of them."""
    return sum(size for _, size in pieces)


def portions(
    sources: Sequence[Piece], targets: Sequence[Piece]
) -> Iterator[tuple[list[Piece], list[Piece]]]:
    """The same copies in parts of at most `MOST_PIECES` and `MOST_BYTES`, equal on both sides.

        sources  |-----------|------|----------|--- ...
        targets  |----|----|---------|-----|------- ...
        portion  <------- as many as fit on both sides ------>

    Raises `InvalidArgumentError` where the sides differ in bytes.
    """
    if total(sources) != total(targets):
        raise InvalidArgumentError(
            f"{total(sources)} bytes do not fit into {total(targets)}; name as many on both sides"
        )
    if max(len(sources), len(targets)) <= MOST_PIECES and total(sources) <= MOST_BYTES:
        if total(sources):
            yield list(sources), list(targets)
        return
    from_part: list[Piece] = []
    to_part: list[Piece] = []
    at = into = part_bytes = 0  # the target that is next, and how much of it is taken
    for address, size in sources:
        done = 0
        while done < size:
            target, room = targets[at]
            step = min(size - done, room - into, MOST_BYTES - part_bytes)
            if step:
                from_part.append((address + done, step))
                to_part.append((target + into, step))
            done, into, part_bytes = done + step, into + step, part_bytes + step
            if into == room:
                at, into = at + 1, 0
            if len(from_part) == MOST_PIECES or part_bytes == MOST_BYTES:
                yield from_part, to_part
                from_part, to_part, part_bytes = [], [], 0
    if from_part:
        yield from_part, to_part
