"""What must hold in vLLM 0.32 and 0.33 before kvelastic changes anything there.

One function for each room of `patches`. Each raises `UnsupportedEngineError` with all that is
missing or other than expected, so a vLLM that was rebuilt is refused and not half patched.
"""

from __future__ import annotations

from typing import Final

from kvelastic.integration.hooks.probe import Probe
from kvelastic.integration.vllm.wrapped_names import (
    ADAPTER_KEYS,
    BLOCK_POOL,
    BLOCK_TABLE,
    BLOCK_TABLES,
    CACHE_CONFIG,
    CONNECTOR_CONFIG,
    COORDINATOR,
    CORE_CLIENT,
    CPU_WORKER,
    ENGINE_CONFIG,
    ENGINE_CORE,
    EXECUTOR,
    FRONT_END,
    NODE_INFO,
    OFFLOAD_BASE,
    OFFLOADING,
    OFFLOADS,
    SCHEDULER,
    WORKER_CLASS,
)

_PAGE: Final = "docs/vllm.md"

# The two differ in the block pool alone. That of 0.33 takes more arguments, which the elastic pool
# passes on, and leaves null blocks out of every count, as the elastic pool does for both.
_FURTHER_POOL_ARGUMENTS: Final = {"0.32": "", "0.33": "num_hash_lookahead_tokens medium"}
_NEEDED_BY_POOL: Final[dict[str, tuple[str, ...]]] = {
    "0.32": (),
    "0.33": ("vllm.v1.core.kv_cache_utils:trim_null_head",),  # skips null blocks
}


def front_end(engine: str) -> None:
    """Probe the process that starts the engine core."""
    probe = Probe(engine, page=_PAGE)
    probe.parameters(f"{FRONT_END}:shutdown", "procs timeout")
    managing = f"{FRONT_END}:CoreEngineProcManager.__init__"
    probe.takes(managing, "local_engine_count start_index vllm_config")
    probe.mentions(managing, "shutdown EngineCoreProc run_engine_core start")
    probe.refuse_if_broken()


def core_client(engine: str) -> None:
    """Probe the process that calls the engine core."""
    probe = Probe(engine, page=_PAGE)
    calling = f"{CORE_CLIENT}:AsyncMPClient._call_utility_async"
    probe.parameters(calling, "self method args engine")
    probe.mentions(calling, "utility_results create_future")
    probe.fields(f"{CORE_CLIENT}:BackgroundResources", "engine_dead")
    probe.mentions(f"{CORE_CLIENT}:MPClient.ensure_alive", "resources engine_dead")
    probe.refuse_if_broken()


def executors(engine: str) -> None:
    """Probe the executor's class; any process may import it."""
    probe = Probe(engine, page=_PAGE)
    probe.parameters(f"{EXECUTOR}.get_class", "vllm_config")
    probe.parameters(f"{EXECUTOR}.__init__", "self vllm_config")
    probe.parameters(f"{EXECUTOR}.initialize_from_config", "self kv_cache_configs")
    probe.parameters(f"{EXECUTOR}.compile_or_warm_up_model", "self")
    probe.parameters(f"{EXECUTOR}.collective_rpc", "self method")
    probe.parameters(f"{EXECUTOR}.sleep", "self level")
    probe.parameters(f"{EXECUTOR}.wake_up", "self tags")
    probe.parameters(f"{EXECUTOR}.discard", "self tags")
    probe.mentions(f"{EXECUTOR}.wake_up", "sleeping_tags")
    probe.parameters(f"{EXECUTOR}.add_lora", "self lora_request")
    probe.parameters(f"{EXECUTOR}.remove_lora", "self lora_id")
    probe.refuse_if_broken()


def arguments(engine: str) -> None:
    """Probe the process that parses arguments; used with tiers only."""
    probe = Probe(engine, page=_PAGE)
    probe.mentions(ENGINE_CONFIG, "kv_transfer_config kv_offloading_size")
    probe.fields(
        CONNECTOR_CONFIG, "kv_connector kv_role kv_load_failure_policy kv_connector_extra_config"
    )
    probe.refuse_if_broken()


def _probe_tiers(probe: Probe) -> None:
    """Probe everything that tiers wrap, call or read in addition."""
    probe.parameters(
        f"{SCHEDULER}:Scheduler.reset_prefix_cache", "self reset_running_requests reset_connector"
    )
    probe.mentions(f"{ENGINE_CORE}:EngineCore._reset_caches", "reset_prefix_cache")
    probe.parameters(f"{ENGINE_CORE}:EngineCore.sleep", "self level mode")
    probe.mentions(f"{ENGINE_CORE}:EngineCore.sleep", "pause_scheduler sleep")
    probe.parameters(f"{ENGINE_CORE}:EngineCore.release_kv_cache_memory", "self")
    for name in ("collective_rpc", "add_lora", "remove_lora"):
        probe.mentions(f"{ENGINE_CORE}:EngineCore.{name}", f"model_executor {name}")
    probe.parameters(ADAPTER_KEYS, "request")
    probe.mentions(ADAPTER_KEYS, "lora_request lora_name lora_path")
    probe.mentions(f"{SCHEDULER}:Scheduler.reset_prefix_cache", "_preempt_request running")
    # Completed loads are reported in the same way as `update_from_output` does.
    probe.parameters(
        f"{SCHEDULER}:Scheduler._update_from_kv_xfer_finished", "self kv_connector_output"
    )
    probe.mentions(
        f"{SCHEDULER}:Scheduler._update_from_kv_xfer_finished",
        "update_connector_output finished_recving finished_recving_kv_req_ids",
    )
    probe.mentions(
        f"{SCHEDULER}:Scheduler._update_waiting_for_remote_kv",
        "failed_recving_kv_req_ids num_computed_tokens cache_blocks free",
    )
    probe.mentions(f"{OFFLOADS}.update_connector_output", "completed_jobs pending_count")
    probe.mentions(f"{OFFLOADS}.build_connector_meta", "_current_batch_load_jobs on_schedule_end")
    probe.mentions(f"{OFFLOADS}.__init__", "_sliding_window_groups manager")
    probe.mentions(f"{OFFLOADS}.update_state_after_alloc", "prepare_load GPULoadStoreSpec")
    offloads = OFFLOADS.partition(":")[0]
    window = f"{offloads}:GroupOffloadConfig.load_window_size_in_chunks"
    probe.parameters(window, "self num_tokens")
    probe.fields(f"{offloads}:RequestGroupState", "offload_keys")
    probe.fields(f"{OFFLOAD_BASE}:ReqContext", "req_id _offload_key_positions")


def engine_core(engine: str, series: str, tiers: bool) -> None:
    """Probe the scheduler's process; `tiers`: also what tiers need."""
    probe = Probe(engine, page=_PAGE)
    if tiers:
        _probe_tiers(probe)
    probe.mentions(
        f"{ENGINE_CORE}:EngineCore.__init__",
        "model_executor _initialize_kv_caches get_scheduler_cls",
    )
    probe.mentions(
        "vllm.config.scheduler:SchedulerConfig.get_scheduler_cls",
        "scheduler_cls resolve_obj_by_qualname",
    )
    probe.parameters(f"{ENGINE_CORE}:EngineCore.shutdown", "self")
    probe.parameters(f"{ENGINE_CORE}:EngineCore.step", "self")
    probe.mentions(f"{ENGINE_CORE}:EngineCore.step", "schedule update_from_output")
    probe.parameters(f"{ENGINE_CORE}:EngineCore.step_with_batch_queue", "self")
    probe.mentions(
        f"{ENGINE_CORE}:EngineCore.step_with_batch_queue", "schedule update_from_output batch_queue"
    )
    probe.mentions(f"{SCHEDULER}:Scheduler.__init__", "requests finished_req_ids max_model_len")
    probe.mentions(
        f"{ENGINE_CORE}:EngineCore._initialize_kv_caches",
        "generate_scheduler_kv_cache_config initialize_from_config",
    )
    probe.mentions("vllm.v1.core.kv_cache_utils:generate_scheduler_kv_cache_config", "deepcopy")
    probe.parameters(f"{SCHEDULER}:Scheduler.schedule", "self")
    probe.parameters(f"{SCHEDULER}:Scheduler.has_unfinished_requests", "self")
    probe.parameters(f"{SCHEDULER}:Scheduler.get_request_counts", "self")
    probe.mentions("vllm.v1.request:Request.__init__", "num_prompt_tokens max_tokens")
    probe.parameters(
        f"{SCHEDULER}:Scheduler._preempt_request", "self request timestamp drop_stale_output"
    )
    probe.mentions(
        f"{SCHEDULER}:Scheduler.schedule",
        "_preempt_request _request_blocks_can_be_freed requires_kv_delivery UNPAUSED",
    )
    probe.parameters(
        "vllm.v1.core.kv_cache_manager:KVCacheManager.get_block_ids", "self request_id"
    )
    probe.parameters(
        f"{SCHEDULER}:Scheduler.update_from_output", "self scheduler_output model_runner_output"
    )
    wrapper = "vllm.v1.worker.worker_base:WorkerWrapperBase.initialize_from_config"
    probe.parameters(wrapper, "self kv_cache_configs")
    probe.mentions(wrapper, "global_rank")
    probe.mentions(
        "vllm.v1.worker.worker_base:WorkerWrapperBase.init_worker",
        "worker worker_cls resolve_obj_by_qualname",
    )
    probe.parameters(
        f"{COORDINATOR}:KVCacheCoordinator.get_num_blocks_to_allocate",
        "self request_id num_tokens new_computed_blocks num_encoder_tokens "
        "total_computed_tokens num_local_computed_tokens num_tokens_main_model "
        "apply_admission_cap prefill_end",
    )
    probe.mentions(f"{COORDINATOR}:KVCacheCoordinator.__init__", "BlockPool num_blocks")
    probe.mentions(
        "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots",
        "get_num_blocks_to_allocate get_num_free_blocks allocate_new_blocks",
    )
    probe.holds(
        f"{COORDINATOR}:BlockPool",
        probe.get(f"{COORDINATOR}:BlockPool") is probe.get(BLOCK_POOL),
        "the class of block_pool.py",
        probe.get(f"{COORDINATOR}:BlockPool"),
    )
    _probe_block_pool(probe, series)
    _probe_cache_config(probe)
    probe.refuse_if_broken()


def _probe_block_pool(probe: Probe, series: str) -> None:
    """Probe everything in `BlockPool` that the elastic pool replaces or relies on."""
    probe.parameters(
        f"{BLOCK_POOL}.__init__",
        "self num_gpu_blocks enable_caching hash_block_size enable_kv_cache_events"
        f" metrics_collector {_FURTHER_POOL_ARGUMENTS[series]}",
    )
    probe.parameters(f"{BLOCK_POOL}.get_new_blocks", "self num_blocks")
    probe.parameters(f"{BLOCK_POOL}.touch", "self blocks")
    probe.parameters(f"{BLOCK_POOL}.free_blocks", "self ordered_blocks")
    probe.parameters(f"{BLOCK_POOL}.unpin_blocks", "self blocks on_reuse")
    probe.parameters(f"{BLOCK_POOL}.evict_blocks", "self block_ids")
    probe.parameters(f"{BLOCK_POOL}.reset_prefix_cache", "self")
    probe.parameters(f"{BLOCK_POOL}.get_num_free_blocks", "self")
    probe.parameters(f"{BLOCK_POOL}.get_usage", "self")
    probe.parameters(f"{BLOCK_POOL}._maybe_evict_cached_block", "self block")
    probe.parameters(f"{BLOCK_POOL}.move_block_hashes", "self src_block dst_block")
    probe.parameters(f"{BLOCK_POOL}._notify_reuse", "self blocks")
    for name in _NEEDED_BY_POOL[series]:
        probe.get(name)
    # The elastic pool must replace every method that uses fields it does not have.
    probe.users(
        BLOCK_POOL,
        "free_block_queue",
        "__init__ get_new_blocks touch free_blocks unpin_blocks get_num_free_blocks",
    )
    probe.users(BLOCK_POOL, "blocks", "__init__ evict_blocks reset_prefix_cache")
    probe.users(BLOCK_POOL, "num_gpu_blocks", "__init__ reset_prefix_cache get_usage")
    probe.fields(
        "vllm.v1.core.kv_cache_utils:KVCacheBlock", "block_id ref_cnt pool _block_hash is_null"
    )


def _probe_cache_config(probe: Probe) -> None:
    probe.fields(CACHE_CONFIG, "num_blocks kv_cache_tensors kv_cache_groups")
    probe.fields(
        "vllm.v1.kv_cache_interface:KVCacheTensor",
        "size layers layer_stride block_stride offset host_resident",
    )
    probe.parameters(
        "vllm.v1.kv_cache_interface:create_kv_cache_views",
        "raw spec num_blocks layout kv_cache_tensor kernel_block_size",
    )


def worker(engine: str) -> None:
    """Probe a worker on any device."""
    probe = Probe(engine, page=_PAGE)
    probe.parameters(f"{WORKER_CLASS}.initialize_from_config", "self kv_cache_config")
    probe.parameters(f"{WORKER_CLASS}.shutdown", "self")
    probe.parameters("vllm.v1.worker.utils:allocate_kv_cache", "kv_cache_config device layout")
    probe.mentions("vllm.v1.worker.utils:allocate_kv_cache", "zeros int8 size")
    _probe_gpu_worker(probe)
    probe.refuse_if_broken()


def _probe_gpu_worker(probe: Probe) -> None:
    """Probe how vLLM measures a GPU, and how it fills block tables."""
    probe.parameters(f"{WORKER_CLASS}.init_device", "self")
    probe.mentions(f"{WORKER_CLASS}.init_device", "MemorySnapshot request_memory device")
    probe.parameters(f"{WORKER_CLASS}.load_model", "self")
    loading = "vllm.model_executor.model_loader"
    probe.parameters(f"{loading}:get_model_loader", "load_config")
    probe.parameters(
        f"{loading}.base_loader:BaseModelLoader.get_external_weight_memory", "self vllm_config"
    )
    probe.parameters(f"{WORKER_CLASS}.determine_available_memory", "self")
    probe.mentions(f"{WORKER_CLASS}.determine_available_memory", "memory_profiling")
    probe.mentions("vllm.utils.mem_utils:MemorySnapshot.measure", "get_memory_info")
    probe.parameters(f"{WORKER_CLASS}.sleep", "self level")
    probe.mentions(f"{WORKER_CLASS}.sleep", "get_memory_info")
    probe.parameters(f"{WORKER_CLASS}.compile_or_warm_up_model", "self")
    probe.get("torch.accelerator:get_memory_info")
    probe.parameters(
        f"{BLOCK_TABLES}.gather_block_tables", "self idx_mapping num_reqs_padded out out_ptrs"
    )
    probe.mentions(f"{BLOCK_TABLES}.gather_block_tables", "input_block_tables")
    probe.mentions(f"{BLOCK_TABLES}.append_block_ids", "redirect_writes_to_null_block")
    probe.parameters(f"{BLOCK_TABLE}.add_row", "self block_ids row_idx")
    probe.parameters(f"{BLOCK_TABLE}.move_row", "self src tgt")
    probe.parameters(f"{BLOCK_TABLE}.clear_row", "self row_idx")
    probe.mentions(f"{BLOCK_TABLE}.clear_row", "num_blocks_per_row")
    probe.get("vllm.utils.torch_utils:current_stream")
    probe.fields("vllm.v1.worker.utils:AttentionGroup", "backend")


def cpu_worker(engine: str) -> None:
    """Probe a worker on the CPU."""
    probe = Probe(engine, page=_PAGE)
    probe.parameters(f"{NODE_INFO}:get_memory_node_info", "node_id")
    probe.fields(f"{NODE_INFO}:MemoryNodeInfo", "total_memory available_memory")
    probe.mentions(f"{CPU_WORKER}:CPUWorker.determine_available_memory", "get_memory_node_info")
    probe.refuse_if_broken()


def offloading(engine: str) -> None:
    """Probe vLLM's OffloadingConnector; used if it is configured."""
    probe = Probe(engine, page=_PAGE)
    bind = f"{OFFLOADING}:OffloadingConnector.bind_gpu_block_pool"
    probe.parameters(bind, "self gpu_block_pool")
    probe.mentions(
        f"{OFFLOADING}:OffloadingConnector.__init__", "connector_scheduler build_offloading_config"
    )
    probe.mentions(
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.config:build_offloading_config",
        "kv_cache_tensors size num_blocks OffloadingConfig",
    )
    probe.mentions(
        "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory.get_connector_class",
        "kv_connector_module_path import_module",
    )
    for name in ("request_finished", "request_finished_all_groups"):
        probe.parameters(f"{OFFLOADING}:OffloadingConnector.{name}", "self request block_ids")
    probe.fields("vllm.v1.kv_offload.config:OffloadingConfig", "worker_kv_bytes_per_block")
    probe.mentions(f"{OFFLOADS}.__init__", "_req_status _jobs")
    probe.parameters(
        f"{OFFLOADING}:OffloadingConnector.build_connector_meta", "self scheduler_output"
    )
    common = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.common"
    probe.fields(f"{common}:OffloadingConnectorMetadata", "load_jobs store_jobs")
    probe.fields(f"{common}:TransferJob", "req_id src_spec dst_spec")
    probe.parameters(
        f"{OFFLOADING}:OffloadingConnector.update_connector_output", "self connector_output"
    )
    probe.parameters(f"{OFFLOADING}:OffloadingConnector.reset_cache", "self")
    state = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler:RequestGroupState"
    probe.fields(state, "block_ids")
    probe.refuse_if_broken()
