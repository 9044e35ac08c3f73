"""Hooks into continuous batching of transformers 5.17, and their probes.

Its cache differs from that of later series (see `block_manager`). The same functions of its loop
are wrapped.
"""

from __future__ import annotations

from typing import Final

from kvelastic.integration.hooks.probe import Probe
from kvelastic.integration.hooks.table import Hook
from kvelastic.integration.transformers import in_block_cache
from kvelastic.integration.transformers.hooked import (
    CACHE,
    HANDLER,
    LOOP,
    LOOP_HOOKS,
    OFFLOADING,
    PROCESSOR,
    ROOM,
    RUNNER,
    SCHEDULER,
    probe_loop,
)

_MANAGER: Final = f"{ROOM}.cache_manager:BlockManager"
_ALLOCATOR: Final = f"{ROOM}.cache_manager:CacheAllocator"
_SLIDING: Final = f"{ROOM}.cache_manager:SlidingAttentionCacheAllocator"
_INPUTS: Final = f"{ROOM}.input_outputs:ContinuousBatchingIOs"

HOOKS: Final = (
    Hook(LOOP, f"{CACHE}.__init__", in_block_cache.cache_init),
    Hook(LOOP, f"{HANDLER}.infer_max_batch_tokens_and_num_blocks", in_block_cache.infer_sizes),
    Hook(LOOP, f"{ROOM}.cache:BlockManager", in_block_cache.make_manager),
    Hook(LOOP, f"{CACHE}.will_allocation_be_successful", in_block_cache.can_allocate),
    Hook(LOOP, f"{CACHE}.compute_max_num_forks", in_block_cache.most_forks),
    Hook(LOOP, f"{_INPUTS}._setup_static_tensors", in_block_cache.set_up_inputs),
    Hook(LOOP, f"{SCHEDULER}._process_candidates", in_block_cache.process_candidates),
    Hook(LOOP, f"{PROCESSOR}.update_batch", in_block_cache.update_batch),
    Hook(LOOP, f"{RUNNER}.warmup", in_block_cache.warm_up),
    *LOOP_HOOKS,
)
"""All hooks for 5.17."""


def probe_all(probe: Probe) -> None:
    """Probe everything that a wrapper replaces, calls or relies on."""
    _probe_cache(probe)
    _probe_blocks(probe)
    _probe_users(probe)
    probe_loop(probe)


def _probe_cache(probe: Probe) -> None:
    probe.parameters(
        f"{CACHE}.__init__",
        "self config continuous_batching_config device distributed_helper tp_plan",
    )
    probe.mentions(
        f"{CACHE}.__init__",
        "PagedAttentionMemoryHandler infer_max_batch_tokens_and_num_blocks BlockManager empty "
        "key_cache value_cache num_pages read_trash_index sentinel_index write_trash_index",
    )
    probe.parameters(f"{HANDLER}.infer_max_batch_tokens_and_num_blocks", "self")
    probe.mentions(f"{HANDLER}.__init__", "cb_config cache_dtype block_size group_size config")
    probe.get(f"{HANDLER}._default_max_batch_tokens")
    probe.parameters(f"{ROOM}.cache:find_num_kv_heads", "config")
    probe.parameters(f"{ROOM}.cache:find_head_dim", "config")
    probe.holds(
        f"{ROOM}.cache:BlockManager",
        probe.get(f"{ROOM}.cache:BlockManager") is probe.get(_MANAGER),
        "the class of cache_manager.py",
        probe.get(f"{ROOM}.cache:BlockManager"),
    )


def _probe_blocks(probe: Probe) -> None:
    """Probe that only these methods use the lists of ids; all others would need a replacement."""
    probe.users(
        _MANAGER,
        "_uninit_block_ids",
        "__init__ num_free_blocks has_enough_free_blocks get_free_blocks decrease_ref_count "
        "free_blocks uninitialize_unshared_block",
    )
    probe.users(
        _MANAGER,
        "_init_block_ids",
        "__init__ num_free_blocks has_enough_free_blocks increase_ref_count decrease_ref_count",
    )
    probe.users(
        _MANAGER, "_hash_to_id", "__init__ has_enough_free_blocks mark_shareable_blocks_as_complete"
    )
    probe.parameters(f"{_MANAGER}.__init__", "self num_blocks block_size tp_on")
    probe.parameters(
        f"{_MANAGER}.get_free_blocks", "self n_blocks last_block_id shareable group_id"
    )
    probe.parameters(f"{_MANAGER}.free_blocks", "self blocks shareable")
    probe.parameters(f"{_MANAGER}.increase_ref_count", "self block_id")
    probe.parameters(f"{_MANAGER}.decrease_ref_count", "self block_id")
    probe.parameters(f"{_MANAGER}.uninitialize_unshared_block", "self block_id")
    probe.parameters(f"{ROOM}.cache_manager:Block.__init__", "self id_ parent_id group_id")
    probe.mentions(f"{_SLIDING}.__init__", "sentinel_index write_trash_index")
    probe.mentions(f"{_ALLOCATOR}.free_blocks", "block_table free_blocks")


def _probe_users(probe: Probe) -> None:
    """Probe the functions that read the cache's sizes, because each needs a different value."""
    probe.users(CACHE, "num_blocks", "__init__")
    probe.users(_INPUTS, "num_blocks", "_setup_static_tensors")
    probe.users(SCHEDULER, "num_blocks", "_process_candidates")
    probe.users(RUNNER, "num_blocks", "warmup")
    probe.users(CACHE, "will_allocation_be_successful", "allocate_blocks")
    probe.parameters(
        f"{CACHE}.will_allocation_be_successful", "self num_requested_blocks allocated_blocks"
    )
    probe.parameters(f"{CACHE}.blocks_needed", "self num_requested_blocks allocated_blocks")
    probe.parameters(f"{CACHE}.compute_max_num_forks", "self source_request_id")
    probe.mentions(
        f"{PROCESSOR}.update_batch",
        "mark_shareable_blocks_as_complete _requests_to_fork compute_max_num_forks",
    )
    probe.mentions(f"{OFFLOADING}.offload_requests", "get_num_free_blocks _offload_to_cpu")
    probe.mentions(f"{ROOM}.utils:create_warmup_future_states", "allocate_blocks")
