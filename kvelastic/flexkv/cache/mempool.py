"""Allocator of block ids, for an engine without an allocator.

pool = Mempool(1024)
blocks = pool.allocate_blocks(4)
pool.recycle_blocks(blocks)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvelastic.errors import (
    DoubleFreeError,
    IntegrityError,
    InvalidArgumentError,
    PoolExhaustedError,
    UnknownBlockError,
)
from kvelastic.tiers.staging import StagingSlots


class Mempool:
    """Block ids 0 to `num_total_blocks` - 1. Any thread may call. On an error nothing changes."""

    def __init__(self, num_total_blocks: int) -> None:
        if num_total_blocks < 1:
            raise InvalidArgumentError(f"num_total_blocks={num_total_blocks}; give 1 or more")
        self.num_total_blocks = num_total_blocks
        self.reset()

    def reset(self) -> None:
        """Free all blocks."""
        self._slots = StagingSlots(self.num_total_blocks)
        self.check_integrity = self._slots.check_integrity

    @property
    def num_free_blocks(self) -> int:
        """The number of free blocks."""
        return self._slots.free

    @property
    def num_used_blocks(self) -> int:
        """The number of allocated blocks."""
        return self.num_total_blocks - self._slots.free

    def allocate_blocks(self, num: int) -> npt.NDArray[np.int64]:
        """Allocate `num` blocks. Raises `PoolExhaustedError` (a ValueError) if fewer are free."""
        if num < 0:
            raise InvalidArgumentError(f"{num} blocks were asked for; ask for 0 or more")
        taken = self._slots.take(num) if num <= self.num_total_blocks else None
        if taken is None:
            raise PoolExhaustedError(
                f"{num} blocks were asked for, and {self.num_free_blocks} of"
                f" {self.num_total_blocks} are free; recycle some, or ask for fewer"
            )
        return np.array(taken, np.int64)

    def recycle_blocks(self, block_ids: Any) -> None:
        """Free blocks.

        Raises `UnknownBlockError`, or `DoubleFreeError` for a block that is free.
        """
        blocks = [int(block) for block in np.asarray(block_ids).ravel()]
        for block in blocks:
            if not 0 <= block < self.num_total_blocks:
                raise UnknownBlockError(
                    f"block {block} is not one of the pool's {self.num_total_blocks}"
                )
        try:
            self._slots.give_back(blocks)
        except IntegrityError:
            raise DoubleFreeError(
                f"of the blocks {blocks[:8]} at least one is free already, or named twice; recycle"
                " each block once"
            ) from None
