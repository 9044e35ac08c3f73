"""What an elastic cache keeps between batches: sessions, what waits for memory, what is idle.

The loop of transformers makes a batch, computes it, and reads its tokens. It looks up and takes
blocks in two parts of that, and each is a session of the native pool: nobody takes blocks away in
it. Between sessions the keeper may, so each begins with what has changed::

    | schedule: follow, look up, take | compute | update: follow, cache, give back | schedule ...
      \\_______ a session __________/             \\________ a session __________/

Imports transformers: only `in_cache` may import this module.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from transformers.generation.continuous_batching.utils import stream_context

from kvelastic import _vmm
from kvelastic.integration.transformers.cache_memory import CacheMemory
from kvelastic.integration.transformers.prefix_ledger import PrefixLedger
from kvelastic.integration.transformers.sector_pool import SectorPool

_log = logging.getLogger("kvelastic.transformers")

_NAP_S: Final = 0.05
"""How long the loop waits for memory before it looks at its requests again."""
_DEFAULT_STREAM: Final = 0


class NothingFits(Exception):  # noqa: N818  # never seen outside
    """No request can go on for now. transformers would end its loop with an error instead."""


class Batches:
    """Made with a cache, and used by the one thread that runs its loop."""

    def __init__(self, cache: Any, memory: CacheMemory) -> None:
        self.sectors: SectorPool = cache.pool
        self.preempted = 0
        """Requests that gave their blocks up for others, since the start."""
        self.found_none = False
        """Whether the last try to schedule a batch found no request that fits."""
        self._memory = memory
        self._blocks = memory.pool.blocks
        self._trash = cache.cache_tensor[: cache.bytes_per_sector]
        self._was_idle = True
        if cache.use_prefix_sharing:
            self._keep_prefixes(cache)

    def _keep_prefixes(self, cache: Any) -> None:
        (allocator,) = cache.cache_allocators.values()
        if allocator.blocks_per_sector > 1:
            # Blocks smaller than the alignment of sectors: models for tests, with tiny blocks.
            _log.warning("No prefix is cached: a block is less than a sector. Use a larger page.")
            cache.use_prefix_sharing = cache.allow_block_sharing = False
            allocator.use_block_sharing = False
            return
        ledger = PrefixLedger(self.sectors, self._blocks)
        allocator.ledger = ledger
        self.sectors.follow = ledger.follow

    def close(self) -> None:
        """The loop has ended for good."""
        self._memory.close()

    def name_streams(self, compute_stream: Any) -> None:
        """Tell the driver of a GPU on which streams blocks are read and written."""
        driver = self._memory.device.driver()
        if compute_stream is not None and isinstance(driver, _vmm.CudaDriver):
            driver.use_streams([_DEFAULT_STREAM, int(compute_stream.cuda_stream)])

    @contextmanager
    def session(self) -> Iterator[None]:
        """Hold the native pool still, after everything that it did by itself was followed."""
        self._blocks.enter()
        try:
            self.sectors.follow()
            yield
        finally:
            self._blocks.exit()

    @property
    def arrivals(self) -> int:
        """Changes whenever blocks can be had that could not be had before."""
        return self._blocks.arrivals

    def wait_for_arrival(self, seen: int) -> bool:
        """Wait a moment for `arrivals` to be another than `seen`; whether it is."""
        return self._blocks.wait_for_arrival(seen, _NAP_S) != seen

    def batch_is_ready(self, ready: bool, *, is_padded: bool, stream: Any) -> None:
        """Called after each try to make a batch. Padding reads zeros: the page may be a new one."""
        if ready and self._was_idle and is_padded:
            with stream_context(stream):
                self._trash.zero_()
        self._was_idle = not ready
