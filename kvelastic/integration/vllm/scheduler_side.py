"""The scheduler's half of an instance: segment, ring, pool and keeper, made for one KV cache.

    instance = start_instance(vllm_config, kv_cache_config)   # once vLLM knows the cache's size
    instance.rewrite(config)                                  # each worker's config: paged layout
    instance.handoff()                                        # where the worker attaches
    instance.wait_for_workers()                               # after they have
    ... instance.pool ...                                     # through block_pool.ElasticBlockPool
    instance.close()

Knows of vLLM only the fields of its configuration; imports neither vLLM nor torch.
"""

from __future__ import annotations

import logging
from multiprocessing.util import Finalize
from typing import Any

from kvelastic import _vmm, config, segment
from kvelastic.integration.vllm.handoff import Handoff
from kvelastic.layout import PageLayout, vllm_placement
from kvelastic.sizes import format_size

_log = logging.getLogger("kvelastic.vllm")


class Instance:
    """One KV cache of one engine; made by `start_instance`, used by the engine core's thread."""

    def __init__(self, settings: config.Config, layout: PageLayout, pages: int, num_blocks: int):
        self.num_blocks = num_blocks
        """Blocks that vLLM was configured with, the null block counted."""
        self._settings = settings
        self._layout = layout
        self._pages = pages
        self._timeout_s = -1.0 if settings.ipc_timeout_s is None else settings.ipc_timeout_s
        self._segment: Any = None
        self._ring: Any = None
        self._keeper: Any = None
        self.pool: Any = None
        """The native pool, `kvelastic._vmm.Pool`."""
        # Runs in the main process and in every kind of child that multiprocessing makes, which
        # `atexit` does not.
        self._at_exit = Finalize(self, Instance.close, args=(self,), exitpriority=10)

    @property
    def id_span(self) -> int:
        """One more than the highest block id."""
        return self._layout.id_span(self._pages)

    @property
    def name(self) -> str:
        """The segment's name: what `kvctl` calls this instance."""
        return str(self._segment.name)

    def open(self, model: str, block_tokens: int) -> None:
        """Make everything that this process holds. Nothing is mapped yet.

        Raises `SegmentError`; then call `close`.
        """
        settings, layout = self._settings, self._layout
        capacity_bytes = settings.host_memory_bytes
        range_bytes = layout.range_bytes(self._pages)
        limit_bytes = settings.limit_bytes(capacity_bytes)
        limit_bytes = range_bytes if limit_bytes is None else min(limit_bytes, range_bytes)
        self._segment = segment.create(settings.ipc_name, engine="vLLM", model=model, device="host")
        geometry = self.handoff().geometry()
        self._ring = _vmm.Ring.create(self._segment.record, geometry, self._timeout_s)
        tokens = settings.max_cached_tokens
        self.pool = _vmm.Pool(
            self._ring,
            max_blocks=min(self.num_blocks, self._pages * layout.blocks_per_page),
            limit_bytes=limit_bytes,
            capacity_bytes=capacity_bytes,
            min_reserved_pages=settings.min_reserved_pages,
            max_reserved_pages=settings.max_reserved_pages,
            max_cached_blocks=-1 if tokens < 0 else tokens // block_tokens,
            preallocate=settings.page_prealloc_enabled,
        )

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
            segment_name=self._segment.name,
            segment_uuid=self._segment.record.read_header()["uuid"],
            pages=self._pages,
            extents_per_page=layout.extents_per_page,
            extent_bytes=layout.extent_bytes,
            extent_stride_bytes=layout.extent_stride_bytes(self._pages),
            block_bytes=layout.block_bytes,
            blocks_per_page=layout.blocks_per_page,
        )

    def wait_for_workers(self) -> None:
        """Return once the worker serves the ring and page 0, the null block's, is mapped.

        Raises `ChannelTimeoutError` if it does neither within `KVELASTIC_IPC_TIMEOUT`.
        """
        self._ring.wait_for_worker(self._timeout_s)
        self.pool.ensure(1)
        idle_trim_s = self._settings.idle_trim_s
        self._keeper = _vmm.Keeper.start(
            self.pool,
            self._segment.record,
            -1.0 if idle_trim_s is None else idle_trim_s,
            self._settings.sanity_check,
        )
        _log.info("Ready as %s: kvctl list shows it, kvctl limit changes its limit.", self.name)

    def close(self) -> None:
        """Stop, and remove the segment. Waits for no worker: it may be gone. Safe to call twice."""
        self._at_exit.cancel()
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.stop()
        if self._segment is not None:
            self._segment.close()


def start_instance(vllm_config: Any, cache_config: Any) -> Instance:
    """Make the instance for a cache of one group, whose layout is layer by layer.

    Raises `LayoutError` if a block fits no page, and `SegmentError` if the name is taken by a live
    instance.
    """
    settings = config.load()
    config.configure_logging(settings)
    tensors = cache_config.kv_cache_tensors
    layers = sum(len(tensor.layers) for tensor in tensors)
    layout = PageLayout.solve(
        tensors[0].block_stride,
        layers,
        page_size_bytes=settings.page_size_bytes,
        per_buffer=not settings.contiguous_layout,
    )
    num_blocks = cache_config.num_blocks
    pages = layout.pages_for_blocks(num_blocks)
    most = settings.host_memory_bytes // layout.page_bytes
    if most < pages:
        _log.warning(
            "vLLM wants %s of KV cache, which is more than KVELASTIC_HOST_MEMORY has room for: "
            "%d pages of %s. Requests longer than that will wait for ever.",
            format_size(pages * layout.page_bytes),
            most,
            format_size(layout.page_bytes),
        )
        pages = max(most, 1)
    instance = Instance(settings, layout, pages, num_blocks)
    try:
        block_tokens = cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        instance.open(_model_name(vllm_config), block_tokens)
    except BaseException:
        instance.close()
        raise
    _log.info(
        "KV cache of %d blocks in pages of %s with %d blocks each (%.1f%% padding), at most %d "
        "pages.",
        num_blocks,
        format_size(layout.page_bytes),
        layout.blocks_per_page,
        100 * layout.padding_fraction,
        pages,
    )
    return instance


def _model_name(vllm_config: Any) -> str:
    served = vllm_config.model_config.served_model_name
    if isinstance(served, (list, tuple)):
        served = served[0] if served else None
    return str(served or vllm_config.model_config.model)
