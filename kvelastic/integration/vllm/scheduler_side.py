"""The scheduler's half of an instance: segment, ring, pool and maintenance thread of one KV cache.

    instance = start_instance(vllm_config, configs, devices)  # once vLLM knows the cache's size
    instance.rewrite(config, rank)                            # each worker's config: paged layout
    instance.wait_for_workers()                               # after all workers have attached
    instance.begin(held_bytes)                                # after they have warmed up
    ... instance.blocks ...                                   # through block_pool.ElasticBlockPool
    instance.close()

Reads fields of vLLM's configuration, but imports neither vLLM nor torch. Opens no device: the
workers report a GPU's name and size.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from functools import reduce
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

from kvelastic import _vmm, config
from kvelastic.device import tested_gpus
from kvelastic.device.process_memory import anonymous_bytes
from kvelastic.device.selection import HOST, Device, host
from kvelastic.errors import DeviceUnavailableError, UnsupportedEngineError
from kvelastic.integration.vllm import cache_shape
from kvelastic.integration.vllm.cache_shape import CacheShape
from kvelastic.integration.vllm.handoff import HANDOFF, Handoff
from kvelastic.integration.vllm.start_checks import check_device, instance_name
from kvelastic.integration.vllm.worker_device import DeviceFacts
from kvelastic.pool.layout import PageLayout
from kvelastic.pool.pool import FOREVER_S, ElasticPool, open_pool
from kvelastic.shared.device_set import capacity_bytes, page_size_bytes
from kvelastic.shared.segment import Segment
from kvelastic.units import format_size

if TYPE_CHECKING:
    from kvelastic.integration.vllm.in_tiers import EngineTiers
    from kvelastic.integration.vllm.record_split import LayerTensor
    from kvelastic.tiers.weights_fingerprint import WeightFiles

_log = logging.getLogger("kvelastic.vllm")

_MOST_IDS = 2**31 - 1


class Instance:
    """One KV cache of one engine. Made by `start_instance`, used by the engine core's thread."""

    def __init__(
        self,
        settings: config.Config,
        pool: ElasticPool,
        shape: CacheShape,
        layout: PageLayout,
        pages: int,
        num_blocks: int,
        devices: Sequence[DeviceFacts],
    ) -> None:
        self.num_blocks = num_blocks
        """The number of blocks that vLLM was configured with, including the null block."""
        self._settings = settings
        self._pool = pool
        self._shape = shape
        self._layout = layout
        self._pages = pages
        self._devices = devices
        self._reserved_bytes: dict[str, int] = {}
        self.tiers: EngineTiers | None = None
        """The tiers that store demoted blocks, or None: then evicted blocks are dropped."""
        # Finalize runs in the main process and in every kind of multiprocessing child; `atexit`
        # does not.
        self._at_exit = Finalize(self, pool.close, exitpriority=10)

    @property
    def blocks(self) -> _vmm.Pool:
        """The native pool."""
        return self._pool.blocks

    @property
    def name(self) -> str:
        """The instance's name for operators."""
        return self._pool.name

    @property
    def id_span(self) -> int:
        """The highest block id plus one."""
        return self._layout.id_span(self._pages)

    def rewrite(self, cache_config: Any, rank: int) -> None:
        """Rewrite a worker's `KVCacheConfig` to the paged layout and add its handoff."""
        vllm_block_bytes = cache_config.kv_cache_tensors[0].size // cache_config.num_blocks
        cache_shape.rewrite(cache_config, self._shape, self._layout, self._pages)
        handoff = Handoff(
            rank=rank,
            device=self._devices[rank].name,
            segment_name=self._pool.name,
            segment_uuid=self._pool.segment.control_block.read_header()["uuid"],
            layout=self._layout,
            pages=self._pages,
            vllm_block_bytes=vllm_block_bytes,
        )
        setattr(cache_config, HANDOFF, handoff)

    def wait_for_workers(self) -> None:
        """Block until every worker serves the ring and page 0, the null block's, is mapped.

        Raises `ChannelError`, naming the rank, after `KVELASTIC_IPC_TIMEOUT`, and
        `OutOfMemoryError` if a device has no room for the page.
        """
        ring = self._pool.memory
        assert isinstance(ring, _vmm.Ring)
        ring.wait_for_workers(_timeout_s(self._settings))
        self._pool.name_workers()
        self._pool.map_null_block()

    def begin(self, held_bytes: Sequence[int]) -> None:
        """Start the maintenance thread: map pages ahead, handle requests, give memory to others.

        `held_bytes` is what each rank holds on its GPU besides the cache; on the host it is
        measured here. The instance reserves it, unless `KVELASTIC_RESERVE` sets the amount. Raises
        `GuaranteeError` or `ReserveError` if a device has no room for it.
        """
        if self._settings.reserve is None:
            reserve_bytes = self._by_device(held_bytes)
            if not self.is_on_gpu:
                ring = self._pool.memory
                assert isinstance(ring, _vmm.Ring)
                processes = {pid for pid, _ in ring.workers}
                reserve_bytes = {HOST: sum(map(anonymous_bytes, processes))}
            self._pool.reserve(reserve_bytes)
            self._reserved_bytes = reserve_bytes
            for name, size_bytes in reserve_bytes.items():
                _log.info("Reserved %s of %s besides the KV cache.", format_size(size_bytes), name)
        self.report_engine_asleep(False)
        self._pool.start_maintenance()
        _log.info(
            "Ready as %s: kvctl list shows it, kvctl limit changes its limit.", self._pool.name
        )

    def lower_reserve(self, held_bytes: Sequence[int]) -> None:
        """Lower the reserve if the ranks now hold less than at their start. Never raises it.

        A measurement made while other engines start may include some of their memory.
        """
        if self._settings.reserve is not None:
            return
        lower_bytes = {
            name: size_bytes
            for name, size_bytes in self._by_device(held_bytes).items()
            if size_bytes < self._reserved_bytes.get(name, 0)
        }
        if not lower_bytes:
            return
        self._pool.reserve(lower_bytes)
        self._reserved_bytes |= lower_bytes
        for name, size_bytes in lower_bytes.items():
            _log.info("Lowered the reserve to %s of %s.", format_size(size_bytes), name)

    def _by_device(self, held_bytes: Sequence[int]) -> dict[str, int]:
        total_bytes = dict.fromkeys((device.name for device in self._devices), 0)
        for device, rank_bytes in zip(self._devices, held_bytes, strict=True):
            total_bytes[device.name] += rank_bytes
        return total_bytes

    @property
    def is_on_gpu(self) -> bool:
        """True if the pages lie on GPUs, False for host memory."""
        return self._devices[0].is_gpu

    def sleep(self) -> None:
        """Release all memory until `wake()`. No request may run. Blocks while pages unmap."""
        held_bytes, start_s = self.blocks.mapped_bytes, time.monotonic()
        state = self.blocks.sleep()
        if state["mapped_bytes"]:
            _log.warning(
                "Asleep, but %s of KV cache are still held because blocks are in use. They are "
                "released when that use ends.",
                format_size(state["mapped_bytes"]),
            )
        _log.info(
            "vLLM has put the KV cache to sleep: released %s in %.0f ms.",
            format_size(max(0, held_bytes - state["mapped_bytes"])),
            (time.monotonic() - start_s) * 1e3,
        )

    def wake(self) -> None:
        """Allow allocation again under the same limit, after taking the reserve back. Idempotent.

        On a GPU the null block is mapped on return, because kernels read it. Raises `ReserveError`
        or `OutOfMemoryError`, and stays asleep, if other instances have not given enough memory.
        """
        start_s = time.monotonic()
        self.blocks.wake()
        if self.is_on_gpu:
            try:
                self._pool.map_null_block()
            except BaseException:
                self.blocks.sleep()
                raise
        _log.info("vLLM has woken the KV cache in %.0f ms.", (time.monotonic() - start_s) * 1e3)

    def open_tiers(
        self,
        vllm_config: Any,
        cache_config: Any,
        weights: WeightFiles | None,
        tensors: Sequence[Sequence[LayerTensor]],
    ) -> None:
        """Open the tiers of `KVELASTIC_TIERS` and what `KVELASTIC_ROLE` needs, if set.

        `tensors` are those of each rank's layers, for `KVELASTIC_ROLE`.
        Call after the workers have attached and before vLLM creates its scheduler. Blocks while
        stores open, and raises their errors.
        """
        if not self._settings.has_tiers:
            return
        # Imported only with tiers.
        from kvelastic.integration.vllm import in_tiers, tier_opening

        self.tiers = tier_opening.open_for(
            self._settings,
            self._pool,
            vllm_config,
            cache_config,
            weights,
            tensors,
            self._layout.block_bytes,
        )
        if self.tiers is None:
            return
        self._at_exit.cancel()
        self._at_exit = Finalize(self, _close_all, (self.tiers, self._pool), exitpriority=10)
        in_tiers.set_of_this_engine(self.tiers)

    def report_engine_asleep(self, asleep: bool) -> None:
        """Show operators whether the engine sleeps; kvctl's sleep covers the KV cache alone."""
        self._pool.segment.control_block.set_engine_asleep(asleep)

    def close(self) -> None:
        """Stop, and remove the segment. Idempotent. Waits for no worker: one may have died."""
        self._at_exit.cancel()
        if self.tiers is not None:
            self.tiers.close()
        self._pool.close()


def _close_all(tiers: Any, pool: ElasticPool) -> None:
    try:
        tiers.close()
    finally:
        pool.close()


def start_instance(
    vllm_config: Any, cache_configs: Sequence[Any], devices: Sequence[DeviceFacts]
) -> Instance:
    """Create the instance of a cache. Every worker (rank) has a configuration and a device.

    Raises `UnsupportedEngineError` for an unknown placement, `LayoutError` if a block fits no page,
    `ConfigError` for an impossible limit, and `SegmentError` if a live instance has the name.
    """
    settings = config.load()
    rank_devices = _rank_devices(settings, devices)
    shape = reduce(CacheShape.joined, map(cache_shape.shape_of, cache_configs))
    layout = PageLayout.solve(
        shape.block_bytes,
        shape.buffers,
        page_size_bytes=page_size_bytes(settings, rank_devices),
        per_buffer=not settings.contiguous_layout,
    )
    num_blocks = cache_configs[0].num_blocks
    ranks = len(cache_configs)
    longest_blocks = _longest_request_blocks(vllm_config, cache_configs[0])
    pages = _pages(rank_devices, layout, num_blocks, longest_blocks)
    _check_ids(layout, pages)

    def ring(segment: Segment, geometry: _vmm.Geometry) -> _vmm.Ring:
        return _vmm.Ring.create(segment.control_block, geometry, _timeout_s(settings), ranks)

    pool = open_pool(
        settings,
        layout,
        pages,
        num_blocks=num_blocks,
        block_tokens=_block_tokens(cache_configs[0]),
        engine="vLLM",
        model=_model_name(vllm_config),
        devices=rank_devices,
        memory=ring,
        name=instance_name(settings, int(vllm_config.parallel_config.data_parallel_index)),
        movable=True,
        reserve_bytes={
            device.name: (settings.reserve or 0) * copies // ranks
            for device, copies in Counter(rank_devices).items()
        },
    )
    _log.info(
        "KV cache of %d blocks%s, in at most %d pages of %s with %d blocks each (%.1f%% padding).",
        min(num_blocks, pages * layout.blocks_per_page),
        f" over {ranks} workers" if ranks > 1 else "",
        pages,
        format_size(layout.page_bytes * ranks),
        layout.blocks_per_page,
        100 * layout.padding_fraction,
    )
    return Instance(settings, pool, shape, layout, pages, num_blocks, devices)


def _timeout_s(settings: config.Config) -> float:
    return FOREVER_S if settings.ipc_timeout_s is None else settings.ipc_timeout_s


def _block_tokens(cache_config: Any) -> int:
    """Return a block's tokens; the smallest number if groups differ."""
    tokens = min(group.kv_cache_spec.block_size for group in cache_config.kv_cache_groups)
    return max(int(tokens), 1)


def _rank_devices(settings: config.Config, devices: Sequence[DeviceFacts]) -> list[Device]:
    """Return each rank's device as the ledgers know it."""
    on_gpu = devices[0].is_gpu
    check_device(settings, on_gpu=on_gpu)
    if not on_gpu:
        return [host(settings)] * len(devices)
    for device in {each.name: each for each in devices}.values():
        _log.info(
            "The KV cache is on %s (%s). %s",
            device.name,
            device.model,
            tested_gpus.experience(device.model),
        )
    return [
        Device(
            each.name,
            int(each.total_bytes * settings.gpu_utilization),
            _no_driver,
            page_price_us=each.page_price_us,
        )
        for each in devices
    ]


def _no_driver() -> _vmm.Driver:
    raise DeviceUnavailableError("a scheduler opens no GPU; its workers map the pages")


def _check_ids(layout: PageLayout, pages: int) -> None:
    """Raise if ids exceed 32 bits, which GPU block tables use."""
    span = layout.id_span(pages)
    if span > _MOST_IDS:
        raise UnsupportedEngineError(
            f"the block ids of this cache reach {span}, but kernels store them in 32 bits "
            f"(at most {_MOST_IDS}). Make the cache smaller (vllm serve --kv-cache-memory-bytes) "
            "or its blocks larger (--block-size)."
        )


def _pages(
    rank_devices: Sequence[Device], layout: PageLayout, num_blocks: int, longest_blocks: int
) -> int:
    """Return the pages of the range: what vLLM requests, or what the device can hold if less.

    Warns if a request of `longest_blocks` does not fit. vLLM itself checks only against the
    requested size.
    """
    page_cost_bytes = layout.page_bytes * len(rank_devices)
    most = max(capacity_bytes(rank_devices) // page_cost_bytes, 1)
    # Block 0 is the null block.
    needed = layout.pages_for_blocks(longest_blocks + 1)
    if needed > most:
        _log.warning(
            "%s holds at most %s of KV cache (%d pages of %s). A request as long as the model"
            " allows (--max-model-len) needs %s and would wait until it is aborted. %s, or set a"
            " lower --max-model-len.",
            "KVELASTIC_HOST_MEMORY" if rank_devices[0].is_host else rank_devices[0].name,
            format_size(most * page_cost_bytes),
            most,
            format_size(page_cost_bytes),
            format_size(needed * page_cost_bytes),
            f"Set KVELASTIC_HOST_MEMORY to {format_size(needed * page_cost_bytes)} or more"
            if rank_devices[0].is_host
            else "Use a larger GPU or more GPUs",
        )
    return min(layout.pages_for_blocks(num_blocks), most)


def _longest_request_blocks(vllm_config: Any, cache_config: Any) -> int:
    """Return the blocks of a request of `--max-model-len` tokens, over all groups, as vLLM does."""
    specs = [group.kv_cache_spec for group in cache_config.kv_cache_groups]
    return sum(
        -(-int(spec.max_memory_usage_bytes(vllm_config)) // int(spec.page_size_bytes))
        for spec in specs
    )


def _model_name(vllm_config: Any) -> str:
    served = vllm_config.model_config.served_model_name
    if isinstance(served, (list, tuple)):
        served = served[0] if served else None
    return str(served or vllm_config.model_config.model)
