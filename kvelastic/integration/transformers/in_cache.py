"""Wrappers for transformers' paged cache, which make it use elastic memory and its blocks."""

from __future__ import annotations

import contextvars
import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from kvelastic.integration.hooks.probe import refuse

if TYPE_CHECKING:
    from kvelastic.integration.transformers.batches import Batches
    from kvelastic.integration.transformers.cache_memory import Making
    from kvelastic.pool.engine_pool import EnginePool

_log = logging.getLogger("kvelastic.transformers")

_KEPT: Final = "kvelastic_batches"
"""Attribute of an elastic cache that holds its `Batches`."""
_MOST_MASK_BYTES: Final = 32 << 20
"""Maximum size of an attention mask over all tokens that a batch may read, unless the longest
request needs more."""

_making: contextvars.ContextVar[Any] = contextvars.ContextVar("making", default=None)
"""The `Making` of the cache under construction on this thread."""


def batches_of(cache: Any) -> Batches | None:
    """Return an elastic cache's `Batches`; None for a stock cache."""
    return getattr(cache, _KEPT, None)


def blocks_of(cache: Any, request_id: str) -> set[int]:
    """Return the native blocks of an elastic cache that a request uses."""
    managers = getattr(cache, "group_cache_managers", None)
    if managers is not None:  # 5.17
        return {block for one in managers for block in one.block_table.get(request_id, ())}
    return {
        block // allocator.blocks_per_sector
        for allocator in cache.cache_allocators.values()
        for block in allocator.block_table.get(request_id, ())
    }


def count_blocks(cache: Any, tokens: int) -> int:
    """Return the native blocks of an elastic cache that a request of so many tokens needs."""
    if hasattr(cache, "group_cache_managers"):  # 5.17
        return int(cache.blocks_needed(-(-tokens // cache.block_size), 0))
    return sum(
        -(-allocator.needs_new_blocks("", 0, tokens) // allocator.blocks_per_sector)
        for allocator in cache.cache_allocators.values()
    )


def making_now() -> Any:
    """Return the `Making` of the elastic cache under construction on this thread, or None."""
    return _making.get()


# --- a cache is made ---------------------------------------------------------------------------


def cache_init(original: Callable[..., None], cache: Any, *args: Any, **kwargs: Any) -> None:
    """Make the cache over elastic memory. Raises `UnsupportedEngineError` if it is not covered."""
    from kvelastic.integration.transformers.cache_memory import SectorMaking

    make_elastic(SectorMaking, _finish, original, cache, *args, **kwargs)


def make_elastic(  # the parameters are probed
    kind: type[Making],
    finish: Callable[[Any, Any, Making, EnginePool], Batches],
    original: Callable[..., None],
    cache: Any,
    config: Any,
    continuous_batching_config: Any,
    device: Any,
    distributed_helper: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Let transformers make its cache while a `kind` serves its allocations. Then `finish` turns
    the cache into an elastic one. A failure releases everything and is raised again."""
    import torch

    from kvelastic import config as kvelastic_config
    from kvelastic.integration.transformers import cache_memory

    torch_device = torch.device(device)
    refuse_configuration(continuous_batching_config, torch_device, distributed_helper)
    settings = kvelastic_config.load()
    making = kind(settings, torch_device, str(getattr(config, "_name_or_path", "")))
    token = _making.set(making)
    try:
        with making:
            original(
                cache,
                config,
                continuous_batching_config,
                device,
                distributed_helper,
                *args,
                **kwargs,
            )
        memory = making.finish()
        batches = finish(cache, config, making, memory)
        memory.begin(settings, cache_memory.held_besides_bytes(torch_device))
    except BaseException:
        making.close()
        raise
    finally:
        _making.reset(token)
    setattr(cache, _KEPT, batches)
    # The cache's views keep the range reserved; its memory goes with the cache.
    weakref.finalize(cache, memory.close)


def infer_sizes(original: Callable[..., tuple[int, int]], handler: Any) -> tuple[int, int]:
    """Return the tokens per batch and the number of sectors, by addresses instead of memory."""
    making = _making.get()
    if making is None:
        return original(handler)
    sectors = making.size(
        handler.bytes_per_sector, handler.tokens_per_sector, handler.num_sectors_from_config()
    )
    max_batch_tokens = handler.cb_config.max_batch_tokens
    if max_batch_tokens is None:
        max_batch_tokens = handler._default_max_batch_tokens
    return int(max_batch_tokens), sectors


def make_pool(cache_pool: Any, num_sectors: int, num_allocators: int, *args: Any) -> Any:
    """Replace `CachePool(...)` in an elastic cache: return a `SectorPool`."""
    making = _making.get()
    if making is None or making.memory is None:
        return cache_pool(num_sectors, num_allocators, *args)
    from kvelastic.integration.transformers.sector_pool import SectorPool

    return SectorPool(num_sectors, num_allocators, making.memory.blocks)


def _finish(cache: Any, config: Any, _: Making, memory: EnginePool) -> Batches:
    """Correct the values that transformers computed from the number of ids."""
    from kvelastic.integration.transformers.batches import Batches

    allocators = list(cache.cache_allocators.values())
    block_bytes = sum(ca.bytes_per_page * ca.pages_per_block for ca in allocators)
    cache.num_blocks = memory.capacity_blocks * cache.bytes_per_sector // block_bytes
    capacity_tokens = memory.capacity_blocks * cache.tokens_per_sector
    cache.max_tokens_read = tokens_of_a_batch(cache, config, capacity_tokens)
    for allocator in allocators:
        # See the drawing in sector_pool.py; a page has four rows or more.
        allocator.write_trash_index = allocator.tokens_per_page - 1
    if cache.use_prefix_sharing:
        _keep_prefixes(cache, memory)
    return Batches(cache.pool, memory, [cache.cache_tensor[: cache.bytes_per_sector]])


def _keep_prefixes(cache: Any, memory: EnginePool) -> None:
    from kvelastic.integration.transformers.prefix_ledger import PrefixLedger

    (allocator,) = cache.cache_allocators.values()
    if allocator.blocks_per_sector > 1:
        # Blocks are smaller than the alignment of sectors only in test models with tiny blocks.
        _log.warning("No prefix is cached: a block is less than a sector. Use a larger page.")
        cache.use_prefix_sharing = cache.allow_block_sharing = False
        allocator.use_block_sharing = False
        return
    allocator.ledger = PrefixLedger(memory.blocks)


def tokens_of_a_batch(cache: Any, config: Any, capacity_tokens: int) -> int:
    """Return the maximum number of cached tokens that one batch may read.

    That is all of them, unless transformers allocates an attention mask with that many columns.
    """
    from transformers.generation.continuous_batching.utils import attn_mask_is_needed

    if not attn_mask_is_needed(config):
        return capacity_tokens
    # The mask has a row per token of the batch and a column per token that it may read.
    row_bytes = int(cache.max_batch_tokens * cache.dtype.itemsize)
    longest = int(getattr(config, "max_position_embeddings", 0) or capacity_tokens)
    return min(capacity_tokens, max(longest, _MOST_MASK_BYTES // row_bytes))


# --- blocks are taken and given back -----------------------------------------------------------


def can_store(
    original: Callable[..., bool], cache: Any, state: Any, request_len: int, dry_run: bool = False
) -> bool:
    """Map memory for a request's blocks before transformers checks the free blocks."""
    batches = batches_of(cache)
    if batches is None or dry_run:
        return original(cache, state, request_len, dry_run)
    allocators = cache.cache_allocators.values()
    pool = cache.pool
    if pool.warms_up:
        for allocator in allocators:
            blocks = allocator.needs_new_blocks(state.request_id, state.current_len(), request_len)
            allocator.block_table.setdefault(state.request_id, []).extend([0] * blocks)
        return True
    needed = sum(
        allocator.needs_new_sectors(state.request_id, state.current_len(), request_len)
        for allocator in allocators
    )
    if needed and pool.memory.prepare(needed) < needed:
        return False
    return original(cache, state, request_len, dry_run)


def prepare_fork(
    original: Callable[..., list[str]],
    cache: Any,
    src_state: Any,
    dst_req_ids: list[str],
    *args: Any,
) -> list[str]:
    """Map memory for the children of a request. Children that do not fit are prefilled later."""
    batches = batches_of(cache)
    if batches is None:
        return original(cache, src_state, dst_req_ids, *args)
    forked: list[str] = []
    for request_id in dst_req_ids:
        needed = 0
        for allocator in cache.cache_allocators.values():
            blocks = allocator.count_non_shareable_blocks(
                src_state.request_id, src_state.current_len()
            )
            missing = blocks - cache.pool.count_free_blocks(allocator.index)
            needed += max(0, -(-missing // allocator.blocks_per_sector))
        if needed and cache.pool.memory.prepare(needed) < needed:
            break
        if not original(cache, src_state, [request_id], *args):
            break
        forked.append(request_id)
    return forked


def free_request(
    original: Callable[..., None], allocator: Any, request_id: str, no_cache: bool = False
) -> None:
    """Release a request's blocks from the tail. Blocks cached first are evicted first, and a prefix
    is useless without its head."""
    blocks = allocator.block_table.get(request_id)
    if blocks is not None and _is_elastic(allocator):
        allocator.block_table[request_id] = blocks[::-1]
    original(allocator, request_id, no_cache)


def _is_elastic(allocator: Any) -> bool:
    return hasattr(allocator.pool, "memory")


def free_capacity(original: Callable[..., float], cache: Any, relative: bool = True) -> float:
    """Return the free capacity under the current limit. Cached blocks count as free."""
    batches = batches_of(cache)
    if batches is None:
        return original(cache, relative)
    sectors = cache.pool
    available = sectors.num_free_sectors
    free_bytes = available * cache.bytes_per_sector
    for allocator in cache.cache_allocators.values():
        free_bytes += sectors.count_free_blocks(allocator.index) * allocator.bytes_per_block
    total = (sectors.memory.used + available) * cache.bytes_per_sector
    return float(free_bytes / max(total, 1) if relative else free_bytes)


_DEVICES: Final = ("cpu", "cuda")


def refuse_configuration(cb_config: Any, device: Any, distributed_helper: Any) -> None:
    """Raise `UnsupportedEngineError` that names every setting that is not covered.

    `cb_config` is the resolved `ContinuousBatchingConfig`, `device` a torch device.
    """
    found: list[str] = []
    if device.type not in _DEVICES:
        found.append(f"the device {device.type!r}: {' and '.join(_DEVICES)} are covered")
    if distributed_helper.tp_size > 1:
        found.append(
            f"tensor parallelism over {distributed_helper.tp_size} processes: each of them"
            " schedules for itself, and a limit would reach them at different steps"
        )
    if cb_config.use_async_batching:
        found.append(
            "use_async_batching=True: a batch is prepared while the one before it still computes."
            " Leave it unset, or set it to False"
        )
    refuse("kvelastic does not cover what this continuous batching was set up with:", found)
