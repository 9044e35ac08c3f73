"""What an elastic cache keeps between batches: sessions, what waits for memory, what is idle.

The loop of transformers makes a batch, computes it, and reads its tokens. It looks up and takes
blocks in two parts of that, and each is a session::

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
from kvelastic.engine_pool import EnginePool
from kvelastic.integration.transformers.cache_memory import held_of_gpu_bytes
from kvelastic.scheduling.blocks import SchedulerBlocks
from kvelastic.scheduling.over_limit import OverLimit

_DEFAULT_STREAM: Final = 0


class NothingFits(Exception):  # noqa: N818  # never seen outside
    """No request can go on for now. transformers would end its loop with an error instead."""


class BlockSource(Protocol):
    """`SectorPool`, or before 5.18 `ElasticBlockManager`: what took the place of a free list."""

    warms_up: bool
    memory: SchedulerBlocks


class Batches:
    """Made with a cache, and used by the one thread that runs its loop.

    `trash` are the rows of the cache from which padding reads zeros.
    """

    def __init__(
        self, source: BlockSource, memory: EnginePool, trash: Sequence[torch.Tensor]
    ) -> None:
        self.source = source
        self.blocks = source.memory
        self.preempted = 0
        """Requests that gave their blocks up for others, since the start."""
        self.found_none = False
        """Whether the last try to schedule a batch found no request that fits."""
        self.over_limit = OverLimit(self.blocks, config.load().limit_wait_s)
        self._memory = memory
        self._trash = trash
        self._was_idle = True

    def close(self) -> None:
        """The loop has ended for good."""
        self._memory.close()

    def name_streams(self, compute_stream: Any) -> None:
        """Tell the driver of a GPU on which streams blocks are read and written."""
        driver = self._memory.device.driver()
        if compute_stream is not None and isinstance(driver, _vmm.CudaDriver):
            driver.use_streams([_DEFAULT_STREAM, int(compute_stream.cuda_stream)])

    def batch_is_computed(self) -> None:
        """Called after each batch: its activations may have been the largest so far."""
        if self._memory.step_reserve is not None:
            self._memory.step_reserve.follow(held_of_gpu_bytes(self._trash[0].device))

    def batch_is_ready(self, ready: bool, *, is_padded: bool, stream: Any) -> None:
        """Called after each try to make a batch. Padding reads zeros: the page may be a new one."""
        if ready and self._was_idle and is_padded:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                for rows in self._trash:
                    rows.zero_()
        self._was_idle = not ready
