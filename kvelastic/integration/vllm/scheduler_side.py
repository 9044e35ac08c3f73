"""The scheduler's half of an instance: segment, ring, pool and keeper, made for one KV cache.

    instance = start_instance(vllm_config, kv_cache_config)   # once vLLM knows the cache's size
    instance.rewrite(config)                                  # each worker's config: paged layout
    instance.handoff()                                        # where the worker attaches
    instance.wait_for_workers()                               # after they have
    ... instance.blocks ...                                   # through block_pool.ElasticBlockPool
    instance.close()

Knows of vLLM only the fields of its configuration; imports neither vLLM nor torch.
"""

from __future__ import annotations

import logging
from multiprocessing.util import Finalize
from typing import Any

from kvelastic import _vmm, config
from kvelastic.device import host
from kvelastic.errors import ConfigError
from kvelastic.integration.vllm.handoff import Handoff
from kvelastic.layout import PageLayout, vllm_placement
from kvelastic.pool import FOREVER_S, ElasticPool, open_pool
from kvelastic.segment import Segment
from kvelastic.sizes import format_size

_log = logging.getLogger("kvelastic.vllm")


class Instance:
    """One KV cache of one engine; made by `start_instance`, used by the engine core's thread."""

    def __init__(
        self, pool: ElasticPool, layout: PageLayout, pages: int, num_blocks: int, timeout_s: float
    ) -> None:
        self.num_blocks = num_blocks
        """Blocks that vLLM was configured with, the null block counted."""
        self._pool = pool
        self._layout = layout
        self._pages = pages
        self._timeout_s = timeout_s
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

    def rewrite(self, cache_config: Any) -> None:
        """Turn a worker's `KVCacheConfig` into the paged layout: as many ids as the range has.

        The scheduler keeps its own copy, with the number of blocks that there really are.
        """
        tensors = cache_config.kv_cache_tensors
        layers = sum(len(tensor.layers) for tensor in tensors)
        placement = vllm_placement(self._layout, layers, self._pages)
        first = 0
        for tensor in tensors:
            tensor.size = placement.size
            tensor.offset = placement.offset + first * placement.layer_stride
            tensor.layer_stride = placement.layer_stride
            tensor.block_stride = placement.block_stride
            first += len(tensor.layers)
        cache_config.num_blocks = placement.num_blocks

    def handoff(self) -> Handoff:
        """What a worker needs to attach."""
        layout = self._layout
        return Handoff(
            segment_name=self._pool.name,
            segment_uuid=self._pool.segment.record.read_header()["uuid"],
            pages=self._pages,
            extents_per_page=layout.extents_per_page,
            extent_bytes=layout.extent_bytes,
            extent_stride_bytes=layout.extent_stride_bytes(self._pages),
            block_bytes=layout.block_bytes,
            blocks_per_page=layout.blocks_per_page,
            buffers_per_extent=layout.buffers_per_extent,
        )

    def wait_for_workers(self) -> None:
        """Return once the worker serves the ring and page 0, the null block's, is mapped.

        Raises `ChannelError` if it does neither within `KVELASTIC_IPC_TIMEOUT`.
        """
        ring = self._pool.memory
        assert isinstance(ring, _vmm.Ring)
        ring.wait_for_workers(self._timeout_s)
        for pid, start_time_ticks in ring.workers:
            self._pool.ledger.member.add_worker(pid, start_time_ticks)
        self.blocks.ensure(1)
        self._pool.start_keeper()
        _log.info(
            "Ready as %s: kvctl list shows it, kvctl limit changes its limit.", self._pool.name
        )

    def close(self) -> None:
        """Stop, and remove the segment. Waits for no worker: it may be gone. Safe to call twice."""
        self._at_exit.cancel()
        self._pool.close()


def start_instance(vllm_config: Any, cache_config: Any) -> Instance:
    """Make the instance for a cache of one group, whose layout is layer by layer.

    Raises `LayoutError` if a block fits no page, `ConfigError` for a limit that cannot be kept,
    and `SegmentError` if the name is taken by a live instance.
    """
    settings = config.load()
    if settings.device.startswith("cuda"):
        raise ConfigError(
            f"KVELASTIC_DEVICE={settings.device!r} does not fit vLLM on the CPU: set it to host or "
            "auto, or leave it unset."
        )
    tensors = cache_config.kv_cache_tensors
    layout = PageLayout.solve(
        tensors[0].block_stride,
        sum(len(tensor.layers) for tensor in tensors),
        page_size_bytes=settings.page_size_bytes,
        per_buffer=not settings.contiguous_layout,
    )
    num_blocks = cache_config.num_blocks
    pages = _pages(settings, layout, num_blocks)
    timeout_s = FOREVER_S if settings.ipc_timeout_s is None else settings.ipc_timeout_s

    def ring(segment: Segment, geometry: _vmm.Geometry) -> _vmm.Ring:
        return _vmm.Ring.create(segment.record, geometry, timeout_s)

    pool = open_pool(
        settings,
        layout,
        pages,
        num_blocks=num_blocks,
        block_tokens=cache_config.kv_cache_groups[0].kv_cache_spec.block_size,
        engine="vLLM",
        model=_model_name(vllm_config),
        device=host(settings),
        memory=ring,
        movable=True,
    )
    _log.info(
        "KV cache of %d blocks, in at most %d pages of %s with %d blocks each (%.1f%% padding).",
        num_blocks,
        pages,
        format_size(layout.page_bytes),
        layout.blocks_per_page,
        100 * layout.padding_fraction,
    )
    return Instance(pool, layout, pages, num_blocks, timeout_s)


def _pages(settings: config.Config, layout: PageLayout, num_blocks: int) -> int:
    wanted = layout.pages_for_blocks(num_blocks)
    most = settings.host_memory_bytes // layout.page_bytes
    if wanted <= most:
        return wanted
    _log.warning(
        "vLLM wants %s of KV cache, and KVELASTIC_HOST_MEMORY has room for %d pages of %s. "
        "Requests that need more than that will wait until they are aborted.",
        format_size(wanted * layout.page_bytes),
        most,
        format_size(layout.page_bytes),
    )
    return max(most, 1)


def _model_name(vllm_config: Any) -> str:
    served = vllm_config.model_config.served_model_name
    if isinstance(served, (list, tuple)):
        served = served[0] if served else None
    return str(served or vllm_config.model_config.model)
