"""What kvelastic hooks into vLLM 0.32 and 0.33, and what must hold there.

vLLM has no hook of its own for most of it, so functions are wrapped; each wrapper calls the
original with the arguments it was given. Every function that a wrapper replaces, calls or relies on
is probed before any is set.
"""

from __future__ import annotations

import functools
from typing import Final

from kvelastic.hooks import table
from kvelastic.hooks.probe import Probe
from kvelastic.hooks.table import Hook
from kvelastic.integration.vllm import (
    in_engine_core,
    in_front_end,
    in_gpu_worker,
    in_offloading,
    in_worker,
    tier_connector,
    tier_hooks,
)
from kvelastic.integration.vllm.versions import installed_version

FRONT_END: Final = "vllm.v1.engine.utils"
"""The process that started the engine core: the API server, or the user's program."""
ENGINE_CORE: Final = "vllm.v1.engine.core"
"""The scheduler's process."""
WORKER: Final = "vllm.v1.worker.gpu_worker"
"""Every worker's process, whatever its device."""
CPU_WORKER: Final = "vllm.v1.worker.cpu_worker"
"""A worker's process on the CPU."""
ARGUMENTS: Final = "vllm.engine.arg_utils"
"""The process that reads vLLM's arguments: the API server, or the user's program."""
OFFLOADING: Final = "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector"
"""The engine core and the workers, where that connector is configured."""


_PAGE: Final = "docs/vllm.md"
_CORE: Final = "vllm.v1.engine.core"
_CLIENT: Final = "vllm.v1.engine.utils"
_EXECUTOR: Final = "vllm.v1.executor.abstract:Executor"
_COORDINATOR: Final = "vllm.v1.core.kv_cache_coordinator"
_SCHEDULER: Final = "vllm.v1.core.sched.scheduler"
_POOL: Final = "vllm.v1.core.block_pool:BlockPool"
_CONFIG: Final = "vllm.v1.kv_cache_interface:KVCacheConfig"
_WORKER: Final = "vllm.v1.worker.gpu_worker:Worker"
_BLOCK_TABLE: Final = "vllm.v1.worker.block_table:BlockTable"
_BLOCK_TABLES: Final = "vllm.v1.worker.gpu.block_table:BlockTables"
_CPU_WORKER: Final = "vllm.v1.worker.cpu_worker"
_OFFLOADING: Final = "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector"
_OFFLOADS: Final = (
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler:OffloadingConnectorScheduler"
)
_ARGUMENTS: Final = "vllm.engine.arg_utils:EngineArgs.create_engine_config"
_CONNECTOR_CONFIG: Final = "vllm.config.kv_transfer:KVTransferConfig"
_OFFLOAD_BASE: Final = "vllm.v1.kv_offload.base"
_NODE_INFO: Final = "vllm.utils.cpu_resource_utils"

# The two differ in the block pool alone. That of 0.33 takes more arguments, which the elastic pool
# passes on, and leaves null blocks out of every count, as the elastic pool does for both.
_FURTHER_POOL_ARGUMENTS: Final[dict[str, tuple[str, ...]]] = {
    "0.32": (),
    "0.33": ("num_hash_lookahead_tokens", "medium"),
}
_NEEDED_BY_POOL: Final[dict[str, tuple[str, ...]]] = {
    "0.32": (),
    "0.33": ("vllm.v1.core.kv_cache_utils:trim_null_head",),  # skips null blocks
}

HOOKS: Final = (
    Hook(
        FRONT_END,
        f"{_CLIENT}:shutdown",
        in_front_end.shutdown_engine_cores,
        "remove what a killed engine core left",
    ),
    # EngineCore.__init__ runs already when vLLM loads its plugins there: too late to be wrapped.
    Hook(
        ENGINE_CORE,
        f"{_EXECUTOR}.__init__",
        in_engine_core.executor_init,
        "refuse what is not covered, before anything is loaded",
    ),
    Hook(
        ENGINE_CORE,
        f"{_EXECUTOR}.initialize_from_config",
        in_engine_core.executor_initialize,
        "make the instance; give the workers the paged layout",
    ),
    Hook(
        ENGINE_CORE,
        f"{_EXECUTOR}.compile_or_warm_up_model",
        in_engine_core.executor_warm_up,
        "say what the workers hold besides; the keeper begins",
    ),
    Hook(
        ENGINE_CORE,
        f"{_EXECUTOR}.sleep",
        in_engine_core.executor_sleep,
        "give the KV cache back",
    ),
    Hook(
        ENGINE_CORE,
        f"{_EXECUTOR}.wake_up",
        in_engine_core.executor_wake_up,
        "hand out blocks again",
    ),
    Hook(
        ENGINE_CORE,
        f"{_EXECUTOR}.discard",
        in_engine_core.executor_discard,
        "give the KV cache back alone",
    ),
    Hook(
        ENGINE_CORE,
        f"{_CORE}:EngineCore.shutdown",
        in_engine_core.engine_core_shutdown,
        "close the instance",
    ),
    Hook(
        ENGINE_CORE,
        f"{_CORE}:EngineCore.step",
        in_engine_core.step,
        "no spinning while nothing can run for want of memory",
    ),
    Hook(
        ENGINE_CORE,
        f"{_CORE}:EngineCore.step_with_batch_queue",
        in_engine_core.step_with_batch_queue,
        "the same, with several steps on their way",
    ),
    Hook(
        ENGINE_CORE,
        f"{_COORDINATOR}:BlockPool",
        in_engine_core.make_block_pool,
        "the elastic block pool",
    ),
    Hook(
        ENGINE_CORE,
        f"{_COORDINATOR}:KVCacheCoordinator.get_num_blocks_to_allocate",
        in_engine_core.make_blocks_needed,
        "have memory mapped before vLLM checks what is free",
        is_made=True,
    ),
    Hook(
        ENGINE_CORE,
        f"{_SCHEDULER}:Scheduler.schedule",
        in_engine_core.schedule,
        "one session of the pool; a step begins",
    ),
    Hook(
        ENGINE_CORE,
        f"{_SCHEDULER}:Scheduler.update_from_output",
        in_engine_core.update_from_output,
        "a step has ended: what was pinned for it is free",
    ),
    Hook(
        WORKER,
        f"{_WORKER}.initialize_from_config",
        in_worker.initialize_from_config,
        "answer the one KV allocation with the arena",
    ),
    Hook(WORKER, f"{_WORKER}.shutdown", in_worker.shutdown, "detach"),
    Hook(
        WORKER,
        f"{_WORKER}.{in_engine_core.DEVICE_FACTS}",
        in_worker.device_facts,
        "say on which device the worker computes",
        is_new=True,
    ),
    Hook(
        WORKER,
        f"{_WORKER}.{in_engine_core.HAND_OVER}",
        in_gpu_worker.hand_over_reserve,
        "say what the instance is to reserve for it",
        is_new=True,
    ),
    Hook(
        WORKER,
        "torch.accelerator:get_memory_info",
        in_gpu_worker.memory_info,
        "while vLLM measures: free is what this process leaves, whatever neighbours hold",
    ),
    Hook(WORKER, f"{_WORKER}.init_device", in_gpu_worker.measures, "vLLM measures: at start"),
    Hook(
        WORKER,
        f"{_WORKER}.load_model",
        in_gpu_worker.load_model,
        "have the others make room for the weights",
    ),
    Hook(
        WORKER,
        f"{_WORKER}.determine_available_memory",
        in_gpu_worker.measures,
        "vLLM measures: what it needs",
    ),
    Hook(WORKER, f"{_WORKER}.sleep", in_gpu_worker.measures, "vLLM measures: what sleep frees"),
    Hook(
        WORKER,
        f"{_WORKER}.compile_or_warm_up_model",
        in_gpu_worker.compile_or_warm_up_model,
        "warm up over the null block",
    ),
    Hook(
        WORKER,
        f"{_BLOCK_TABLES}.gather_block_tables",
        in_gpu_worker.gather_block_tables,
        "no ids behind a row's own",
    ),
    Hook(WORKER, f"{_BLOCK_TABLE}.add_row", in_gpu_worker.add_row, "the same (V1)"),
    Hook(WORKER, f"{_BLOCK_TABLE}.move_row", in_gpu_worker.move_row, "the same (V1)"),
    Hook(
        CPU_WORKER,
        f"{_CPU_WORKER}:CPUWorker.sleep",
        in_worker.cpu_sleep,
        "say what is freed",
    ),
    Hook(
        CPU_WORKER,
        f"{_CPU_WORKER}:CPUWorker.wake_up",
        in_worker.cpu_wake_up,
        "the other half of it",
    ),
    Hook(
        CPU_WORKER,
        f"{_CPU_WORKER}:get_memory_node_info",
        in_worker.memory_node_info,
        "a capacity that is not cut down by what is free at start",
    ),
    Hook(
        OFFLOADING,
        f"{_OFFLOADING}:OffloadingConnector.bind_gpu_block_pool",
        in_offloading.bind_gpu_block_pool,
        "know the pool",
    ),
    Hook(
        OFFLOADING,
        f"{_OFFLOADING}:build_offloading_config",
        in_offloading.build_config,
        "the bytes of a block, where ids are sparse",
    ),
    Hook(
        OFFLOADING,
        f"{_OFFLOADS}.request_finished",
        in_offloading.request_finished,
        "pin the blocks of a request that ends",
    ),
    Hook(
        OFFLOADING,
        f"{_OFFLOADS}.build_connector_meta",
        in_offloading.build_connector_meta,
        "pin what a job reads",
    ),
    Hook(
        OFFLOADING,
        f"{_OFFLOADS}.update_connector_output",
        in_offloading.update_connector_output,
        "unpin what no job reads any more",
    ),
    Hook(
        OFFLOADING,
        f"{_OFFLOADS}.reset_cache",
        in_offloading.reset_cache,
        "unpin everything",
    ),
)
"""Everything that is wrapped. The front end imports no engine core, and so on: each process sets
the hooks of its own room."""


TIER_HOOKS: Final = (
    Hook(
        ARGUMENTS,
        _ARGUMENTS,
        tier_connector.create_engine_config,
        "fill in the connector that brings blocks back from tiers",
    ),
    Hook(
        ENGINE_CORE,
        f"{_SCHEDULER}:Scheduler.reset_prefix_cache",
        tier_hooks.reset_prefix_cache,
        "demote before a sleep; else nothing in the tiers is found any more",
    ),
    Hook(
        ENGINE_CORE,
        f"{_CORE}:EngineCore._reset_caches",
        tier_hooks.reset_caches,
        "know a sleep's reset from others",
    ),
    Hook(
        ENGINE_CORE,
        f"{_CORE}:EngineCore.sleep",
        tier_hooks.sleep,
        "know a sleep's reset from others",
    ),
    Hook(
        ENGINE_CORE,
        f"{_CORE}:EngineCore.release_kv_cache_memory",
        tier_hooks.release_kv_cache_memory,
        "the same for a sleep of the KV cache alone",
    ),
    Hook(
        ENGINE_CORE,
        f"{_CORE}:EngineCore.collective_rpc",
        tier_hooks.collective_rpc,
        "weights that change in place",
    ),
)
"""Wrapped besides, where `KVELASTIC_TIERS` is set."""


def hooks_for(_series: str) -> tuple[Hook, ...]:
    """What is wrapped in vLLM of that series, without tiers: the same in all of them."""
    return HOOKS


def arm(series: str, *, tiers: bool = False) -> None:
    """Patch vLLM's modules as they are imported, as that series; again does nothing."""
    engine = f"vLLM {installed_version()}"
    table.arm(
        engine,
        HOOKS + TIER_HOOKS if tiers else HOOKS,
        {
            ARGUMENTS: functools.partial(_probe_arguments, engine),
            FRONT_END: functools.partial(_probe_front_end, engine),
            ENGINE_CORE: functools.partial(_probe_engine_core, engine, series, tiers),
            WORKER: functools.partial(_probe_worker, engine),
            CPU_WORKER: functools.partial(_probe_cpu_worker, engine),
            OFFLOADING: functools.partial(_probe_offloading, engine),
        },
    )


def _probe_front_end(engine: str) -> None:
    probe = Probe(engine, page=_PAGE)
    probe.parameters(f"{_CLIENT}:shutdown", ("procs", "timeout"))
    probe.mentions(f"{_CLIENT}:CoreEngineProcManager.__init__", ("shutdown",))
    probe.refuse_if_broken()


def _probe_arguments(engine: str) -> None:
    probe = Probe(engine, page=_PAGE)
    probe.mentions(_ARGUMENTS, ("kv_transfer_config", "kv_offloading_size"))
    probe.fields(
        _CONNECTOR_CONFIG,
        ("kv_connector", "kv_role", "kv_load_failure_policy", "kv_connector_extra_config"),
    )
    probe.refuse_if_broken()


def _probe_tiers(probe: Probe) -> None:
    """What tiers wrap, call and read besides."""
    probe.parameters(
        f"{_SCHEDULER}:Scheduler.reset_prefix_cache",
        ("self", "reset_running_requests", "reset_connector"),
    )
    probe.mentions(f"{_CORE}:EngineCore._reset_caches", ("reset_prefix_cache",))
    probe.parameters(f"{_CORE}:EngineCore.sleep", ("self", "level", "mode"))
    probe.mentions(f"{_CORE}:EngineCore.sleep", ("pause_scheduler", "sleep"))
    probe.parameters(f"{_CORE}:EngineCore.release_kv_cache_memory", ("self",))
    probe.parameters(f"{_CORE}:EngineCore.collective_rpc", ("self", "method"))
    # What is told of a load that is over, as `update_from_output` tells it.
    probe.parameters(
        f"{_SCHEDULER}:Scheduler._update_from_kv_xfer_finished", ("self", "kv_connector_output")
    )
    probe.mentions(
        f"{_SCHEDULER}:Scheduler._update_from_kv_xfer_finished",
        ("update_connector_output", "finished_recving", "finished_recving_kv_req_ids"),
    )
    probe.mentions(
        f"{_SCHEDULER}:Scheduler._update_waiting_for_remote_kv",
        ("failed_recving_kv_req_ids", "num_computed_tokens", "cache_blocks", "free"),
    )
    probe.mentions(f"{_OFFLOADS}.update_connector_output", ("completed_jobs", "pending_count"))
    probe.mentions(
        f"{_OFFLOADS}.build_connector_meta", ("_current_batch_load_jobs", "on_schedule_end")
    )
    probe.mentions(f"{_OFFLOADS}.__init__", ("_sliding_window_groups", "manager"))
    probe.mentions(f"{_OFFLOADS}.update_state_after_alloc", ("prepare_load", "GPULoadStoreSpec"))
    probe.fields(f"{_OFFLOAD_BASE}:ReqContext", ("req_id", "_offload_key_positions"))


def _probe_engine_core(engine: str, series: str, tiers: bool) -> None:
    probe = Probe(engine, page=_PAGE)
    if tiers:
        _probe_tiers(probe)
    probe.mentions(f"{_CORE}:EngineCore.__init__", ("model_executor", "_initialize_kv_caches"))
    probe.parameters(f"{_CORE}:EngineCore.shutdown", ("self",))
    probe.parameters(f"{_CORE}:EngineCore.step", ("self",))
    probe.mentions(f"{_CORE}:EngineCore.step", ("schedule", "update_from_output"))
    probe.parameters(f"{_CORE}:EngineCore.step_with_batch_queue", ("self",))
    probe.mentions(
        f"{_CORE}:EngineCore.step_with_batch_queue",
        ("schedule", "update_from_output", "batch_queue"),
    )
    probe.mentions(f"{_SCHEDULER}:Scheduler.__init__", ("requests", "finished_req_ids"))
    probe.mentions(
        f"{_CORE}:EngineCore._initialize_kv_caches",
        ("generate_scheduler_kv_cache_config", "initialize_from_config"),
    )
    probe.parameters(f"{_EXECUTOR}.__init__", ("self", "vllm_config"))
    probe.parameters(f"{_EXECUTOR}.initialize_from_config", ("self", "kv_cache_configs"))
    probe.parameters(f"{_EXECUTOR}.compile_or_warm_up_model", ("self",))
    probe.parameters(f"{_EXECUTOR}.collective_rpc", ("self", "method"))
    probe.parameters(f"{_EXECUTOR}.sleep", ("self", "level"))
    probe.parameters(f"{_EXECUTOR}.wake_up", ("self", "tags"))
    probe.parameters(f"{_EXECUTOR}.discard", ("self", "tags"))
    probe.mentions(f"{_EXECUTOR}.wake_up", ("sleeping_tags",))
    probe.mentions("vllm.v1.core.kv_cache_utils:generate_scheduler_kv_cache_config", ("deepcopy",))
    probe.parameters(f"{_SCHEDULER}:Scheduler.schedule", ("self",))
    probe.parameters(
        f"{_SCHEDULER}:Scheduler.update_from_output",
        ("self", "scheduler_output", "model_runner_output"),
    )
    wrapper = "vllm.v1.worker.worker_base:WorkerWrapperBase.initialize_from_config"
    probe.parameters(wrapper, ("self", "kv_cache_configs"))
    probe.mentions(wrapper, ("global_rank",))
    probe.parameters(
        f"{_COORDINATOR}:KVCacheCoordinator.get_num_blocks_to_allocate",
        (
            "self",
            "request_id",
            "num_tokens",
            "new_computed_blocks",
            "num_encoder_tokens",
            "total_computed_tokens",
            "num_local_computed_tokens",
            "num_tokens_main_model",
            "apply_admission_cap",
            "prefill_end",
        ),
    )
    probe.mentions(f"{_COORDINATOR}:KVCacheCoordinator.__init__", ("BlockPool", "num_blocks"))
    probe.mentions(
        "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots",
        ("get_num_blocks_to_allocate", "get_num_free_blocks", "allocate_new_blocks"),
    )
    probe.holds(
        f"{_COORDINATOR}:BlockPool",
        probe.get(f"{_COORDINATOR}:BlockPool") is probe.get(_POOL),
        "the class of block_pool.py",
        probe.get(f"{_COORDINATOR}:BlockPool"),
    )
    _probe_block_pool(probe, series)
    _probe_cache_config(probe)
    probe.refuse_if_broken()


def _probe_block_pool(probe: Probe, series: str) -> None:
    """Everything of `BlockPool` that the elastic pool replaces or relies on."""
    arguments = (
        "self",
        "num_gpu_blocks",
        "enable_caching",
        "hash_block_size",
        "enable_kv_cache_events",
        "metrics_collector",
        *_FURTHER_POOL_ARGUMENTS[series],
    )
    probe.parameters(f"{_POOL}.__init__", arguments)
    probe.parameters(f"{_POOL}.get_new_blocks", ("self", "num_blocks"))
    probe.parameters(f"{_POOL}.touch", ("self", "blocks"))
    probe.parameters(f"{_POOL}.free_blocks", ("self", "ordered_blocks"))
    probe.parameters(f"{_POOL}.unpin_blocks", ("self", "blocks", "on_reuse"))
    probe.parameters(f"{_POOL}.evict_blocks", ("self", "block_ids"))
    probe.parameters(f"{_POOL}.reset_prefix_cache", ("self",))
    probe.parameters(f"{_POOL}.get_num_free_blocks", ("self",))
    probe.parameters(f"{_POOL}.get_usage", ("self",))
    probe.parameters(f"{_POOL}._maybe_evict_cached_block", ("self", "block"))
    probe.parameters(f"{_POOL}.move_block_hashes", ("self", "src_block", "dst_block"))
    probe.parameters(f"{_POOL}._notify_reuse", ("self", "blocks"))
    for name in _NEEDED_BY_POOL[series]:
        probe.get(name)
    # Everything that uses what the elastic pool does not have is replaced by it.
    probe.users(
        _POOL,
        "free_block_queue",
        (
            "__init__",
            "get_new_blocks",
            "touch",
            "free_blocks",
            "unpin_blocks",
            "get_num_free_blocks",
        ),
    )
    probe.users(_POOL, "blocks", ("__init__", "evict_blocks", "reset_prefix_cache"))
    probe.users(_POOL, "num_gpu_blocks", ("__init__", "reset_prefix_cache", "get_usage"))
    probe.fields(
        "vllm.v1.core.kv_cache_utils:KVCacheBlock",
        ("block_id", "ref_cnt", "pool", "_block_hash", "is_null"),
    )


def _probe_cache_config(probe: Probe) -> None:
    probe.fields(_CONFIG, ("num_blocks", "kv_cache_tensors", "kv_cache_groups"))
    probe.fields(
        "vllm.v1.kv_cache_interface:KVCacheTensor",
        ("size", "layers", "layer_stride", "block_stride", "offset", "host_resident"),
    )
    probe.parameters(
        "vllm.v1.kv_cache_interface:create_kv_cache_views",
        ("raw", "spec", "num_blocks", "layout", "kv_cache_tensor", "kernel_block_size"),
    )


def _probe_worker(engine: str) -> None:
    probe = Probe(engine, page=_PAGE)
    probe.parameters(f"{_WORKER}.initialize_from_config", ("self", "kv_cache_config"))
    probe.parameters(f"{_WORKER}.shutdown", ("self",))
    probe.parameters(
        "vllm.v1.worker.utils:allocate_kv_cache", ("kv_cache_config", "device", "layout")
    )
    probe.mentions("vllm.v1.worker.utils:allocate_kv_cache", ("zeros", "int8", "size"))
    _probe_gpu_worker(probe)
    probe.refuse_if_broken()


def _probe_gpu_worker(probe: Probe) -> None:
    """What vLLM measures on a GPU, and how its block tables are filled."""
    probe.parameters(f"{_WORKER}.init_device", ("self",))
    probe.mentions(f"{_WORKER}.init_device", ("MemorySnapshot", "request_memory", "device"))
    probe.parameters(f"{_WORKER}.load_model", ("self",))
    probe.parameters(f"{_WORKER}.determine_available_memory", ("self",))
    probe.mentions(f"{_WORKER}.determine_available_memory", ("memory_profiling",))
    probe.mentions("vllm.utils.mem_utils:MemorySnapshot.measure", ("get_memory_info",))
    probe.parameters(f"{_WORKER}.sleep", ("self", "level"))
    probe.mentions(f"{_WORKER}.sleep", ("get_memory_info",))
    probe.parameters(f"{_WORKER}.compile_or_warm_up_model", ("self",))
    probe.get("torch.accelerator:get_memory_info")
    probe.parameters(
        f"{_BLOCK_TABLES}.gather_block_tables",
        ("self", "idx_mapping", "num_reqs_padded", "out", "out_ptrs"),
    )
    probe.mentions(f"{_BLOCK_TABLES}.gather_block_tables", ("input_block_tables",))
    probe.mentions(f"{_BLOCK_TABLES}.append_block_ids", ("redirect_writes_to_null_block",))
    probe.parameters(f"{_BLOCK_TABLE}.add_row", ("self", "block_ids", "row_idx"))
    probe.parameters(f"{_BLOCK_TABLE}.move_row", ("self", "src", "tgt"))
    probe.parameters(f"{_BLOCK_TABLE}.clear_row", ("self", "row_idx"))
    probe.mentions(f"{_BLOCK_TABLE}.clear_row", ("num_blocks_per_row",))
    probe.get("vllm.utils.torch_utils:current_stream")
    probe.fields("vllm.v1.worker.utils:AttentionGroup", ("backend",))


def _probe_cpu_worker(engine: str) -> None:
    probe = Probe(engine, page=_PAGE)
    probe.parameters(f"{_CPU_WORKER}:CPUWorker.sleep", ("self", "level"))
    probe.parameters(f"{_CPU_WORKER}:CPUWorker.wake_up", ("self", "tags"))
    probe.parameters(f"{_NODE_INFO}:get_memory_node_info", ("node_id",))
    probe.fields(f"{_NODE_INFO}:MemoryNodeInfo", ("total_memory", "available_memory"))
    probe.mentions(f"{_CPU_WORKER}:CPUWorker.determine_available_memory", ("get_memory_node_info",))
    probe.refuse_if_broken()


def _probe_offloading(engine: str) -> None:
    probe = Probe(engine, page=_PAGE)
    bind = f"{_OFFLOADING}:OffloadingConnector.bind_gpu_block_pool"
    probe.parameters(bind, ("self", "gpu_block_pool"))
    probe.mentions(f"{_OFFLOADING}:OffloadingConnector.__init__", ("connector_scheduler",))
    probe.parameters(f"{_OFFLOADING}:build_offloading_config", ("vllm_config", "kv_cache_config"))
    probe.fields("vllm.v1.kv_offload.config:OffloadingConfig", ("worker_kv_bytes_per_block",))
    probe.mentions(f"{_OFFLOADS}.__init__", ("_req_status", "_jobs"))
    probe.parameters(f"{_OFFLOADS}.request_finished", ("self", "request"))
    probe.parameters(f"{_OFFLOADS}.build_connector_meta", ("self", "scheduler_output"))
    common = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.common"
    probe.fields(f"{common}:OffloadingConnectorMetadata", ("load_jobs", "store_jobs"))
    probe.fields(f"{common}:TransferJob", ("req_id", "src_spec", "dst_spec"))
    probe.parameters(f"{_OFFLOADS}.update_connector_output", ("self", "connector_output"))
    probe.parameters(f"{_OFFLOADS}.reset_cache", ("self",))
    state = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler:RequestGroupState"
    probe.fields(state, ("block_ids",))
    probe.refuse_if_broken()
