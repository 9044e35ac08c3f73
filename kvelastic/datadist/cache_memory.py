"""Memory of allocated caches: on each device an elastic pool from which caches take whole pages.

    pools = CachePools(options, settings)         # one `CacheMemory` a device, and one for the host
    memory = CacheMemory(device, MemPool(1 << 30), settings, wait_s=1.0)
    piece = memory.alloc(tensors=80, tensor_bytes=2 << 20)        # None: no memory available
    piece.addresses
    piece.free(); memory.close()

The pool is an instance: `kvctl list` shows it. `kvctl limit` and other instances of the device can
reclaim what no cache holds. The pages of a cache are contiguous, so each tensor has one address.
Allocation and release leave holes in the range, which cost addresses but no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final

from msgspec import UNSET

from kvelastic import _vmm
from kvelastic.config import Config
from kvelastic.datadist.descriptors import CacheDesc
from kvelastic.datadist.enums import Placement
from kvelastic.datadist.memory_config import BufferTier, MemPool, alignment_of
from kvelastic.datadist.options import Options
from kvelastic.datadist.status import LLMException, LLMStatusCode, failure
from kvelastic.device import selection
from kvelastic.device.selection import Device
from kvelastic.errors import DeviceUnavailableError, IntegrityError
from kvelastic.pool.layout import PageLayout
from kvelastic.pool.pool import ElasticPool, local_range, open_pool
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


@dataclass(frozen=True, eq=False)
class Piece:
    """Memory of a pool that a cache holds."""

    pool: ElasticPool
    addresses: tuple[int, ...]
    """Address of each tensor."""
    blocks: tuple[int, ...]

    def free(self) -> None:
        """Free the memory. What is pinned stays mapped until its last pin ends."""
        self.pool.blocks.free(self.blocks)


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
        if pool.memory_size is not UNSET:
            # Add the null block's page, so that caches get the full size.
            limit_bytes = (-(-pool.memory_size // page) + 1) * page
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
        try:
            if limit_bytes is not None:
                own = settings.limit_bytes(self.pool.device_set.capacity_bytes)
                self.pool.blocks.set_limit(limit_bytes if own is None else min(own, limit_bytes))
        except BaseException:
            self.pool.close(discard=True)
            raise
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


class CachePools:
    """The pools of a process's caches, and its devices. Any thread may call."""

    def __init__(self, options: Options, settings: Config) -> None:
        """Open the pools in `options`. Maps no memory. Raises what `open_pool` raises."""
        self._options = options
        self.devices: Final[list[Device]] = []
        self._pools: dict[Placement, list[CacheMemory]] = {}
        try:
            for at in options.device_ids:
                self.devices.append(_device(settings, at))
                name_streams(self.devices[-1])
            if options.device_pool is not None:
                self._open(Placement.DEVICE, self.devices, options.device_pool, settings)
            if options.host_pool is not None:
                host = [selection.host(settings)]
                self._open(Placement.HOST, host, options.host_pool, settings)
        except BaseException:
            self.close()
            raise

    def _open(
        self, placement: Placement, devices: Sequence[Device], pool: MemPool, settings: Config
    ) -> None:
        opened = self._pools.setdefault(placement, [])
        for at, one in enumerate(devices):
            number = f"_{at}" if len(devices) > 1 else ""
            memory = CacheMemory(
                one,
                pool,
                settings,
                wait_s=self._options.sync_kv_timeout_s,
                tiers=self._options.tiers,
                name=settings.ipc_name and f"{settings.ipc_name}_{placement.name.lower()}{number}",
            )
            opened.append(memory)

    def of(self, placement: Placement) -> list[CacheMemory]:
        """Return the pools of a placement, by device. Raises `LLM_FEATURE_NOT_ENABLED`."""
        pools = self._pools.get(placement)
        if pools is None:
            option = "mem_pool_cfg" if placement is Placement.DEVICE else "host_mem_pool_cfg"
            raise failure(
                LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
                f"there is no pool of {placement.name} caches; set {option} before init",
            )
        return pools

    def alloc(self, desc: CacheDesc) -> tuple[Piece, ...]:
        """Allocate a cache, in each pool of its placement.

        Raises as `of` does, and `LLM_OUT_OF_MEMORY` (`LLM_DEVICE_OUT_OF_MEMORY` in the first
        generation).
        """
        with ExitStack() as undo:
            pieces = []
            for memory in self.of(desc.placement):
                piece = memory.alloc(desc.num_tensors, desc.size)
                if piece is None:
                    raise self._out_of_memory(desc, memory)
                undo.callback(piece.free)
                pieces.append(piece)
            undo.pop_all()
            return tuple(pieces)

    def _out_of_memory(self, desc: CacheDesc, memory: CacheMemory) -> LLMException:
        state = memory.pool.blocks.limit_state()
        return failure(
            LLMStatusCode.LLM_OUT_OF_MEMORY
            if self._options.is_cache_manager
            else LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY,
            f"{desc.num_tensors} tensors of {desc.size} bytes are not available in"
            f" {memory.pool.name}, which holds {state['mapped_bytes']} of"
            f" {state['effective_limit_bytes']} bytes; deallocate caches, or raise its limit",
        )

    def __iter__(self) -> Iterator[CacheMemory]:
        """Iterate over all pools."""
        return chain.from_iterable(self._pools.values())

    def close(self) -> None:
        """Release all memory and leave the ledgers. Idempotent."""
        for memory in self:
            memory.close()


def _device(settings: Config, device_id: int) -> Device:
    """Return the GPU of this number, or the host if there is no GPU."""
    if settings.device in {"host", "cpu"}:
        return selection.host(settings)
    try:
        return selection.resolve(f"cuda:{device_id}", settings)
    except DeviceUnavailableError:
        if settings.device != selection.AUTO:
            raise
        return selection.host(settings)
