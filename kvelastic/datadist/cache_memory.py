"""Memory of allocated caches on one device: an elastic pool from which caches take whole pages.

    memory = CacheMemory(device, MemPool(1 << 30), settings, wait_s=1.0)
    piece = memory.alloc(tensors=80, tensor_bytes=2 << 20)        # None: no memory available
    piece.addresses
    piece.free(); memory.close()

The pool is an instance: `kvctl list` shows it. `kvctl limit` and other instances of the device can
reclaim what no cache holds. The pages of a cache are contiguous, so each tensor has one address.
Allocation and release leave holes in the range, which cost addresses but no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from kvelastic import _vmm
from kvelastic.config import Config
from kvelastic.datadist.cache_table import Piece
from kvelastic.datadist.memory_config import BufferTier, MemPool, alignment_of
from kvelastic.device.selection import Device
from kvelastic.errors import IntegrityError
from kvelastic.pool.layout import PageLayout
from kvelastic.pool.pool import local_range, open_pool
from kvelastic.shared import device_set

ENGINE: Final = "datadist"
"""Engine name of cache pools in `kvctl list`."""

_ADDRESSES_PER_BYTE: Final = 4
"""Ratio of range length to memory, so that despite holes a long enough gap exists."""


_DEFAULT_STREAM: Final = 0


def name_streams(device: Device) -> None:
    """Set the streams of a GPU's driver to the default stream, unless they are set already.

    The interface names no stream. The default stream waits for all other streams except
    non-blocking ones; the caller must wait for work on those. Does nothing on the host.
    """
    driver = device.driver()
    if isinstance(driver, _vmm.CudaDriver) and not driver.knows_streams:
        driver.use_streams([_DEFAULT_STREAM])


class CacheMemory:
    """The pool of caches on one device. Any thread may call."""

    def __init__(
        self,
        device: Device,
        pool: MemPool,
        settings: Config,
        *,
        wait_s: float,
        tiers: Sequence[BufferTier] = (),
        name: str | None = None,
    ) -> None:
        """Open the pool and join the device's ledger. Maps no memory yet.

        `wait_s` bounds how long an allocation waits for other instances. Raises what `open_pool`
        raises.
        """
        self.device = device
        name_streams(device)
        self._alignment_bytes = pool.alignment_bytes
        self._tiers = tuple(tiers)
        page = device_set.page_size_bytes(settings, [device])
        self._page_bytes = page
        layout = PageLayout(page, 1, 1, page)
        most_bytes = device.capacity_bytes
        limit_bytes = None
        if pool.memory_bytes is not None:
            # Add the null block's page, so that caches get the full size.
            limit_bytes = (-(-pool.memory_bytes // page) + 1) * page
            most_bytes = min(limit_bytes, most_bytes)
        pages = max(_ADDRESSES_PER_BYTE * most_bytes // page, 2)
        self.pool: Final = open_pool(
            replace(
                settings,
                reclaim_wait_s=wait_s,
                page_prealloc_enabled=False,
                min_reserved_pages=0,
                max_reserved_pages=0,
            ),
            layout,
            pages,
            num_blocks=pages,
            block_tokens=1,
            engine=ENGINE,
            devices=[device],
            memory=local_range(device, guard_pages=settings.guard_pages),
            name=name,
        )
        if limit_bytes is not None:
            own = settings.limit_bytes(self.pool.device_set.capacity_bytes)
            self.pool.blocks.set_limit(limit_bytes if own is None else min(own, limit_bytes))
        self.pool.start_maintenance()

    def alloc(self, tensors: int, tensor_bytes: int) -> Piece | None:
        """Allocate `tensors` tensors of `tensor_bytes` each; return None without memory.

        Waits up to `wait_s` for memory of other instances on the device. Raises `DriverError` if
        the pool has failed.
        """
        alignment_bytes = alignment_of(self._tiers, tensor_bytes) or self._alignment_bytes
        step_bytes = -(-tensor_bytes // alignment_bytes) * alignment_bytes
        blocks = self.pool.blocks.alloc_run(-(-tensors * step_bytes // self._page_bytes))
        if blocks is None:
            return None
        memory = self.pool.memory
        assert isinstance(memory, _vmm.Range)
        base = memory.address + blocks[0] * self._page_bytes
        addresses = tuple(base + at * step_bytes for at in range(tensors))
        return Piece(self.pool, addresses, tuple(blocks))

    def check_integrity(self, pieces: Sequence[Piece]) -> None:
        """Check that the pool's used blocks are those of `pieces`.

        Blocks only pinned do not count.
        """
        self.pool.blocks.check_integrity()
        held = {block for piece in pieces for block in piece.blocks}
        if len(held) != sum(len(piece.blocks) for piece in pieces):
            raise IntegrityError("two caches hold the same page")
        used = self.pool.blocks.stats()["blocks_used"]
        if used != len(held):
            raise IntegrityError(f"caches hold {len(held)} pages, and {used} are in use")

    def close(self) -> None:
        """Release all memory, including that of caches, and leave the ledger. Idempotent."""
        self.pool.close(discard=True)
