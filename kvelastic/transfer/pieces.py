"""Pieces of memory as messages carry them: pairs of address and size."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import itemgetter
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
_SIZE: Final = itemgetter(1)


def pack(pieces: Sequence[Piece]) -> bytes:
    """Raises `InvalidArgumentError` for numbers that are not an address or a size."""
    try:
        packed = array("Q", chain.from_iterable(pieces)).tobytes()
    except (OverflowError, TypeError) as error:
        raise InvalidArgumentError(f"pieces are pairs of address and size: {error}") from None
    if len(packed) != PIECE_BYTES * len(pieces):
        raise InvalidArgumentError("pieces are pairs of address and size")
    return packed


def unpack(packed: bytes) -> list[Piece]:
    """Raises `InvalidArgumentError` for a list that is cut off, or that no memory has."""
    if len(packed) % PIECE_BYTES:
        raise InvalidArgumentError("a list of pieces that is cut off")
    numbers = array("Q", packed)
    if max(numbers, default=0) >= _MOST:
        raise InvalidArgumentError("an address or a size that no memory has")
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def total(pieces: Sequence[Piece]) -> int:
    """Bytes of all of them."""
    return sum(map(_SIZE, pieces))


def portions(
    sources: Sequence[Piece], targets: Sequence[Piece]
) -> Iterator[tuple[Sequence[Piece], Sequence[Piece], int]]:
    """The same copies in parts of at most `MOST_PIECES` and `MOST_BYTES`, and each part's bytes.

        sources  |-----------|------|----------|--- ...
        targets  |----|----|---------|-----|------- ...
        portion  <------- as many as fit on both sides ------>

    Raises `InvalidArgumentError` where the sides differ in bytes.
    """
    all_bytes, room_bytes = total(sources), total(targets)
    if all_bytes != room_bytes:
        raise InvalidArgumentError(
            f"{all_bytes} bytes do not fit into {room_bytes}; name as many on both sides"
        )
    if max(len(sources), len(targets)) <= MOST_PIECES and all_bytes <= MOST_BYTES:
        if all_bytes:
            yield sources, targets, all_bytes
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
                yield from_part, to_part, part_bytes
                from_part, to_part, part_bytes = [], [], 0
    if from_part:
        yield from_part, to_part, part_bytes
