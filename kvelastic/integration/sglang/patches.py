"""The hooks that kvelastic sets in SGLang, and their probes.

SGLang's own hooks (`HookRegistry`) log errors and continue, so kvelastic wraps functions instead.
Before that it probes every function that a wrapper replaces, calls or relies on.
"""

from __future__ import annotations

import functools
from typing import Final

from kvelastic.integration.hooks import table
from kvelastic.integration.hooks.probe import Probe, require
from kvelastic.integration.hooks.table import Hook
from kvelastic.integration.hooks.versions import installed_version
from kvelastic.integration.sglang import in_arguments, in_scheduler
from kvelastic.integration.sglang.refusals import COVERED, ends_process

_PAGE: Final = "docs/sglang.md"

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
    rooms = {
        ARGUMENTS: functools.partial(require, engine, _OF_ARGUMENTS, page=_PAGE),
        PLATFORM: functools.partial(require, engine, _OF_PLATFORM, page=_PAGE),
        REGISTRY: functools.partial(require, engine, _OF_REGISTRY, page=_PAGE),
        SCHEDULER: functools.partial(_probe_scheduler, engine),
    }
    table.arm(
        engine, hooks_for(series), {room: ends_process(probe) for room, probe in rooms.items()}
    )


def _probe_scheduler(engine: str) -> None:
    probe = Probe(engine, page=_PAGE)
    probe.check(_OF_SCHEDULER)
    retract = probe.get(f"{_BATCH}.retract_decode")
    probe.holds(
        f"{_BATCH}.retract_decode",
        in_scheduler.reports_no_room_for_the_last(retract),
        f"a message that begins {in_scheduler.NO_ROOM_FOR_THE_LAST!r}",
        "none",
    )
    tag = probe.get("sglang.srt.constants:GPU_MEMORY_TYPE_KV_CACHE")
    probe.holds("GPU_MEMORY_TYPE_KV_CACHE", tag == in_scheduler.KV_CACHE_TAG, "'kv_cache'", tag)
    probe.refuse_if_broken()


_OF_ARGUMENTS: Final = f"""
{_ARGUMENTS}.resolve_once(self) uses _resolution_finished
sglang.srt.arg_groups.overrides:resolving_view(server_args)
{_ARGUMENTS}.page_size
""" + "".join(f"{_ARGUMENTS}.{each.field}\n" for each in COVERED)
_OF_PLATFORM: Final = f"""
{_PLATFORM}.get_kv_pool_cls(self kind)
{_PLATFORM}.get_paged_allocator_cls(self)
"""
_OF_REGISTRY: Final = f"""
{REGISTRY}:create_unified_radix_cache(ctx cache_class)
sglang.srt.mem_cache.unified_cache.tree_core_registry:_rust_fallback_reason uses
    component_registry_override
{_TREE}.__init__ uses component_registry_override tree_core disable
{_TREE}.checkpoint uses checkpoint_into_tree
{_TREE}.match_prefix(self params)
{_TREE}._apply_eviction_result uses device_frees
{_FULL}.acquire_component_lock(self node result lock_host)
{_FULL}.release_component_lock(self node params lock_host)
{_FULL}.redistribute_on_node_split(self new_parent child)
{_FULL}.evict_component(self node device_frees host_frees cache_actions target)
{_CORE}._split_node(self key child split_len)
{_CORE}.evict_device_leaf(self node_id is_write_back)
"""
_OF_SCHEDULER: Final = f"""
{_SCHEDULER}.ingest_requests(self)
{_SCHEDULER}.event_loop_normal uses ingest_requests get_next_batch_to_run
{_SCHEDULER}.event_loop_overlap uses ingest_requests get_next_batch_to_run
{_SCHEDULER}.get_next_batch_to_run(self running_batch last_batch)
{_SCHEDULER}.is_fully_idle uses running_batch is_empty grammar_queue
{_SCHEDULER}.flush_cache uses tree_cache token_to_kv_pool_allocator clear
{_SCHEDULER}.update_running_batch uses retract_decode send_abort_output
{_BATCH}.retract_decode(self) uses check_decode_mem to_finish release_req
{_BATCH}.check_decode_mem uses check_decode_capacity reqs
{_BATCH}.release_req(self idx remaing_req_count offload_kv)
{_BATCH}.filter_batch(self reqs_to_exclude keep_indices)
{_OBSERVER}._get_token_info(self)
{_CHECKER}._check_full_pool(self ps uncached) uses max_total_num_tokens full_available_size
{_UPDATER}.release_memory_occupation(self recv_req) uses flush_cache is_fully_idle _engine_paused
{_SCHEDULER}.send_control_output(self output recv_req)
{_UPDATER}.resume_memory_occupation(self recv_req) uses offload_tags tags
{_POOL}._create_buffers uses _create_buffers_normal _build_kv_buffer_descs is_quantized_kv_cache
{_POOL}._build_kv_buffer_descs uses size page_size k_buffer
# Methods that use the list of free pages are replaced, or receive exactly the pages they take.
{_ALLOCATOR} uses free_pages only in available_size get_all_free_pages merge_and_sort_free alloc
    alloc_extend alloc_decode _release_page_ids clear
{_BASE} uses free_pages only in __init__ available_size get_all_free_pages merge_and_sort_free
{_ALLOCATOR}.alloc_extend(self prefix_lens prefix_lens_cpu seq_lens seq_lens_cpu last_loc
    extend_num_tokens num_new_pages)
{_ALLOCATOR}.alloc_decode(self seq_lens seq_lens_cpu last_loc)
{_BASE}.evict_to_free_tokens(self tree_cache num_tokens)
{_BASE}.check_decode_capacity(self num_tokens tree_cache requests spec_algorithm)
{_BASE}.create_prefill_budget(self tree_cache num_mixed_decode_tokens)
{_BUDGET} uses _available_and_evictable only in remaining_total remaining_current
{_BUDGET}.reserve uses current_offset total_offset
sglang.srt.managers.schedule_policy:PrefillAdder.add_chunked_req uses available_chunk_tokens
    fit_chunk
sglang.srt.managers.schedule_batch:retract_all(reqs req_to_token_pool token_to_kv_pool_allocator
    tree_cache hisparse_coordinator offload_kv)
{_SCHEDULER}._add_request_to_queue(self req is_retracted)
"""
