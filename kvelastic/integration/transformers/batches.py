"""The state of an elastic cache between batches: sessions, memory waits, and idle time.

transformers' loop makes a batch, computes it, and reads its tokens. Two parts of the loop look up
and take blocks, and each part is a session::

    | schedule: follow, look up, take | compute | update: follow, cache, give back | schedule ...
      \\_______ a session __________/             \\________ a session __________/

Imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Final, Protocol

import torch

from kvelastic import _vmm, config
from kvelastic.integration.transformers.cache_memory import held_of_gpu_bytes
from kvelastic.pool.engine_pool import EnginePool
from kvelastic.pool.scheduling.blocks import SchedulerBlocks
from kvelastic.pool.scheduling.over_limit import OverLimit
from kvelastic.pool.scheduling.waiting import WaitingRequests

_DEFAULT_STREAM: Final = 0


class NothingFits(Exception):  # noqa: N818  # internal
    """No request fits into memory now. transformers would end its loop with an error instead."""


class BlockSource(Protocol):
    """The replacement of the free list: `SectorPool`, or `ElasticBlockManager` before 5.18."""

    warms_up: bool
    memory: SchedulerBlocks


class Batches:
    """The state of one elastic cache. Only the thread that runs the cache's loop uses it.

    `trash` are the rows of the cache from which padding reads zeros.
    """

    def __init__(
        self, source: BlockSource, memory: EnginePool, trash: Sequence[torch.Tensor]
    ) -> None:
        self.source = source
        self.blocks = source.memory
        self.preempted = 0
        """Number of preempted requests since the start."""
        self.found_none = False
        """True if the last attempt to schedule a batch found no request that fits."""
        self.over_limit = OverLimit(self.blocks, config.load().limit_wait_s)
        self.waiting = WaitingRequests(self.blocks, memory.pool.name)
        self._memory = memory
        self._trash = trash
        self._was_idle = True

    def close(self) -> None:
        """Release the cache's memory after the loop has ended."""
        self._memory.close()

    def name_streams(self, compute_stream: Any) -> None:
        """Register the streams that read and write blocks with a GPU's driver."""
        driver = self._memory.device.driver()
        if compute_stream is not None and isinstance(driver, _vmm.CudaDriver):
            driver.use_streams([_DEFAULT_STREAM, int(compute_stream.cuda_stream)])

    def batch_is_computed(self) -> None:
        """Update the step reserve. Call after each batch: its activations may be a new maximum."""
        if self._memory.step_reserve is not None:
            self._memory.step_reserve.follow(held_of_gpu_bytes(self._trash[0].device))

    def batch_is_ready(self, ready: bool, *, is_padded: bool, stream: Any) -> None:
        """Zero the trash rows after idle time, because padding reads them from a new page.

        Call after each attempt to make a batch.
        """
        if ready and self._was_idle and is_padded:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                for rows in self._trash:
                    rows.zero_()
        self._was_idle = not ready
