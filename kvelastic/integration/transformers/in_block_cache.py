"""Wrappers for the cache of transformers 5.17, whose pool is a block manager.

`in_batches` wraps the parts of the loop that all series share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from kvelastic.integration.transformers import in_batches
from kvelastic.integration.transformers.in_cache import (
    batches_of,
    make_elastic,
    making_now,
    tokens_of_a_batch,
)

if TYPE_CHECKING:
    from kvelastic.integration.transformers.batches import Batches
    from kvelastic.integration.transformers.cache_memory import Making
    from kvelastic.pool.engine_pool import EnginePool

_ENDLESS: Final = 1 << 31
"""transformers' value for an unlimited number of children."""


# --- a cache is made ---------------------------------------------------------------------------


def cache_init(original: Callable[..., None], cache: Any, *args: Any, **kwargs: Any) -> None:
    """Make the cache over elastic memory. Raises `UnsupportedEngineError` if it is not covered."""
    from kvelastic.integration.transformers.block_memory import BlockMaking

    make_elastic(BlockMaking, _finish, original, cache, *args, **kwargs)


def infer_sizes(original: Callable[..., tuple[int, int]], handler: Any) -> tuple[int, int]:
    """Return the tokens per batch and the number of blocks, by addresses instead of memory."""
    making = making_now()
    if making is None:
        return original(handler)
    from transformers.generation.continuous_batching import cache

    heads = cache.find_num_kv_heads(handler.config)
    head_size = cache.find_head_dim(handler.config)
    blocks = making.size(
        (handler.block_size, heads, head_size),
        handler.cache_dtype,
        handler.group_size,
        handler.cb_config.num_blocks,
    )
    max_batch_tokens = handler.cb_config.max_batch_tokens
    if max_batch_tokens is None:
        max_batch_tokens = handler._default_max_batch_tokens
    return int(max_batch_tokens), blocks


def make_manager(block_manager: Any, num_blocks: int, block_size: int, tp_on: bool) -> Any:
    """Replace `BlockManager(...)` in an elastic cache: return an `ElasticBlockManager`."""
    making = making_now()
    if making is None or making.memory is None:
        return block_manager(num_blocks, block_size, tp_on=tp_on)
    from kvelastic.integration.transformers.block_manager import ElasticBlockManager

    return ElasticBlockManager(num_blocks, block_size, tp_on, making.memory.blocks)


def _finish(cache: Any, config: Any, making: Making, memory: EnginePool) -> Batches:
    """Insert the real tensors, and correct the values computed from the number of ids."""
    import torch

    from kvelastic.integration.transformers.batches import Batches
    from kvelastic.integration.transformers.block_memory import BlockMaking

    assert isinstance(making, BlockMaking)
    found = making.views()
    for tensor in found:
        torch._dynamo.mark_static_address(tensor)
    cache.key_cache[:], cache.value_cache[:] = found[::2], found[1::2]
    cache.num_blocks = cache._block_manager.num_blocks = memory.capacity_blocks
    tokens = tokens_of_a_batch(cache, config, memory.capacity_blocks * cache.block_size)
    cache.num_pages = tokens // cache.block_size * cache.block_size
    # See the drawing in block_manager.py; a block has four rows or more.
    cache.read_trash_index = 0
    cache.sentinel_index = 1
    cache.write_trash_index = cache.block_size - 1
    for allocator in cache.group_cache_managers:
        if hasattr(allocator, "sentinel_index"):
            allocator.sentinel_index = cache.sentinel_index
            allocator.write_trash_index = cache.write_trash_index
    return Batches(cache._block_manager, memory, [rows[: cache.block_size] for rows in found])


# --- the cache's `num_blocks`, which has several uses --------------------------------------------


@contextmanager
def _showing(cache: Any, num_blocks: int) -> Iterator[None]:
    """Set the cache's `num_blocks` to another value for the duration of the context."""
    capacity_blocks, cache.num_blocks = cache.num_blocks, num_blocks
    try:
        yield
    finally:
        cache.num_blocks = capacity_blocks


def set_up_inputs(original: Callable[..., None], inputs: Any, *args: Any, **kwargs: Any) -> None:
    """Size index and mask for the tokens that a batch may read, not for the whole capacity."""
    cache = inputs.cache
    if batches_of(cache) is None:
        original(inputs, *args, **kwargs)
        return
    with _showing(cache, cache.num_pages // cache.block_size):
        original(inputs, *args, **kwargs)


def warm_up(original: Callable[..., None], runner: Any, model: Any) -> None:
    """Capture and compile for the largest batch, with the trash block in place of memory."""
    cache = runner.cache
    if batches_of(cache) is None:
        original(runner, model)
        return
    with _showing(cache, cache.num_pages // cache.block_size):
        in_batches.warm_up(original, runner, model)


def process_candidates(
    original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any
) -> Any:
    """Compute the safety margin from the blocks available under the current limit."""
    cache = scheduler.cache
    if batches_of(cache) is None:
        return original(scheduler, *args, **kwargs)
    with _showing(cache, cache._block_manager.memory.under_limit):
        return original(scheduler, *args, **kwargs)


# --- blocks are taken and given back -------------------------------------------------------------


def can_allocate(
    original: Callable[..., bool], cache: Any, num_requested_blocks: int, allocated_blocks: int
) -> bool:
    """Map memory for a request's blocks, which it takes next; return True if they fit."""
    if batches_of(cache) is None:
        return original(cache, num_requested_blocks, allocated_blocks)
    manager = cache._block_manager
    if manager.warms_up:
        return True
    return bool(
        manager.has_enough_free_blocks(cache.blocks_needed(num_requested_blocks, allocated_blocks))
    )


def update_batch(original: Callable[..., None], processor: Any) -> None:
    """Run the update in one session: ended requests release blocks, others share with children."""
    if batches_of(processor.cache) is not None:
        processor.cache._block_manager.children = {
            state.request_id: state.num_children for state in processor.scheduler._requests_to_fork
        }
    in_batches.update_batch(original, processor)


def most_forks(original: Callable[..., int], cache: Any, source_request_id: str) -> int:
    """Map memory for the children of a request; children that do not fit are prefilled later."""
    if batches_of(cache) is None:
        return original(cache, source_request_id)
    fitting = cache._block_manager.forks_that_fit(source_request_id, cache.group_cache_managers)
    return _ENDLESS if fitting is None else int(fitting)
