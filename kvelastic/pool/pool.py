"""A pool: native blocks and pages, their segment, and the maintenance thread.

    with open_pool(settings, layout, pages, num_blocks=n, block_tokens=16, engine="vLLM",
                   devices=[device], memory=local_range(device)) as pool:
        ids = pool.blocks.alloc(4)

`memory` selects the process that maps pages: this process with `local_range`, or workers with a
`_vmm.Ring` (see `integration/vllm`). The rest is identical. Does not import torch.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from kvelastic import _vmm
from kvelastic.closing import Closing
from kvelastic.config import Config
from kvelastic.device.selection import Device, reserve_range
from kvelastic.errors import (
    DeviceUnavailableError,
    DriverError,
    InvalidArgumentError,
    OutOfMemoryError,
)
from kvelastic.pool.layout import PageLayout
from kvelastic.shared import kvcached_segment, segment
from kvelastic.shared.device_set import JoinedDevices, capacity_bytes, copies_by_device, join_all
from kvelastic.units import format_size

_log = logging.getLogger("kvelastic")

Memory: TypeAlias = "_vmm.Range | _vmm.Ring"
MemoryMaker: TypeAlias = Callable[[segment.Segment, _vmm.Geometry], Memory]

_open_pools: set[ElasticPool] = set()

FOREVER_S = -1.0
"""Native code's value for "no deadline" and "never"."""
RESERVE_WAIT_S = _vmm.RECLAIM_RESERVE_WAIT_NS / 1e9
"""How long a start or a wake waits for memory of other instances."""
_ASK_AGAIN_S = 0.05


def native_geometry(layout: PageLayout, pages: int) -> _vmm.Geometry:
    """Convert a layout over `pages` pages to the native geometry."""
    return _vmm.Geometry(
        pages=pages,
        extent_bytes=layout.extent_bytes,
        block_bytes=layout.block_bytes,
        blocks_per_page=layout.blocks_per_page,
        extents_per_page=layout.extents_per_page,
        extent_stride_bytes=layout.extent_stride_bytes(pages),
        buffers_per_extent=layout.buffers_per_extent,
    )


def local_range(device: Device, *, guard_pages: bool = False) -> MemoryMaker:
    """Return a maker of memory in this process's address space (`selection.reserve_range`)."""
    return lambda _, geometry: reserve_range(device.driver(), geometry, guard_pages=guard_pages)


class ElasticPool(Closing):
    """An open pool, returned by `open_pool`. Call `close()`, or use it as a context manager."""

    def __init__(
        self,
        own_segment: segment.Segment,
        joined: JoinedDevices,
        memory: Memory,
        blocks: _vmm.Pool,
        settings: Config,
        *,
        is_on_host: bool,
        kvcached: _vmm.KvcachedSegment | None = None,
    ) -> None:
        self.segment = own_segment
        self._kvcached = kvcached
        self.ledgers = joined.ledgers
        """One for each device, sorted by device name."""
        self.device_set = joined.device_set
        """The combined state of the ledgers."""
        self._joined = joined
        self.memory = memory
        self.blocks = blocks
        """The native pool: alloc, free, cache, touch, limits (see vmm_csrc/pool/pool.h)."""
        self._settings = settings
        self.is_on_host = is_on_host
        """Whether all of its devices are host memory."""
        self._maintenance: _vmm.MaintenanceThread | None = None
        self._pid = os.getpid()
        _open_pools.add(self)
        # If the program does not close the pool, exit removes its ledger entries and segment.
        atexit.register(self._close_at_exit)

    def _close_at_exit(self) -> None:
        if self._pid == os.getpid():  # a forked child does not own inherited objects
            self.close()

    @property
    def name(self) -> str:
        """The instance's name in `kvctl`."""
        return self.segment.name

    def start_maintenance(self) -> None:
        """Start the maintenance thread, which handles requests.

        Call it once the memory can be mapped: in workers, after they have attached. If it raises,
        the pool is closed.
        """
        idle_trim_s = self._settings.idle_trim_s
        try:
            self._maintenance = _vmm.MaintenanceThread.start(
                self.blocks,
                self.segment.control_block,
                idle_trim_s=FOREVER_S if idle_trim_s is None else idle_trim_s,
                sanity_check=self._settings.sanity_check,
                watch_memory=self.is_on_host,
            )
            if self._kvcached is not None:
                self._kvcached.start()
        except BaseException:
            self.close()
            raise

    def reserve(self, size_bytes: int | Mapping[str, int]) -> None:
        """Reserve device memory for data other than this cache: weights, activations.

        `size_bytes` maps device names to bytes, for all devices that change; a number is enough for
        one device. The reserve counts while the pool is awake. If it grows, other instances are
        asked to release memory; this blocks for at most five seconds. Raises `GuaranteeError` if
        guarantees and reserves exceed a device's memory, and `ReserveError` if other instances did
        not release enough. Then nothing has changed on any device.
        """
        self._joined.reserve(size_bytes)

    def map_null_block(self, timeout_s: float = RESERVE_WAIT_S) -> None:
        """Map the page of the null block, which kernels access at any time.

        Blocks for at most `timeout_s` while other instances release memory. Raises
        `OutOfMemoryError`.
        """
        until_s = time.monotonic() + timeout_s
        while True:
            seen = self.blocks.availability_epoch
            if self.blocks.ensure(1):
                return
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise OutOfMemoryError(
                    f"there is no room for one page of {self.name}; `kvctl devices` shows who holds"
                    " what. Put another model to sleep or lower its limit, then try again"
                )
            self.blocks.wait_for_epoch(seen, min(left_s, _ASK_AGAIN_S))

    def name_workers(self) -> None:
        """Register the ring's processes in their devices' ledgers, once all have attached.

        A device keeps its grant while one of its ranks lives.
        """
        assert isinstance(self.memory, _vmm.Ring)
        for rank, (pid, start_time_ticks) in enumerate(self.memory.workers):
            self.device_set.add_worker(rank, pid, start_time_ticks)

    def close(self, *, discard: bool = False) -> None:
        """Stop the maintenance thread, release memory, leave the ledgers and remove the segment.

        Idempotent. Later allocations raise `PoolFailedError`. Memory of this process is released
        immediately, except pages with blocks in use: their tensors stay valid, and their grant
        stays until the last tensor is deleted. With `discard`, those pages are released too; their
        tensors must not be accessed afterwards. A worker's memory and its grant are released when
        the worker ends.

        Blocks until this process's own threads and the driver are done.
        """
        atexit.unregister(self._close_at_exit)
        _open_pools.discard(self)
        if self._kvcached is not None:
            self._kvcached.close()
        thread, self._maintenance = self._maintenance, None
        if thread is not None:
            thread.stop()
        self._give_memory_back(discard)
        self.segment.close()

    def _give_memory_back(self, discard: bool) -> None:
        """Release the memory before its grant, so that no grant covers memory still in use."""
        if isinstance(self.memory, _vmm.Ring):
            if self.memory.has_live_processes:
                self._joined.linger()
            else:
                self._joined.close()
            return
        try:
            held_bytes = self.blocks.close(discard=discard)
        except DeviceUnavailableError:  # a forked child does not own inherited objects
            return
        except DriverError:
            held_bytes = self.blocks.mapped_bytes
        if held_bytes:
            self.keep_grant_with(self.memory)
        else:
            self._joined.close()

    def keep_grant_with(self, memory: _vmm.Range) -> None:
        """Keep the grant until `memory` of this process, which holds the pages, is released."""
        (own,) = self.ledgers
        memory.hold_grant_of(own.member)
        own.linger()


def pool_named(name: str) -> ElasticPool | None:
    """Return the open pool of this process with this instance name, or None. Thread-safe."""
    return next((pool for pool in list(_open_pools) if pool.name == name), None)


def pool_at(address: int) -> ElasticPool | None:
    """Return the open pool of this process whose range contains `address`, or None. Thread-safe."""
    for pool in list(_open_pools):
        memory = pool.memory
        if isinstance(memory, _vmm.Range) and 0 <= address - memory.address < memory.range_bytes:
            return pool
    return None


def open_pool(
    settings: Config,
    layout: PageLayout,
    pages: int,
    *,
    num_blocks: int,
    block_tokens: int,
    engine: str,
    devices: Sequence[Device],
    memory: MemoryMaker,
    model: str = "",
    name: str | None = None,
    movable: bool = False,
    reserve_bytes: int | Mapping[str, int] = 0,
) -> ElasticPool:
    """Create segment, memory and native pool. Maps no page and starts no thread.

    `devices` is indexed by rank: rank i has its copy of every page on `devices[i]`. Memory of this
    process has one rank. A page is granted by all devices or by none. The limit covers all copies
    together. `num_blocks` includes the null block. `name` overrides `KVELASTIC_IPC_NAME`. Pass
    `movable` if the engine can follow cached blocks that change their id (`take_changes`). See
    `reserve` for `reserve_bytes`.

    Raises `GuaranteeError` if a device cannot hold `KVELASTIC_MIN` or the reserve, `ReserveError`
    if other instances did not release enough for the reserve, `LedgerError` if a device cannot be
    shared, `SegmentError` if the segment cannot be created (for example, a live instance has its
    name), `InvalidArgumentError` unless there is one device for each rank, and the errors of
    `memory`. On error, everything created is removed.
    """
    _vmm.set_log_level(_log.getEffectiveLevel())
    _log.debug(
        "layout: %s; %d pages of %s, %d blocks in each, at most %d blocks",
        layout,
        pages,
        format_size(layout.page_bytes * len(devices)),
        layout.blocks_per_page,
        num_blocks,
    )
    limit_bytes = _start_limit_bytes(
        settings, layout.page_bytes * len(devices), capacity_bytes(devices)
    )
    name = settings.ipc_name if name is None else name
    on = copies_by_device(devices)
    kvcached: _vmm.KvcachedSegment | None = None
    if settings.kvcached_segment:
        own_segment, kvcached = kvcached_segment.create(
            name, engine=engine, model=model, devices=on
        )
    else:
        own_segment = segment.create(name, engine=engine, model=model, devices=on)
    joined: JoinedDevices | None = None
    try:
        joined = join_all(
            devices,
            group=settings.ledger,
            name=own_segment.name,
            uuid=own_segment.control_block.read_header()["uuid"],
            copy_bytes=layout.page_bytes,
            min_bytes=settings.minimum,
            reserve_bytes=reserve_bytes,
            priority=settings.priority,
        )
        where = memory(own_segment, native_geometry(layout, pages))
        ranks = len(where.workers) if isinstance(where, _vmm.Ring) else 1
        if ranks != len(devices):
            raise InvalidArgumentError(
                f"{len(devices)} devices are given for {ranks} ranks; give one for each"
            )
        blocks = _vmm.Pool(
            where,
            max_blocks=min(num_blocks, pages * layout.blocks_per_page),
            limit_bytes=limit_bytes,
            capacity_bytes=joined.device_set.capacity_bytes,
            min_reserved_pages=settings.min_reserved_pages,
            max_reserved_pages=settings.max_reserved_pages,
            max_cached_blocks=most_cached_blocks(settings.max_cached_tokens, block_tokens),
            cache_idle_s=FOREVER_S if settings.cache_idle_s is None else settings.cache_idle_s,
            preallocate=settings.page_prealloc_enabled,
            device_set=joined.device_set,
            reclaim_wait_s=settings.reclaim_wait_s,
            movable=movable,
        )
    except BaseException:
        if joined is not None:
            joined.close()
        if kvcached is not None:
            kvcached.close()
        own_segment.close()
        raise
    _log.debug(
        "instance %s: on %s, of which instances may hold %s; limit %s, guarantee %s, priority %d",
        own_segment.name,
        ", ".join(name for name, _ in copies_by_device(devices)),
        format_size(joined.device_set.capacity_bytes),
        "none" if limit_bytes == _vmm.UNLIMITED_BYTES else format_size(limit_bytes),
        format_size(settings.minimum),
        settings.priority,
    )
    return ElasticPool(
        own_segment,
        joined,
        where,
        blocks,
        settings,
        is_on_host=all(device.is_host for device in devices),
        kvcached=kvcached,
    )


def most_cached_blocks(max_cached_tokens: int, block_tokens: int) -> int:
    """Convert `KVELASTIC_MAX_CACHED_TOKENS` to blocks: at least 1; -1: no bound; 0: no caching.

    Logs a warning if one block holds more tokens than that.
    """
    if max_cached_tokens < 0:
        return -1
    if 0 < max_cached_tokens < block_tokens:
        _log.warning(
            "KVELASTIC_MAX_CACHED_TOKENS=%d is less than one block of %d tokens: one block is"
            " cached. Set it to 0 to cache none, or to %d or more.",
            max_cached_tokens,
            block_tokens,
            block_tokens,
        )
        return 1
    return max_cached_tokens // block_tokens


def _start_limit_bytes(settings: Config, page_bytes: int, capacity_bytes: int) -> int:
    limit_bytes = settings.limit_bytes(capacity_bytes)
    if limit_bytes is None:
        return _vmm.UNLIMITED_BYTES
    if limit_bytes < page_bytes:
        _log.warning(
            "KVELASTIC_LIMIT comes to %d bytes, less than a page of %s. One page is held"
            " nevertheless; requests that need more wait until kvctl limit sets a higher limit.",
            limit_bytes,
            format_size(page_bytes),
        )
    return limit_bytes
