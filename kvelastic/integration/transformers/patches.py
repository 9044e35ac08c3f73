"""Hooks into transformers' continuous batching, and their probes.

transformers has no plugin interface for this, so functions are wrapped. For a stock cache a wrapper
calls the original. Every function that a wrapper replaces, calls or relies on is probed before any
hook is set. The cache of 5.17 differs from that of later series (see `block_manager`); the same
functions of its loop are wrapped.
"""

from __future__ import annotations

import functools
from typing import Final

from kvelastic.integration.hooks import table
from kvelastic.integration.hooks.probe import require
from kvelastic.integration.hooks.table import Hook
from kvelastic.integration.hooks.versions import installed_version
from kvelastic.integration.transformers import in_batches, in_block_cache, in_cache

_PAGE: Final = "docs/transformers.md"
_BLOCK_SERIES: Final = "5.17"

_ROOM: Final = "transformers.generation.continuous_batching"
_LOOP: Final = f"{_ROOM}.continuous_api"
"""The module whose import sets all hooks. It imports the others."""
_CACHE: Final = f"{_ROOM}.cache:PagedAttentionCache"
_HANDLER: Final = f"{_ROOM}.cache:PagedAttentionMemoryHandler"
_PROCESSOR: Final = f"{_LOOP}:ContinuousBatchProcessor"
_MANAGER: Final = f"{_LOOP}:ContinuousBatchingManager"
_OFFLOADING: Final = f"{_ROOM}.offloading_manager:OffloadingManager"
_RUNNER: Final = f"{_ROOM}.model_runner:ModelRunner"
_SCHEDULER: Final = f"{_ROOM}.scheduler:Scheduler"
_RESOLVING: Final = f"{_ROOM}.initialization"
_POOL: Final = f"{_ROOM}.cache_allocators.cache_pool:CachePool"
_ALLOCATOR: Final = f"{_ROOM}.cache_allocators.cache_allocator:CacheAllocator"
_LEDGER: Final = f"{_ROOM}.cache_allocators.cache_allocator:BlockLedger"
_BLOCKS: Final = f"{_ROOM}.cache_manager:BlockManager"
_BLOCK_ALLOCATOR: Final = f"{_ROOM}.cache_manager:CacheAllocator"
_SLIDING: Final = f"{_ROOM}.cache_manager:SlidingAttentionCacheAllocator"
_INPUTS: Final = f"{_ROOM}.input_outputs:ContinuousBatchingIOs"

_LOOP_HOOKS: Final = (
    Hook(_LOOP, f"{_RESOLVING}:decide_use_async_batching", in_batches.decide_use_async_batching),
    Hook(_LOOP, f"{_PROCESSOR}.__init__", in_batches.processor_init),
    Hook(_LOOP, f"{_PROCESSOR}.prepare_next_batch", in_batches.prepare_next_batch),
    Hook(_LOOP, f"{_OFFLOADING}.offload_requests", in_batches.offload_requests),
    Hook(_LOOP, f"{_MANAGER}.stop", in_batches.manager_stop),
)
HOOKS: Final = (
    Hook(_LOOP, f"{_CACHE}.__init__", in_cache.cache_init),
    Hook(_LOOP, f"{_HANDLER}.infer_max_batch_tokens_and_num_sectors", in_cache.infer_sizes),
    Hook(_LOOP, f"{_ROOM}.cache:CachePool", in_cache.make_pool),
    Hook(_LOOP, f"{_CACHE}.can_store_request_tokens", in_cache.can_store),
    Hook(_LOOP, f"{_CACHE}.prepare_fork_request", in_cache.prepare_fork),
    Hook(_LOOP, f"{_CACHE}.compute_free_capacity", in_cache.free_capacity),
    Hook(_LOOP, f"{_ALLOCATOR}.free_blocks", in_cache.free_request),
    Hook(_LOOP, f"{_PROCESSOR}.update_batch", in_batches.update_batch),
    Hook(_LOOP, f"{_RUNNER}.warmup", in_batches.warm_up),
    *_LOOP_HOOKS,
)
"""All hooks for 5.18 and later."""
BLOCK_HOOKS: Final = (
    Hook(_LOOP, f"{_CACHE}.__init__", in_block_cache.cache_init),
    Hook(_LOOP, f"{_HANDLER}.infer_max_batch_tokens_and_num_blocks", in_block_cache.infer_sizes),
    Hook(_LOOP, f"{_ROOM}.cache:BlockManager", in_block_cache.make_manager),
    Hook(_LOOP, f"{_CACHE}.will_allocation_be_successful", in_block_cache.can_allocate),
    Hook(_LOOP, f"{_CACHE}.compute_max_num_forks", in_block_cache.most_forks),
    Hook(_LOOP, f"{_INPUTS}._setup_static_tensors", in_block_cache.set_up_inputs),
    Hook(_LOOP, f"{_SCHEDULER}._process_candidates", in_block_cache.process_candidates),
    Hook(_LOOP, f"{_PROCESSOR}.update_batch", in_block_cache.update_batch),
    Hook(_LOOP, f"{_RUNNER}.warmup", in_block_cache.warm_up),
    *_LOOP_HOOKS,
)
"""All hooks for 5.17."""


def hooks_for(series: str) -> tuple[Hook, ...]:
    """Return the hooks for a series of transformers."""
    return BLOCK_HOOKS if series == _BLOCK_SERIES else HOOKS


def arm(series: str) -> None:
    """Patch continuous batching of the given series when it is imported. Idempotent.

    If it is already imported, patch it now. Raises `UnsupportedEngineError` in that case if a probe
    fails.
    """
    engine = f"transformers {installed_version('transformers')}"
    text = _OF_LOOP + (_OF_BLOCK_CACHE if series == _BLOCK_SERIES else _OF_CACHE)
    probe = functools.partial(require, engine, text, page=_PAGE)
    table.arm(engine, hooks_for(series), {_LOOP: probe})


_OF_LOOP: Final = f"""
{_RESOLVING}:decide_use_async_batching(cb_config is_attn_mask_needed) uses use_async_batching
{_PROCESSOR}.__init__ uses scheduler inputs_and_outputs model_runner cache
{_PROCESSOR}.prepare_next_batch(self) uses schedule_batch offload_requests clear_cancelled_requests
{_PROCESSOR}.update_batch(self) uses finish_request
{_PROCESSOR}.has_pending_requests(self)
{_OFFLOADING}.offload_requests(self) uses block_new_requests starved_requests
{_SCHEDULER}.__init__ uses cache
{_SCHEDULER}.reset uses waiting_requests
{_MANAGER}.stop(self) uses batch_processor
{_MANAGER}.is_running
{_RUNNER}.warmup(self model)
{_RUNNER}.__init__ uses pad_inputs cache
{_ROOM}.utils:attn_mask_is_needed
"""
_OF_CACHE: Final = f"""
{_CACHE}.__init__(self config continuous_batching_config device distributed_helper) uses
    PagedAttentionMemoryHandler infer_max_batch_tokens_and_num_sectors zeros uint8 CachePool
    bytes_per_sector tokens_per_sector use_prefix_sharing max_tokens_read
{_HANDLER}.infer_max_batch_tokens_and_num_sectors(self)
{_HANDLER}.num_sectors_from_config(self)
{_HANDLER}._default_max_batch_tokens
{_CACHE}.can_store_request_tokens(self state request_len dry_run)
{_CACHE}.prepare_fork_request(self src_state dst_req_ids copy_src_and_dst)
{_CACHE}.compute_free_capacity(self relative)
{_CACHE}.reset(self) uses free_all_requests reset
{_ROOM}.cache:CachePool is {_POOL}
# The elastic pool replaces all users of the list of free sectors.
{_POOL} uses free_sectors only in reset allocate_sector num_free_sectors try_to_free_sectors
{_CACHE} uses free_sectors only in compute_free_capacity
{_POOL}.__init__(self num_sectors num_allocators)
{_POOL}.allocate_sector(self index)
{_POOL}.free_blocks(self index block_ids)
{_ROOM}.cache_allocators.cache_pool:RegularTrees.delete_full_trees
{_ALLOCATOR}.free_blocks(self request_id no_cache)
{_ALLOCATOR}.needs_new_sectors(self request_id past_length query_length)
{_ALLOCATOR}._after_cache_tensor_init uses read_trash_index sentinel_index write_trash_index
# `PrefixLedger`, which notifies the pool, replaces all users of the cached blocks.
{_LEDGER} uses cached_blocks only in __init__ reset acquire release evict_cached_blocks
{_LEDGER}.acquire(self block_id)
{_LEDGER}.release(self block_id no_cache)
{_PROCESSOR}.update_batch uses mark_complete_blocks
{_OFFLOADING}.offload_requests uses evict_cached_blocks free_blocks _offload_to_cpu
# Defined in `utils` before 5.24, and in `requests` since; the runner imports it.
{_ROOM}.model_runner:create_warmup_future_states uses can_store_request_tokens
"""
_OF_BLOCK_CACHE: Final = f"""
{_CACHE}.__init__(self config continuous_batching_config device distributed_helper tp_plan) uses
    PagedAttentionMemoryHandler infer_max_batch_tokens_and_num_blocks BlockManager empty key_cache
    value_cache num_pages read_trash_index sentinel_index write_trash_index
{_HANDLER}.infer_max_batch_tokens_and_num_blocks(self)
{_HANDLER}.__init__ uses cb_config cache_dtype block_size group_size config
{_HANDLER}._default_max_batch_tokens
{_ROOM}.cache:find_num_kv_heads(config)
{_ROOM}.cache:find_head_dim(config)
{_ROOM}.cache:BlockManager is {_BLOCKS}
# Only these methods use the lists of ids; all others would need a replacement.
{_BLOCKS} uses _uninit_block_ids only in __init__ num_free_blocks has_enough_free_blocks
    get_free_blocks decrease_ref_count free_blocks uninitialize_unshared_block
{_BLOCKS} uses _init_block_ids only in __init__ num_free_blocks has_enough_free_blocks
    increase_ref_count decrease_ref_count
{_BLOCKS} uses _hash_to_id only in __init__ has_enough_free_blocks
    mark_shareable_blocks_as_complete
{_BLOCKS}.__init__(self num_blocks block_size tp_on)
{_BLOCKS}.get_free_blocks(self n_blocks last_block_id shareable group_id)
{_BLOCKS}.free_blocks(self blocks shareable)
{_BLOCKS}.increase_ref_count(self block_id)
{_BLOCKS}.decrease_ref_count(self block_id)
{_BLOCKS}.uninitialize_unshared_block(self block_id)
{_ROOM}.cache_manager:Block.__init__(self id_ parent_id group_id)
{_SLIDING}.__init__ uses sentinel_index write_trash_index
{_BLOCK_ALLOCATOR}.free_blocks uses block_table free_blocks
# The functions that read the cache's sizes: each needs a different value.
{_CACHE} uses num_blocks only in __init__
{_INPUTS} uses num_blocks only in _setup_static_tensors
{_SCHEDULER} uses num_blocks only in _process_candidates
{_RUNNER} uses num_blocks only in warmup
{_CACHE} uses will_allocation_be_successful only in allocate_blocks
{_CACHE}.will_allocation_be_successful(self num_requested_blocks allocated_blocks)
{_CACHE}.blocks_needed(self num_requested_blocks allocated_blocks)
{_CACHE}.compute_max_num_forks(self source_request_id)
{_PROCESSOR}.update_batch uses mark_shareable_blocks_as_complete _requests_to_fork
    compute_max_num_forks
{_OFFLOADING}.offload_requests uses get_num_free_blocks _offload_to_cpu
{_ROOM}.utils:create_warmup_future_states uses allocate_blocks
"""
