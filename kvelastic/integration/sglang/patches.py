"""The hooks that kvelastic sets in SGLang, and their probes.

SGLang's own hooks (`HookRegistry`) log errors and continue, so kvelastic wraps functions instead.
Before that it probes every function that a wrapper replaces, calls or relies on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final, TypeAlias

from kvelastic.integration.hooks import table
from kvelastic.integration.hooks.probe import Probe
from kvelastic.integration.hooks.table import Hook
from kvelastic.integration.hooks.versions import installed_version
from kvelastic.integration.sglang import in_arguments, in_scheduler
from kvelastic.integration.sglang.refusals import COVERED, ends_process

_PAGE: Final = "docs/sglang.md"
_Look: TypeAlias = Callable[[Probe], None]

ARGUMENTS: Final = "sglang.srt.server_args"
"""Imported by every process: the arguments."""
PLATFORM: Final = "sglang.srt.platforms.interface"
"""Imported by every process: selects the classes of a KV cache."""
REGISTRY: Final = "sglang.srt.mem_cache.registry"
"""Imported by the scheduler's process: selects the radix cache."""
SCHEDULER: Final = "sglang.srt.managers.scheduler"
"""Imported by the scheduler's process, and by the processes that start it."""

_ARGUMENTS: Final = f"{ARGUMENTS}:ServerArgs"
_PLATFORM: Final = f"{PLATFORM}:SRTPlatform"
_SCHEDULER: Final = f"{SCHEDULER}:Scheduler"
_BATCH: Final = "sglang.srt.managers.schedule_batch:ScheduleBatch"
_PARTS: Final = "sglang.srt.managers.scheduler_components"
_OBSERVER: Final = f"{_PARTS}.pool_stats_observer:SchedulerPoolStatsObserver"
_CHECKER: Final = f"{_PARTS}.invariant_checker:SchedulerInvariantChecker"
_UPDATER: Final = f"{_PARTS}.weight_updater:SchedulerWeightUpdaterManager"
_POOL: Final = "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool"
_ALLOCATOR: Final = "sglang.srt.mem_cache.allocator.paged:PagedTokenToKVPoolAllocator"
_BASE: Final = "sglang.srt.mem_cache.allocator.base:BaseTokenToKVPoolAllocator"
_TREE: Final = "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache"
_CORE: Final = "sglang.srt.mem_cache.unified_cache.unified_tree_core:UnifiedTreeCore"
_FULL: Final = "sglang.srt.mem_cache.unified_cache.components.full:FullComponent"
_ADDER: Final = "sglang.srt.managers.schedule_policy:PrefillAdder"
_BUDGET: Final = "sglang.srt.mem_cache.prefill_budget:PrefillBudget"

HOOKS: Final = (
    Hook(ARGUMENTS, f"{_ARGUMENTS}.resolve_once", in_arguments.resolve_once),
    Hook(PLATFORM, f"{_PLATFORM}.get_kv_pool_cls", in_scheduler.kv_pool_class),
    Hook(PLATFORM, f"{_PLATFORM}.get_paged_allocator_cls", in_scheduler.paged_allocator_class),
    Hook(REGISTRY, f"{REGISTRY}:create_unified_radix_cache", in_scheduler.radix_cache),
    Hook(SCHEDULER, f"{_SCHEDULER}.__init__", in_scheduler.scheduler_init),
    Hook(SCHEDULER, f"{_SCHEDULER}.ingest_requests", in_scheduler.ingest_requests),
    Hook(SCHEDULER, f"{_SCHEDULER}.get_next_batch_to_run", in_scheduler.get_next_batch),
    Hook(SCHEDULER, f"{_SCHEDULER}.run_batch", in_scheduler.run_batch),
    Hook(SCHEDULER, f"{_BATCH}.retract_decode", in_scheduler.retract_decode),
    Hook(SCHEDULER, f"{_OBSERVER}._get_token_info", in_scheduler.token_info),
    Hook(SCHEDULER, f"{_CHECKER}._check_full_pool", in_scheduler.check_full_pool),
    Hook(SCHEDULER, f"{_UPDATER}.release_memory_occupation", in_scheduler.release_memory),
    Hook(SCHEDULER, f"{_UPDATER}.resume_memory_occupation", in_scheduler.resume_memory),
)
"""All hooks."""


def hooks_for(series: str | None) -> tuple[Hook, ...]:
    """Return the hooks for that SGLang series."""
    return HOOKS


def arm(series: str) -> None:
    """Patch each module when SGLang imports it. Idempotent.

    A module that is already imported is patched immediately; `UnsupportedEngineError` is raised if
    it is built differently.
    """
    engine = f"SGLang {installed_version('sglang')}"
    probes = {
        ARGUMENTS: _probe_arguments,
        PLATFORM: _probe_platform,
        REGISTRY: _probe_registry,
        SCHEDULER: _probe_scheduler,
    }
    table.arm(
        engine,
        hooks_for(series),
        {
            room: ends_process(functools.partial(_probe, engine, probe))
            for room, probe in probes.items()
        },
    )


def _probe(engine: str, look: _Look) -> None:
    probe = Probe(engine, page=_PAGE)
    look(probe)
    probe.refuse_if_broken()


def _probe_arguments(probe: Probe) -> None:
    probe.parameters(f"{_ARGUMENTS}.resolve_once", "self")
    probe.mentions(f"{_ARGUMENTS}.resolve_once", "_resolution_finished")
    for field in ("page_size", *(each.field for each in COVERED)):
        probe.get(f"{_ARGUMENTS}.{field}")
    probe.parameters("sglang.srt.arg_groups.overrides:resolving_view", "server_args")


def _probe_platform(probe: Probe) -> None:
    probe.parameters(f"{_PLATFORM}.get_kv_pool_cls", "self kind")
    probe.parameters(f"{_PLATFORM}.get_paged_allocator_cls", "self")


def _probe_registry(probe: Probe) -> None:
    probe.parameters(f"{REGISTRY}:create_unified_radix_cache", "ctx cache_class")
    probe.mentions(
        "sglang.srt.mem_cache.unified_cache.tree_core_registry:_rust_fallback_reason",
        "component_registry_override",
    )
    probe.mentions(f"{_TREE}.__init__", "component_registry_override tree_core disable")
    probe.mentions(f"{_TREE}.checkpoint", "checkpoint_into_tree")
    probe.parameters(f"{_TREE}.match_prefix", "self params")
    probe.mentions(f"{_TREE}._apply_eviction_result", "device_frees")
    probe.parameters(f"{_FULL}.acquire_component_lock", "self node result lock_host")
    probe.parameters(f"{_FULL}.release_component_lock", "self node params lock_host")
    probe.parameters(f"{_FULL}.redistribute_on_node_split", "self new_parent child")
    probe.parameters(
        f"{_FULL}.evict_component", "self node device_frees host_frees cache_actions target"
    )
    probe.parameters(f"{_CORE}._split_node", "self key child split_len")
    probe.parameters(f"{_CORE}.evict_device_leaf", "self node_id is_write_back")


def _probe_scheduler(probe: Probe) -> None:
    probe.parameters(f"{_SCHEDULER}.ingest_requests", "self")
    for loop in ("event_loop_normal", "event_loop_overlap"):
        probe.mentions(f"{_SCHEDULER}.{loop}", "ingest_requests get_next_batch_to_run")
    probe.parameters(f"{_SCHEDULER}.get_next_batch_to_run", "self running_batch last_batch")
    probe.mentions(f"{_SCHEDULER}.is_fully_idle", "running_batch is_empty grammar_queue")
    probe.mentions(f"{_SCHEDULER}.flush_cache", "tree_cache token_to_kv_pool_allocator clear")
    probe.mentions(f"{_SCHEDULER}.update_running_batch", "retract_decode send_abort_output")
    probe.parameters(f"{_BATCH}.retract_decode", "self")
    probe.mentions(f"{_BATCH}.retract_decode", "check_decode_mem to_finish release_req")
    retract = probe.get(f"{_BATCH}.retract_decode")
    probe.holds(
        f"{_BATCH}.retract_decode",
        in_scheduler.reports_no_room_for_the_last(retract),
        f"a message that begins {in_scheduler.NO_ROOM_FOR_THE_LAST!r}",
        "none",
    )
    probe.mentions(f"{_BATCH}.check_decode_mem", "check_decode_capacity reqs")
    probe.parameters(f"{_BATCH}.release_req", "self idx remaing_req_count offload_kv")
    probe.parameters(f"{_BATCH}.filter_batch", "self reqs_to_exclude keep_indices")
    probe.parameters(f"{_OBSERVER}._get_token_info", "self")
    probe.parameters(f"{_CHECKER}._check_full_pool", "self ps uncached")
    probe.mentions(f"{_CHECKER}._check_full_pool", "max_total_num_tokens full_available_size")
    probe.parameters(f"{_UPDATER}.release_memory_occupation", "self recv_req")
    probe.mentions(
        f"{_UPDATER}.release_memory_occupation", "flush_cache is_fully_idle _engine_paused"
    )
    probe.parameters(f"{_SCHEDULER}.send_control_output", "self output recv_req")
    probe.parameters(f"{_UPDATER}.resume_memory_occupation", "self recv_req")
    probe.mentions(f"{_UPDATER}.resume_memory_occupation", "offload_tags tags")
    tag = probe.get("sglang.srt.constants:GPU_MEMORY_TYPE_KV_CACHE")
    probe.holds("GPU_MEMORY_TYPE_KV_CACHE", tag == in_scheduler.KV_CACHE_TAG, "'kv_cache'", tag)
    _probe_pool(probe)


def _probe_pool(probe: Probe) -> None:
    probe.mentions(
        f"{_POOL}._create_buffers",
        "_create_buffers_normal _build_kv_buffer_descs is_quantized_kv_cache",
    )
    probe.mentions(f"{_POOL}._build_kv_buffer_descs", "size page_size k_buffer")
    # Methods that use the list of free pages are replaced, or receive exactly the pages they take.
    probe.users(
        _ALLOCATOR,
        "free_pages",
        "available_size get_all_free_pages merge_and_sort_free alloc alloc_extend "
        "alloc_decode _release_page_ids clear",
    )
    probe.users(
        _BASE, "free_pages", "__init__ available_size get_all_free_pages merge_and_sort_free"
    )
    probe.parameters(
        f"{_ALLOCATOR}.alloc_extend",
        "self prefix_lens prefix_lens_cpu seq_lens seq_lens_cpu last_loc extend_num_tokens "
        "num_new_pages",
    )
    probe.parameters(f"{_ALLOCATOR}.alloc_decode", "self seq_lens seq_lens_cpu last_loc")
    probe.parameters(f"{_BASE}.evict_to_free_tokens", "self tree_cache num_tokens")
    probe.parameters(
        f"{_BASE}.check_decode_capacity", "self num_tokens tree_cache requests spec_algorithm"
    )
    probe.parameters(f"{_BASE}.create_prefill_budget", "self tree_cache num_mixed_decode_tokens")
    probe.users(_BUDGET, "_available_and_evictable", "remaining_total remaining_current")
    probe.mentions(f"{_BUDGET}.reserve", "current_offset total_offset")
    probe.mentions(
        "sglang.srt.managers.schedule_policy:PrefillAdder.add_chunked_req",
        "available_chunk_tokens fit_chunk",
    )
    probe.parameters(
        "sglang.srt.managers.schedule_batch:retract_all",
        "reqs req_to_token_pool token_to_kv_pool_allocator tree_cache hisparse_coordinator "
        "offload_kv",
    )
    probe.parameters(f"{_SCHEDULER}._add_request_to_queue", "self req is_retracted")
