"""Allocator of block ids, for an engine without an allocator.

pool = Mempool(1024)
blocks = pool.allocate_blocks(4)
pool.recycle_blocks(blocks)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvelastic.errors import DoubleFreeError, IntegrityError, PoolExhaustedError, UnknownBlockError
from kvelastic.tiers.staging import StagingSlots


class Mempool(StagingSlots):
    """Block ids 0 to `num_total_blocks` - 1. Any thread may call. On an error nothing changes."""

    def __init__(self, num_total_blocks: int) -> None:
        super().__init__(num_total_blocks)
        self.num_total_blocks = num_total_blocks

    num_free_blocks = StagingSlots.free

    @property
    def num_used_blocks(self) -> int:
        """The number of allocated blocks."""
        return self.num_total_blocks - self.free

    def reset(self) -> None:
        """Free all blocks."""
        super().__init__(self.num_total_blocks)

    def allocate_blocks(self, num: int) -> npt.NDArray[np.int64]:
        """Allocate `num` blocks. Raises `PoolExhaustedError` (a ValueError) if fewer are free."""
        taken = self.take(num) if num <= self.num_total_blocks else None
        if taken is None:
            raise PoolExhaustedError(
                f"{num} blocks were asked for, and {self.free} of {self.num_total_blocks} are free;"
                " recycle some, or ask for fewer"
            )
        return np.array(taken, np.int64)

    def recycle_blocks(self, block_ids: Any) -> None:
        """Free blocks.

        Raises `UnknownBlockError`, or `DoubleFreeError` for a block that is free.
        """
        blocks = [int(block) for block in np.asarray(block_ids).ravel()]
        unknown = [block for block in blocks if not 0 <= block < self.num_total_blocks]
        if unknown:
            raise UnknownBlockError(
                f"block {unknown[0]} is not one of the pool's {self.num_total_blocks}"
            )
        try:
            self.give_back(blocks)
        except IntegrityError:
            raise DoubleFreeError(
                f"of the blocks {blocks[:8]} at least one is free already, or named twice; recycle"
                " each block once"
            ) from None
