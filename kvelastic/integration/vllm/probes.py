"""What must hold in vLLM 0.32 and 0.33 before kvelastic changes anything there.

One text of requirements (`hooks.probe`) for each room of `patches`. A vLLM that is built otherwise
is refused and not half patched. The first names are the rooms: a process sets the hooks of the
modules that it imports.
"""

from __future__ import annotations

from typing import Final

PAGE: Final = "docs/vllm.md"

FRONT_END: Final = "vllm.v1.engine.utils"
"""Imported by the process that starts the engine core: the API server or the user's program."""
CORE_CLIENT: Final = "vllm.v1.engine.core_client"
"""Imported by the process that calls the engine core."""
EXECUTORS: Final = "vllm.v1.executor.abstract"
"""Imported by every process that chooses, runs or serves an executor."""
ENGINE_CORE: Final = "vllm.v1.engine.core"
"""Imported by the scheduler's process."""
WORKER: Final = "vllm.v1.worker.gpu_worker"
"""Imported by every worker's process, on any device."""
CPU_WORKER: Final = "vllm.v1.worker.cpu_worker"
"""Imported by a worker's process on the CPU."""
ARGUMENTS: Final = "vllm.engine.arg_utils"
"""Imported by the process that parses vLLM's arguments: the API server or the user's program."""
OFFLOADING: Final = "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector"
"""Imported by the engine core and the workers if that connector is configured."""

ADAPTER_KEYS: Final = "vllm.v1.core.kv_cache_utils:_gen_lora_extra_hash_keys"
EXECUTOR: Final = "vllm.v1.executor.abstract:Executor"
COORDINATOR: Final = "vllm.v1.core.kv_cache_coordinator"
BLOCK_TABLE: Final = "vllm.v1.worker.block_table:BlockTable"
BLOCK_TABLES: Final = "vllm.v1.worker.gpu.block_table:BlockTables"
ENGINE_CONFIG: Final = "vllm.engine.arg_utils:EngineArgs.create_engine_config"

_CORE: Final = f"{ENGINE_CORE}:EngineCore"
_SCHEDULER: Final = "vllm.v1.core.sched.scheduler:Scheduler"
_POOL: Final = "vllm.v1.core.block_pool:BlockPool"
_WORKER: Final = f"{WORKER}:Worker"
_WRAPPER: Final = "vllm.v1.worker.worker_base:WorkerWrapperBase"
_MANAGER: Final = "vllm.v1.core.kv_cache_manager:KVCacheManager"
_LOADING: Final = "vllm.model_executor.model_loader"
_CONNECTOR: Final = f"{OFFLOADING}:OffloadingConnector"
_FACTORY: Final = "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory"
_OFFLOADING: Final = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
_OFFLOADS: Final = f"{_OFFLOADING}.scheduler:OffloadingConnectorScheduler"

_FRONT_END: Final = f"""
{FRONT_END}:shutdown(procs timeout)
{FRONT_END}:CoreEngineProcManager.__init__ takes local_engine_count start_index vllm_config
{FRONT_END}:CoreEngineProcManager.__init__ uses shutdown EngineCoreProc run_engine_core start
"""
_CORE_CLIENT: Final = f"""
{CORE_CLIENT}:AsyncMPClient._call_utility_async(self method args engine) uses
    utility_results create_future
{CORE_CLIENT}:BackgroundResources has engine_dead
{CORE_CLIENT}:MPClient.ensure_alive uses resources engine_dead
"""
_EXECUTORS: Final = f"""
{EXECUTOR}.get_class(vllm_config)
{EXECUTOR}.__init__(self vllm_config)
{EXECUTOR}.initialize_from_config(self kv_cache_configs)
{EXECUTOR}.compile_or_warm_up_model(self)
{EXECUTOR}.collective_rpc(self method)
{EXECUTOR}.sleep(self level)
{EXECUTOR}.wake_up(self tags) uses sleeping_tags
{EXECUTOR}.discard(self tags)
{EXECUTOR}.add_lora(self lora_request)
{EXECUTOR}.remove_lora(self lora_id)
"""
_ARGUMENTS: Final = f"""
{ENGINE_CONFIG} uses kv_transfer_config kv_offloading_size
vllm.config.kv_transfer:KVTransferConfig has
    kv_connector kv_role kv_load_failure_policy kv_connector_extra_config
"""
_TIERS: Final = f"""
{_SCHEDULER}.reset_prefix_cache(self reset_running_requests reset_connector) uses
    _preempt_request running
{_CORE}._reset_caches uses reset_prefix_cache
{_CORE}.sleep(self level mode) uses pause_scheduler sleep
{_CORE}.release_kv_cache_memory(self)
{_CORE}.collective_rpc uses model_executor collective_rpc
{_CORE}.add_lora uses model_executor add_lora
{_CORE}.remove_lora uses model_executor remove_lora
{ADAPTER_KEYS}(request) uses lora_request lora_name lora_path
# Completed loads are reported in the same way as `update_from_output` does.
{_SCHEDULER}._update_from_kv_xfer_finished(self kv_connector_output) uses
    update_connector_output finished_recving finished_recving_kv_req_ids
{_SCHEDULER}._update_waiting_for_remote_kv uses
    failed_recving_kv_req_ids num_computed_tokens cache_blocks free
{_OFFLOADS}.update_connector_output uses completed_jobs pending_count
{_OFFLOADS}.build_connector_meta uses _current_batch_load_jobs on_schedule_end
{_OFFLOADS}.__init__ uses _sliding_window_groups manager
{_OFFLOADS}.update_state_after_alloc uses prepare_load GPULoadStoreSpec
{_OFFLOADING}.scheduler:GroupOffloadConfig.load_window_size_in_chunks(self num_tokens)
{_OFFLOADING}.scheduler:RequestGroupState has offload_keys
vllm.v1.kv_offload.base:ReqContext has req_id _offload_key_positions
"""
_ENGINE_CORE: Final = f"""
{_CORE}.__init__ uses model_executor _initialize_kv_caches get_scheduler_cls
vllm.config.scheduler:SchedulerConfig.get_scheduler_cls uses scheduler_cls resolve_obj_by_qualname
{_CORE}.shutdown(self)
{_CORE}.step(self) uses schedule update_from_output
{_CORE}.step_with_batch_queue(self) uses schedule update_from_output batch_queue
{_CORE}._initialize_kv_caches uses generate_scheduler_kv_cache_config initialize_from_config
vllm.v1.core.kv_cache_utils:generate_scheduler_kv_cache_config uses deepcopy
{_SCHEDULER}.__init__ uses requests finished_req_ids max_model_len
    num_waiting_for_streaming_input
{_SCHEDULER}.schedule(self) uses
    _preempt_request _request_blocks_can_be_freed requires_kv_delivery UNPAUSED
{_SCHEDULER}.has_unfinished_requests(self)
{_SCHEDULER}.get_request_counts(self)
{_SCHEDULER}._preempt_request(self request timestamp drop_stale_output)
{_SCHEDULER}.update_from_output(self scheduler_output model_runner_output)
vllm.v1.request:Request.__init__ uses num_prompt_tokens max_tokens
{_WRAPPER}.initialize_from_config(self kv_cache_configs) uses global_rank
{_WRAPPER}.init_worker uses worker worker_cls resolve_obj_by_qualname
{_MANAGER}.get_block_ids(self request_id)
{_MANAGER}.allocate_slots uses get_num_blocks_to_allocate get_num_free_blocks allocate_new_blocks
{COORDINATOR}:KVCacheCoordinator.get_num_blocks_to_allocate(self request_id num_tokens
    new_computed_blocks num_encoder_tokens total_computed_tokens num_local_computed_tokens
    num_tokens_main_model apply_admission_cap prefill_end)
{COORDINATOR}:KVCacheCoordinator.__init__ uses BlockPool num_blocks
{COORDINATOR}:BlockPool is {_POOL}
# The elastic pool replaces these methods of the pool, or relies on them.
{_POOL}.get_new_blocks(self num_blocks)
{_POOL}.touch(self blocks)
{_POOL}.free_blocks(self ordered_blocks)
{_POOL}.unpin_blocks(self blocks on_reuse)
{_POOL}.evict_blocks(self block_ids)
{_POOL}.reset_prefix_cache(self)
{_POOL}.get_num_free_blocks(self)
{_POOL}.get_usage(self)
{_POOL}._maybe_evict_cached_block(self block)
{_POOL}.move_block_hashes(self src_block dst_block)
# It must replace every method that uses fields it does not have.
{_POOL} uses free_block_queue only in
    __init__ get_new_blocks touch free_blocks unpin_blocks get_num_free_blocks
{_POOL} uses blocks only in __init__ evict_blocks reset_prefix_cache
{_POOL} uses num_gpu_blocks only in __init__ reset_prefix_cache get_usage
vllm.v1.core.kv_cache_utils:KVCacheBlock has block_id ref_cnt pool _block_hash is_null
vllm.v1.kv_cache_interface:KVCacheConfig has num_blocks kv_cache_tensors kv_cache_groups
vllm.v1.kv_cache_interface:KVCacheTensor has
    size layers layer_stride block_stride offset host_resident
vllm.v1.kv_cache_interface:create_kv_cache_views(raw spec num_blocks layout kv_cache_tensor
    kernel_block_size)
"""
# The two series differ in the block pool alone. That of 0.33 takes more arguments, which the
# elastic pool passes on, and leaves null blocks out of every count, as the elastic pool does for
# both.
_POOL_INIT: Final = f"""
{_POOL}.__init__(self num_gpu_blocks enable_caching hash_block_size enable_kv_cache_events
    metrics_collector"""
_POOL_OF: Final = {
    "0.32": f"{_POOL_INIT})\n",
    "0.33": f"""{_POOL_INIT} num_hash_lookahead_tokens medium)
# Skips null blocks.
vllm.v1.core.kv_cache_utils:trim_null_head
""",
}
# On any device: how vLLM measures a GPU, and how it fills block tables.
_WORKERS: Final = f"""
{_WORKER}.initialize_from_config(self kv_cache_config)
{_WORKER}.shutdown(self)
vllm.v1.worker.utils:allocate_kv_cache(kv_cache_config device layout) uses zeros int8 size
{_WORKER}.init_device(self) uses MemorySnapshot request_memory device
{_WORKER}.load_model(self)
{_LOADING}:get_model_loader(load_config)
{_LOADING}.base_loader:BaseModelLoader.get_external_weight_memory(self vllm_config)
{_WORKER}.determine_available_memory(self) uses memory_profiling
vllm.utils.mem_utils:MemorySnapshot.measure uses get_memory_info
{_WORKER}.sleep(self level) uses get_memory_info
{_WORKER}.compile_or_warm_up_model(self)
torch.accelerator:get_memory_info
{BLOCK_TABLES}.gather_block_tables(self idx_mapping num_reqs_padded out out_ptrs) uses
    input_block_tables
{BLOCK_TABLES}.append_block_ids uses redirect_writes_to_null_block
{BLOCK_TABLE}.add_row(self block_ids row_idx)
{BLOCK_TABLE}.move_row(self src tgt)
{BLOCK_TABLE}.clear_row(self row_idx) uses num_blocks_per_row
vllm.utils.torch_utils:current_stream
vllm.v1.worker.utils:AttentionGroup has backend
"""
_CPU_WORKER: Final = f"""
vllm.utils.cpu_resource_utils:get_memory_node_info(node_id)
vllm.utils.cpu_resource_utils:MemoryNodeInfo has total_memory available_memory
{CPU_WORKER}:CPUWorker.determine_available_memory uses get_memory_node_info
"""
_OFFLOADING_CONNECTOR: Final = f"""
{_CONNECTOR}.bind_gpu_block_pool(self gpu_block_pool)
{_CONNECTOR}.__init__ uses connector_scheduler build_offloading_config
{_OFFLOADING}.config:build_offloading_config uses
    kv_cache_tensors size num_blocks OffloadingConfig
{_FACTORY}.get_connector_class uses kv_connector_module_path import_module
{_CONNECTOR}.request_finished(self request block_ids)
{_CONNECTOR}.request_finished_all_groups(self request block_ids)
vllm.v1.kv_offload.config:OffloadingConfig has worker_kv_bytes_per_block
{_OFFLOADS}.__init__ uses _req_status _jobs
{_CONNECTOR}.build_connector_meta(self scheduler_output)
{_OFFLOADING}.common:OffloadingConnectorMetadata has load_jobs store_jobs
{_OFFLOADING}.common:TransferJob has req_id src_spec dst_spec
{_CONNECTOR}.update_connector_output(self connector_output)
{_CONNECTOR}.reset_cache(self)
{_OFFLOADING}.scheduler:RequestGroupState has block_ids
"""


def requirements(series: str, *, tiers: bool) -> dict[str, str]:
    """Return the requirements of each room; `tiers`: also what tiers need."""
    rooms = {
        FRONT_END: _FRONT_END,
        EXECUTORS: _EXECUTORS,
        CORE_CLIENT: _CORE_CLIENT,
        ENGINE_CORE: _ENGINE_CORE + _POOL_OF[series] + (_TIERS if tiers else ""),
        WORKER: _WORKERS,
        CPU_WORKER: _CPU_WORKER,
        OFFLOADING: _OFFLOADING_CONNECTOR,
    }
    return rooms | {ARGUMENTS: _ARGUMENTS} if tiers else rooms
