"""The scheduler's half of an instance: segment, ring, pool and keeper, made for one KV cache.

    instance = start_instance(vllm_config, kv_cache_configs)  # once vLLM knows the cache's size
    instance.rewrite(config, rank)                            # each worker's config: paged layout
    instance.wait_for_workers()                               # after they all have
    ... instance.blocks ...                                   # through block_pool.ElasticBlockPool
    instance.close()

Knows of vLLM only the fields of its configuration; imports neither vLLM nor torch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import reduce
from multiprocessing.util import Finalize
from typing import Any

from kvelastic import _vmm, config
from kvelastic.device import host
from kvelastic.errors import ConfigError
from kvelastic.integration.vllm import cache_shape
from kvelastic.integration.vllm.cache_shape import CacheShape
from kvelastic.integration.vllm.handoff import HANDOFF, Handoff
from kvelastic.layout import PageLayout
from kvelastic.pool import FOREVER_S, ElasticPool, open_pool
from kvelastic.process_memory import anonymous_bytes
from kvelastic.segment import Segment
from kvelastic.sizes import format_size

_log = logging.getLogger("kvelastic.vllm")


class Instance:
    """One KV cache of one engine; made by `start_instance`, used by the engine core's thread."""

    def __init__(
        self,
        pool: ElasticPool,
        shape: CacheShape,
        layout: PageLayout,
        pages: int,
        num_blocks: int,
        timeout_s: float,
        *,
        measures_reserve: bool,
    ) -> None:
        self.num_blocks = num_blocks
        """Blocks that vLLM was configured with, the null block counted."""
        self._pool = pool
        self._shape = shape
        self._layout = layout
        self._pages = pages
        self._timeout_s = timeout_s
        self._measures_reserve = measures_reserve
        # Runs in the main process and in every kind of child that multiprocessing makes, which
        # `atexit` does not.
        self._at_exit = Finalize(self, pool.close, exitpriority=10)

    @property
    def blocks(self) -> _vmm.Pool:
        """The native pool."""
        return self._pool.blocks

    @property
    def id_span(self) -> int:
        """One more than the highest block id."""
        return self._layout.id_span(self._pages)

    def rewrite(self, cache_config: Any, rank: int) -> None:
        """Turn a worker's `KVCacheConfig` into the paged layout, and say where to attach."""
        vllm_block_bytes = cache_config.kv_cache_tensors[0].size // cache_config.num_blocks
        cache_shape.rewrite(cache_config, self._shape, self._layout, self._pages)
        setattr(cache_config, HANDOFF, self._handoff(rank, vllm_block_bytes))

    def _handoff(self, rank: int, vllm_block_bytes: int) -> Handoff:
        layout = self._layout
        return Handoff(
            rank=rank,
            segment_name=self._pool.name,
            segment_uuid=self._pool.segment.record.read_header()["uuid"],
            pages=self._pages,
            extents_per_page=layout.extents_per_page,
            extent_bytes=layout.extent_bytes,
            extent_stride_bytes=layout.extent_stride_bytes(self._pages),
            block_bytes=layout.block_bytes,
            blocks_per_page=layout.blocks_per_page,
            buffers_per_extent=layout.buffers_per_extent,
            vllm_block_bytes=vllm_block_bytes,
        )

    def wait_for_workers(self) -> None:
        """Return once every worker serves the ring and page 0, the null block's, is mapped.

        Says what the workers hold besides the cache, unless `KVELASTIC_RESERVE` does. Raises
        `ChannelError`, naming the rank, if one does neither within `KVELASTIC_IPC_TIMEOUT`,
        `GuaranteeError` and `ReserveError` if the device has no room for what they hold.
        """
        ring = self._pool.memory
        assert isinstance(ring, _vmm.Ring)
        ring.wait_for_workers(self._timeout_s)
        self._pool.name_workers()
        if self._measures_reserve:
            # They have loaded the model and warmed up, and hold no page of the cache yet.
            held_bytes = sum(anonymous_bytes(pid) for pid in {pid for pid, _ in ring.workers})
            self._pool.reserve(held_bytes)
            _log.info("%s besides the KV cache are reserved.", format_size(held_bytes))
        self.blocks.ensure(1)
        self.say_whether_engine_sleeps(False)
        self._pool.start_keeper()
        _log.info(
            "Ready as %s: kvctl list shows it, kvctl limit changes its limit.", self._pool.name
        )

    def sleep(self) -> None:
        """Hold no memory until `wake()`; no request may be running. Blocks while it is unmapped."""
        _log.debug("The engine falls asleep: all KV cache goes back.")
        state = self.blocks.sleep()
        if state["mapped_bytes"]:
            _log.warning(
                "Asleep, but %s of KV cache are still held: something uses blocks of it. They go "
                "when it ends.",
                format_size(state["mapped_bytes"]),
            )

    def wake(self) -> None:
        """Hand out blocks again, within the limit as it was. Takes no memory yet."""
        _log.debug("The KV cache wakes.")
        self.blocks.wake()

    def say_whether_engine_sleeps(self, asleep: bool) -> None:
        """Show it to operators: what they put to sleep and wake by kvctl is the KV cache alone."""
        self._pool.segment.record.set_engine_asleep(asleep)

    def close(self) -> None:
        """Stop, and remove the segment. Waits for no worker: one may be gone. Safe to repeat."""
        self._at_exit.cancel()
        self._pool.close()


def start_instance(vllm_config: Any, cache_configs: Sequence[Any]) -> Instance:
    """Make the instance for a cache, of which every worker (rank) has a configuration.

    Raises `UnsupportedEngineError` for a placement that is not known, `LayoutError` if a block fits
    no page, `ConfigError` for a limit that cannot be kept, and `SegmentError` if the name is taken
    by a live instance.
    """
    settings = config.load()
    if settings.device.startswith("cuda"):
        raise ConfigError(
            f"KVELASTIC_DEVICE={settings.device!r} does not fit vLLM on the CPU: set it to host or "
            "auto, or leave it unset."
        )
    shape = reduce(CacheShape.joined, map(cache_shape.shape_of, cache_configs))
    layout = PageLayout.solve(
        shape.block_bytes,
        shape.buffers,
        page_size_bytes=settings.page_size_bytes,
        per_buffer=not settings.contiguous_layout,
    )
    num_blocks = cache_configs[0].num_blocks
    ranks = len(cache_configs)
    pages = _pages(settings, layout, num_blocks, ranks)
    timeout_s = FOREVER_S if settings.ipc_timeout_s is None else settings.ipc_timeout_s

    def ring(segment: Segment, geometry: _vmm.Geometry) -> _vmm.Ring:
        return _vmm.Ring.create(segment.record, geometry, timeout_s, ranks)

    pool = open_pool(
        settings,
        layout,
        pages,
        num_blocks=num_blocks,
        block_tokens=_block_tokens(cache_configs[0]),
        engine="vLLM",
        model=_model_name(vllm_config),
        devices=[host(settings)] * ranks,
        memory=ring,
        movable=True,
        reserve_bytes=settings.reserve or 0,
    )
    _log.info(
        "KV cache of %d blocks%s, in at most %d pages of %s with %d blocks each (%.1f%% padding).",
        num_blocks,
        f" over {ranks} workers" if ranks > 1 else "",
        pages,
        format_size(layout.page_bytes * ranks),
        layout.blocks_per_page,
        100 * layout.padding_fraction,
    )
    return Instance(
        pool,
        shape,
        layout,
        pages,
        num_blocks,
        timeout_s,
        measures_reserve=settings.reserve is None,
    )


def _block_tokens(cache_config: Any) -> int:
    """Tokens of a block; where groups differ, of the one that has the fewest."""
    tokens = min(group.kv_cache_spec.block_size for group in cache_config.kv_cache_groups)
    return max(int(tokens), 1)


def _pages(settings: config.Config, layout: PageLayout, num_blocks: int, ranks: int) -> int:
    page_cost_bytes = layout.page_bytes * ranks
    wanted = layout.pages_for_blocks(num_blocks)
    most = settings.host_memory_bytes // page_cost_bytes
    if wanted <= most:
        return wanted
    _log.warning(
        "vLLM wants %s of KV cache, and KVELASTIC_HOST_MEMORY has room for %d pages of %s. "
        "Requests that need more than that will wait until they are aborted.",
        format_size(wanted * page_cost_bytes),
        most,
        format_size(page_cost_bytes),
    )
    return max(most, 1)


def _model_name(vllm_config: Any) -> str:
    served = vllm_config.model_config.served_model_name
    if isinstance(served, (list, tuple)):
        served = served[0] if served else None
    return str(served or vllm_config.model_config.model)
