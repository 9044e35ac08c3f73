"""A pool of this process or another: native blocks and pages, their segment, and the keeper.

    with open_pool(settings, layout, pages, num_blocks=n, block_tokens=16, engine="vLLM",
                   devices=[device], memory=local_range(device)) as pool:
        ids = pool.blocks.alloc(4)

`memory` decides where pages are mapped: `local_range` in this process; a `_vmm.Ring` (see
`integration/vllm`) in a worker's. Everything else is the same. Imports no torch.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias
from weakref import WeakSet

from kvelastic import _vmm, segment
from kvelastic.config import Config
from kvelastic.device import Device, reserve_range
from kvelastic.errors import DeviceUnavailableError, DriverError, InvalidArgumentError
from kvelastic.layout import PageLayout
from kvelastic.places import JoinedPlaces, capacity_bytes, copies_by_device, join_all
from kvelastic.sizes import format_size

_log = logging.getLogger("kvelastic")

Memory: TypeAlias = "_vmm.Range | _vmm.Ring"
MemoryMaker: TypeAlias = Callable[[segment.Segment, _vmm.Geometry], Memory]

_open_pools: WeakSet[ElasticPool] = WeakSet()

FOREVER_S = -1.0
"""What native code takes for "no deadline" and "never"."""


def native_geometry(layout: PageLayout, pages: int) -> _vmm.Geometry:
    """The native form of a layout over `pages` pages."""
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
    """Addresses of this process, as `device.reserve_range`."""
    return lambda _, geometry: reserve_range(device.driver(), geometry, guard_pages=guard_pages)


class ElasticPool:
    """What `open_pool` made. `close()` it, or use it as a context manager."""

    def __init__(
        self,
        own_segment: segment.Segment,
        joined: JoinedPlaces,
        memory: Memory,
        blocks: _vmm.Pool,
        settings: Config,
        *,
        is_on_host: bool,
    ) -> None:
        self.segment = own_segment
        self.ledgers = joined.ledgers
        """One for each device, in the order of their names."""
        self.places = joined.places
        """What all of these say together."""
        self._joined = joined
        self.memory = memory
        self.blocks = blocks
        """The native pool: alloc, free, cache, touch, limits (see vmm_csrc/pool/pool.h)."""
        self._settings = settings
        self.is_on_host = is_on_host
        """Whether all of its devices are this machine's own memory."""
        self._keeper: _vmm.Keeper | None = None
        self._pid = os.getpid()
        _open_pools.add(self)
        # A process that forgets to close it leaves neither ledger nor segment behind.
        atexit.register(self._close_at_exit)

    def _close_at_exit(self) -> None:
        if self._pid == os.getpid():  # what a forked child inherits is not its own
            self.close()

    @property
    def name(self) -> str:
        """What `kvctl` calls this instance."""
        return self.segment.name

    def start_keeper(self) -> None:
        """Begin to answer requests; the memory must be there to map (a worker attached)."""
        idle_trim_s = self._settings.idle_trim_s
        self._keeper = _vmm.Keeper.start(
            self.blocks,
            self.segment.record,
            idle_trim_s=FOREVER_S if idle_trim_s is None else idle_trim_s,
            sanity_check=self._settings.sanity_check,
            watch_memory=self.is_on_host,
        )

    def reserve(self, size_bytes: int | Mapping[str, int]) -> None:
        """Say what the instance holds of a device besides this cache: weights, activations.

        Bytes by device name, of all devices that change; one number where there is one device. It
        counts as long as the pool is awake. For more than before, others are asked; blocks for
        five seconds at most until they have given it. Raises `GuaranteeError` if guarantees and
        reserves would be more than a device has, `ReserveError` if others have not given it, with
        nothing changed on any device.
        """
        self._joined.reserve(size_bytes)

    def name_workers(self) -> None:
        """Name the processes of the ring in the ledgers of their devices, once all have attached.

        What a device has granted stays granted as long as one of its ranks lives.
        """
        assert isinstance(self.memory, _vmm.Ring)
        for rank, (pid, start_time_ticks) in enumerate(self.memory.workers):
            self.places.add_worker(rank, pid, start_time_ticks)

    def close(self, *, discard: bool = False) -> None:
        """Stop the keeper, give the memory back, leave the ledgers, remove the segment. Repeatable.

        No block is handed out any more (`PoolFailedError`). Memory of this process goes at once,
        but for pages with blocks in use: tensors over those stay valid, and what is granted for
        them stays granted until the last tensor is gone. With `discard` they go too, and must not
        be touched any more. A worker's memory goes with the worker, and so does its grant.

        Waits for this process's own threads, and for the driver.
        """
        atexit.unregister(self._close_at_exit)
        _open_pools.discard(self)
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.stop()
        self._give_memory_back(discard)
        self.segment.close()

    def _give_memory_back(self, discard: bool) -> None:
        """Memory first, then its grant: nobody else is granted what is still there."""
        if isinstance(self.memory, _vmm.Ring):
            if self.memory.has_live_processes:
                self._joined.linger()
            else:
                self._joined.close()
            return
        try:
            held_bytes = self.blocks.close(discard=discard)
        except DeviceUnavailableError:  # a forked child: what it has inherited is not its own
            return
        except DriverError:
            held_bytes = self.blocks.mapped_bytes
        if held_bytes:
            (own,) = self.ledgers
            self.memory.hold_grant_of(own.member)
            own.linger()
        else:
            self._joined.close()

    def __enter__(self) -> ElasticPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def pool_at(address: int) -> ElasticPool | None:
    """The open pool of this process in whose range an address lies; None: in none. Any thread."""
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
    """Make segment, memory and native pool; maps nothing and starts no thread yet.

    `devices` are by rank: rank i has its copy of every page on the i-th; memory of this process is
    of one rank. A page is granted by all of them or by none. The limit is of all copies together.
    `num_blocks` counts the null block; `name` overrides `KVELASTIC_IPC_NAME`; `movable` says that
    the engine follows cached blocks to other ids (`take_changes`); `reserve_bytes` as in `reserve`.
    Raises `GuaranteeError` for a `KVELASTIC_MIN` or a reserve that a device has no room for,
    `ReserveError` if others have not given what is to be reserved, `LedgerError` if a device is
    not to be shared, `SegmentError` if the segment cannot be made (its name is a live instance's),
    `InvalidArgumentError` unless there is one device for each rank, and what `memory` raises;
    nothing is left behind then.
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
    own_segment = segment.create(
        settings.ipc_name if name is None else name,
        engine=engine,
        model=model,
        devices=copies_by_device(devices),
    )
    joined: JoinedPlaces | None = None
    try:
        joined = join_all(
            devices,
            group=settings.ledger,
            name=own_segment.name,
            uuid=own_segment.record.read_header()["uuid"],
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
            capacity_bytes=joined.places.capacity_bytes,
            min_reserved_pages=settings.min_reserved_pages,
            max_reserved_pages=settings.max_reserved_pages,
            max_cached_blocks=most_cached_blocks(settings.max_cached_tokens, block_tokens),
            cache_idle_s=FOREVER_S if settings.cache_idle_s is None else settings.cache_idle_s,
            preallocate=settings.page_prealloc_enabled,
            places=joined.places,
            reclaim_wait_s=settings.reclaim_wait_s,
            movable=movable,
        )
    except BaseException:
        if joined is not None:
            joined.close()
        own_segment.close()
        raise
    _log.debug(
        "instance %s: on %s, of which instances may hold %s; limit %s, guarantee %s, priority %d",
        own_segment.name,
        ", ".join(name for name, _ in copies_by_device(devices)),
        format_size(joined.places.capacity_bytes),
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
    )


def most_cached_blocks(max_cached_tokens: int, block_tokens: int) -> int:
    """`KVELASTIC_MAX_CACHED_TOKENS` in whole blocks, at least one; -1: no bound, 0: none is cached.

    Says so where one block holds more tokens than that.
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
