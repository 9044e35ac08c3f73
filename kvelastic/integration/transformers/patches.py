"""Hooks into transformers' continuous batching, and their probes.

transformers has no plugin interface for this, so functions are wrapped. For a stock cache a wrapper
calls the original. Every function that a wrapper replaces, calls or relies on is probed before any
hook is set.
"""

from __future__ import annotations

import functools
from typing import Final

from kvelastic.integration.hooks import table
from kvelastic.integration.hooks.probe import Probe
from kvelastic.integration.hooks.table import Hook
from kvelastic.integration.hooks.versions import installed_version
from kvelastic.integration.transformers import in_batches, in_cache
from kvelastic.integration.transformers.hooked import (
    CACHE,
    HANDLER,
    LOOP,
    LOOP_HOOKS,
    OFFLOADING,
    PROCESSOR,
    ROOM,
    RUNNER,
    probe_loop,
)

_PAGE: Final = "docs/transformers.md"
_POOL: Final = f"{ROOM}.cache_allocators.cache_pool:CachePool"
_ALLOCATOR: Final = f"{ROOM}.cache_allocators.cache_allocator:CacheAllocator"
_LEDGER: Final = f"{ROOM}.cache_allocators.cache_allocator:BlockLedger"

HOOKS: Final = (
    Hook(LOOP, f"{CACHE}.__init__", in_cache.cache_init),
    Hook(LOOP, f"{HANDLER}.infer_max_batch_tokens_and_num_sectors", in_cache.infer_sizes),
    Hook(LOOP, f"{ROOM}.cache:CachePool", in_cache.make_pool),
    Hook(LOOP, f"{CACHE}.can_store_request_tokens", in_cache.can_store),
    Hook(LOOP, f"{CACHE}.prepare_fork_request", in_cache.prepare_fork),
    Hook(LOOP, f"{CACHE}.compute_free_capacity", in_cache.free_capacity),
    Hook(LOOP, f"{_ALLOCATOR}.free_blocks", in_cache.free_request),
    Hook(LOOP, f"{PROCESSOR}.update_batch", in_batches.update_batch),
    Hook(LOOP, f"{RUNNER}.warmup", in_batches.warm_up),
    *LOOP_HOOKS,
)
"""All hooks for 5.18 and later; `block_patches` has those for 5.17."""


def hooks_for(series: str) -> tuple[Hook, ...]:
    """Return the hooks for a series of transformers."""
    if series == "5.17":
        from kvelastic.integration.transformers import block_patches

        return block_patches.HOOKS
    return HOOKS


def arm(series: str) -> None:
    """Patch continuous batching of the given series when it is imported. Idempotent.

    If it is already imported, patch it now. Raises `UnsupportedEngineError` in that case if a probe
    fails.
    """
    engine = f"transformers {installed_version('transformers')}"
    table.arm(engine, hooks_for(series), {LOOP: functools.partial(_probe, engine, series)})


def _probe(engine: str, series: str) -> None:
    probe = Probe(engine, page=_PAGE)
    if series == "5.17":
        from kvelastic.integration.transformers import block_patches

        block_patches.probe_all(probe)
    else:
        _probe_cache(probe)
        _probe_blocks(probe)
        probe_loop(probe)
        _probe_what_is_stored(probe)
    probe.refuse_if_broken()


def _probe_cache(probe: Probe) -> None:
    probe.parameters(
        f"{CACHE}.__init__", "self config continuous_batching_config device distributed_helper"
    )
    probe.mentions(
        f"{CACHE}.__init__",
        "PagedAttentionMemoryHandler infer_max_batch_tokens_and_num_sectors zeros uint8 "
        "CachePool bytes_per_sector tokens_per_sector use_prefix_sharing max_tokens_read",
    )
    probe.parameters(f"{HANDLER}.infer_max_batch_tokens_and_num_sectors", "self")
    probe.parameters(f"{HANDLER}.num_sectors_from_config", "self")
    probe.get(f"{HANDLER}._default_max_batch_tokens")
    probe.parameters(f"{CACHE}.can_store_request_tokens", "self state request_len dry_run")
    probe.parameters(f"{CACHE}.prepare_fork_request", "self src_state dst_req_ids copy_src_and_dst")
    probe.parameters(f"{CACHE}.compute_free_capacity", "self relative")
    probe.parameters(f"{CACHE}.reset", "self")
    probe.mentions(f"{CACHE}.reset", "free_all_requests reset")
    probe.holds(
        f"{ROOM}.cache:CachePool",
        probe.get(f"{ROOM}.cache:CachePool") is probe.get(_POOL),
        "the class of cache_pool.py",
        probe.get(f"{ROOM}.cache:CachePool"),
    )


def _probe_blocks(probe: Probe) -> None:
    """Probe everything of the pool, the allocators and the ledger that a wrapper relies on."""
    # The elastic pool replaces all users of the list of free sectors.
    probe.users(_POOL, "free_sectors", "reset allocate_sector num_free_sectors try_to_free_sectors")
    probe.users(CACHE, "free_sectors", "compute_free_capacity")
    probe.parameters(f"{_POOL}.__init__", "self num_sectors num_allocators")
    probe.parameters(f"{_POOL}.allocate_sector", "self index")
    probe.parameters(f"{_POOL}.free_blocks", "self index block_ids")
    probe.get(f"{ROOM}.cache_allocators.cache_pool:RegularTrees.delete_full_trees")
    probe.parameters(f"{_ALLOCATOR}.free_blocks", "self request_id no_cache")
    probe.parameters(f"{_ALLOCATOR}.needs_new_sectors", "self request_id past_length query_length")
    probe.mentions(
        f"{_ALLOCATOR}._after_cache_tensor_init",
        "read_trash_index sentinel_index write_trash_index",
    )
    # `PrefixLedger`, which notifies the pool, replaces all users of the cached blocks.
    probe.users(_LEDGER, "cached_blocks", "__init__ reset acquire release evict_cached_blocks")
    probe.parameters(f"{_LEDGER}.acquire", "self block_id")
    probe.parameters(f"{_LEDGER}.release", "self block_id no_cache")


def _probe_what_is_stored(probe: Probe) -> None:
    """Probe the loop's calls of the cache."""
    probe.mentions(f"{PROCESSOR}.update_batch", "mark_complete_blocks")
    probe.mentions(
        f"{OFFLOADING}.offload_requests", "evict_cached_blocks free_blocks _offload_to_cpu"
    )
    # Defined in `utils` before 5.24, and in `requests` since; the runner imports it.
    probe.mentions(f"{ROOM}.model_runner:create_warmup_future_states", "can_store_request_tokens")
