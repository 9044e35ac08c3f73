"""What kvelastic hooks into transformers' continuous batching, and what must hold there.

transformers has no hook of its own for any of it, so functions are wrapped; each wrapper calls the
original where the cache is a stock one. Every function that a wrapper replaces, calls or relies on
is probed before any is set.
"""

from __future__ import annotations

import functools
from typing import Final

from kvelastic.hooks import table
from kvelastic.hooks.probe import Probe
from kvelastic.hooks.table import Hook
from kvelastic.integration.transformers import in_batches, in_cache
from kvelastic.integration.transformers.versions import installed_version

_PAGE: Final = "docs/transformers.md"
_ROOM: Final = "transformers.generation.continuous_batching"
LOOP: Final = f"{_ROOM}.continuous_api"
"""The module whose import sets all hooks: it brings the others in."""
_CACHE: Final = f"{_ROOM}.cache:PagedAttentionCache"
_HANDLER: Final = f"{_ROOM}.cache:PagedAttentionMemoryHandler"
_POOL: Final = f"{_ROOM}.cache_allocators.cache_pool:CachePool"
_ALLOCATOR: Final = f"{_ROOM}.cache_allocators.cache_allocator:CacheAllocator"
_LEDGER: Final = f"{_ROOM}.cache_allocators.cache_allocator:BlockLedger"
_PROCESSOR: Final = f"{LOOP}:ContinuousBatchProcessor"
_MANAGER: Final = f"{LOOP}:ContinuousBatchingManager"
_OFFLOADING: Final = f"{_ROOM}.offloading_manager:OffloadingManager"
_RUNNER: Final = f"{_ROOM}.model_runner:ModelRunner"
_RESOLVING: Final = f"{_ROOM}.initialization"
_SCHEDULER: Final = f"{_ROOM}.scheduler:Scheduler"

HOOKS: Final = (
    Hook(LOOP, f"{_CACHE}.__init__", in_cache.cache_init, "make it over elastic memory"),
    Hook(
        LOOP,
        f"{_HANDLER}.infer_max_batch_tokens_and_num_sectors",
        in_cache.infer_sizes,
        "as many sectors as there are addresses for",
    ),
    Hook(LOOP, f"{_ROOM}.cache:CachePool", in_cache.make_pool, "sectors of the elastic pool"),
    Hook(
        LOOP,
        f"{_CACHE}.can_store_request_tokens",
        in_cache.can_store,
        "have memory mapped before transformers looks what is free",
    ),
    Hook(LOOP, f"{_CACHE}.prepare_fork_request", in_cache.prepare_fork, "the same for children"),
    Hook(
        LOOP, f"{_CACHE}.compute_free_capacity", in_cache.free_capacity, "free of what may be had"
    ),
    Hook(LOOP, f"{_ALLOCATOR}.free_blocks", in_cache.free_request, "the tail is evicted first"),
    Hook(
        LOOP,
        f"{_RESOLVING}:decide_use_async_batching",
        in_batches.decide_use_async_batching,
        "one batch at a time where nobody has said otherwise",
    ),
    Hook(LOOP, f"{_PROCESSOR}.__init__", in_batches.processor_init, "a session to schedule in"),
    Hook(
        LOOP,
        f"{_PROCESSOR}.prepare_next_batch",
        in_batches.prepare_next_batch,
        "wait where no request fits",
    ),
    Hook(LOOP, f"{_PROCESSOR}.update_batch", in_batches.update_batch, "a session"),
    Hook(
        LOOP,
        f"{_OFFLOADING}.offload_requests",
        in_batches.offload_requests,
        "what is freed is still read",
    ),
    Hook(LOOP, f"{_MANAGER}.stop", in_batches.manager_stop, "give the memory back"),
    Hook(LOOP, f"{_RUNNER}.warmup", in_batches.warm_up, "warm up over the trash sector"),
)
"""Everything that is wrapped."""


def arm(series: str) -> None:
    """Patch continuous batching when it is imported, as that series; again does nothing.

    Where it is imported already that is now, with `UnsupportedEngineError` if it is built
    differently.
    """
    engine = f"transformers {installed_version()}"
    table.arm(engine, HOOKS, {LOOP: functools.partial(_probe, engine)})


def _probe(engine: str) -> None:
    probe = Probe(engine, page=_PAGE)
    _probe_cache(probe)
    _probe_blocks(probe)
    _probe_loop(probe)
    probe.refuse_if_broken()


def _probe_cache(probe: Probe) -> None:
    probe.parameters(
        f"{_CACHE}.__init__",
        ("self", "config", "continuous_batching_config", "device", "distributed_helper"),
    )
    probe.mentions(
        f"{_CACHE}.__init__",
        (
            "PagedAttentionMemoryHandler",
            "infer_max_batch_tokens_and_num_sectors",
            "zeros",
            "uint8",
            "CachePool",
            "bytes_per_sector",
            "tokens_per_sector",
            "use_prefix_sharing",
            "max_tokens_read",
        ),
    )
    probe.parameters(f"{_HANDLER}.infer_max_batch_tokens_and_num_sectors", ("self",))
    probe.parameters(f"{_HANDLER}.num_sectors_from_config", ("self",))
    probe.get(f"{_HANDLER}._default_max_batch_tokens")
    probe.parameters(
        f"{_CACHE}.can_store_request_tokens", ("self", "state", "request_len", "dry_run")
    )
    probe.parameters(
        f"{_CACHE}.prepare_fork_request", ("self", "src_state", "dst_req_ids", "copy_src_and_dst")
    )
    probe.parameters(f"{_CACHE}.compute_free_capacity", ("self", "relative"))
    probe.parameters(f"{_CACHE}.reset", ("self",))
    probe.mentions(f"{_CACHE}.reset", ("free_all_requests", "reset"))
    probe.holds(
        f"{_ROOM}.cache:CachePool",
        probe.get(f"{_ROOM}.cache:CachePool") is probe.get(_POOL),
        "the class of cache_pool.py",
        probe.get(f"{_ROOM}.cache:CachePool"),
    )


def _probe_blocks(probe: Probe) -> None:
    """Everything of the pool, the allocators and the ledger that is replaced or relied on."""
    # What uses the list of free sectors is replaced by the elastic pool.
    probe.users(
        _POOL,
        "free_sectors",
        ("reset", "allocate_sector", "num_free_sectors", "try_to_free_sectors"),
    )
    probe.users(_CACHE, "free_sectors", ("compute_free_capacity",))
    probe.parameters(f"{_POOL}.__init__", ("self", "num_sectors", "num_allocators"))
    probe.parameters(f"{_POOL}.allocate_sector", ("self", "index"))
    probe.parameters(f"{_POOL}.free_blocks", ("self", "index", "block_ids"))
    probe.get(f"{_ROOM}.cache_allocators.cache_pool:RegularTrees.delete_full_trees")
    probe.parameters(f"{_ALLOCATOR}.free_blocks", ("self", "request_id", "no_cache"))
    probe.parameters(
        f"{_ALLOCATOR}.needs_new_sectors", ("self", "request_id", "past_length", "query_length")
    )
    probe.mentions(
        f"{_ALLOCATOR}._after_cache_tensor_init",
        ("read_trash_index", "sentinel_index", "write_trash_index"),
    )
    # What changes the cached blocks is replaced by the ledger that tells the pool.
    probe.users(
        _LEDGER, "cached_blocks", ("__init__", "reset", "acquire", "release", "evict_cached_blocks")
    )
    probe.parameters(f"{_LEDGER}.acquire", ("self", "block_id"))
    probe.parameters(f"{_LEDGER}.release", ("self", "block_id", "no_cache"))


def _probe_loop(probe: Probe) -> None:
    probe.parameters(
        f"{_RESOLVING}:decide_use_async_batching", ("cb_config", "is_attn_mask_needed")
    )
    probe.mentions(f"{_RESOLVING}:decide_use_async_batching", ("use_async_batching",))
    probe.mentions(
        f"{_PROCESSOR}.__init__", ("scheduler", "inputs_and_outputs", "model_runner", "cache")
    )
    probe.parameters(f"{_PROCESSOR}.prepare_next_batch", ("self",))
    probe.mentions(
        f"{_PROCESSOR}.prepare_next_batch",
        ("schedule_batch", "offload_requests", "clear_cancelled_requests"),
    )
    probe.parameters(f"{_PROCESSOR}.update_batch", ("self",))
    probe.mentions(f"{_PROCESSOR}.update_batch", ("mark_complete_blocks", "finish_request"))
    probe.parameters(f"{_OFFLOADING}.offload_requests", ("self",))
    probe.mentions(
        f"{_OFFLOADING}.offload_requests", ("evict_cached_blocks", "free_blocks", "_offload_to_cpu")
    )
    probe.mentions(f"{_SCHEDULER}.__init__", ("cache",))
    probe.mentions(f"{_SCHEDULER}.reset", ("waiting_requests",))
    probe.parameters(f"{_MANAGER}.stop", ("self",))
    probe.mentions(f"{_MANAGER}.stop", ("batch_processor",))
    probe.get(f"{_MANAGER}.is_running")
    probe.parameters(f"{_RUNNER}.warmup", ("self", "model"))
    probe.mentions(f"{_RUNNER}.__init__", ("pad_inputs", "cache"))
    probe.mentions(f"{_ROOM}.utils:create_warmup_future_states", ("can_store_request_tokens",))
    probe.get(f"{_ROOM}.utils:stream_context")
    probe.get(f"{_ROOM}.utils:attn_mask_is_needed")
