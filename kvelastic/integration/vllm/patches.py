"""What kvelastic hooks into vLLM 0.32 and 0.33.

vLLM has no hook of its own for most of it, so functions are wrapped; each wrapper calls the
original with the arguments it was given. Every function that a wrapper replaces, calls or relies on
is probed (`probes`) before any is set.
"""

from __future__ import annotations

import functools
from typing import Final

from kvelastic.hooks import table
from kvelastic.hooks.table import Hook
from kvelastic.hooks.versions import installed_version
from kvelastic.integration.vllm import (
    in_engine_core,
    in_front_end,
    in_gpu_worker,
    in_offloading,
    in_worker,
    probes,
    tier_adapters,
    tier_connector,
    tier_hooks,
)
from kvelastic.integration.vllm.targets import (
    ADAPTER_KEYS,
    ARGUMENTS,
    BLOCK_TABLE,
    BLOCK_TABLES,
    COORDINATOR,
    CPU_WORKER,
    ENGINE_CONFIG,
    ENGINE_CORE,
    EXECUTOR,
    FRONT_END,
    OFFLOADING,
    OFFLOADS,
    SCHEDULER,
    WORKER,
    WORKER_CLASS,
)

HOOKS: Final = (
    Hook(
        FRONT_END,
        f"{FRONT_END}:CoreEngineProcManager.__init__",
        in_front_end.start_engine_cores,
        "refuse early what cannot work; engine cores end with this process",
    ),
    Hook(
        FRONT_END,
        f"{FRONT_END}:shutdown",
        in_front_end.shutdown_engine_cores,
        "remove what a killed engine core left",
    ),
    # EngineCore.__init__ runs already when vLLM loads its plugins there: too late to be wrapped.
    Hook(
        ENGINE_CORE,
        f"{EXECUTOR}.__init__",
        in_engine_core.executor_init,
        "refuse unsupported features before anything is loaded",
    ),
    Hook(
        ENGINE_CORE,
        f"{EXECUTOR}.initialize_from_config",
        in_engine_core.executor_initialize,
        "make the instance; give the workers the paged layout",
    ),
    Hook(
        ENGINE_CORE,
        f"{EXECUTOR}.compile_or_warm_up_model",
        in_engine_core.executor_warm_up,
        "say what the workers hold besides; the keeper begins",
    ),
    Hook(
        ENGINE_CORE,
        f"{EXECUTOR}.sleep",
        in_engine_core.executor_sleep,
        "give the KV cache back",
    ),
    Hook(
        ENGINE_CORE,
        f"{EXECUTOR}.wake_up",
        in_engine_core.executor_wake_up,
        "hand out blocks again",
    ),
    Hook(
        ENGINE_CORE,
        f"{EXECUTOR}.discard",
        in_engine_core.executor_discard,
        "give the KV cache back alone",
    ),
    Hook(
        ENGINE_CORE,
        f"{ENGINE_CORE}:EngineCore.shutdown",
        in_engine_core.engine_core_shutdown,
        "close the instance",
    ),
    Hook(
        ENGINE_CORE,
        f"{ENGINE_CORE}:EngineCore.step",
        in_engine_core.step,
        "no spinning while nothing can run for want of memory",
    ),
    Hook(
        ENGINE_CORE,
        f"{ENGINE_CORE}:EngineCore.step_with_batch_queue",
        in_engine_core.step_with_batch_queue,
        "the same, with several steps on their way",
    ),
    Hook(
        ENGINE_CORE,
        f"{COORDINATOR}:BlockPool",
        in_engine_core.make_block_pool,
        "the elastic block pool",
    ),
    Hook(
        ENGINE_CORE,
        f"{COORDINATOR}:KVCacheCoordinator.get_num_blocks_to_allocate",
        in_engine_core.make_blocks_needed,
        "map memory before vLLM checks free blocks",
        is_made=True,
    ),
    Hook(
        ENGINE_CORE,
        f"{SCHEDULER}:Scheduler.schedule",
        in_engine_core.schedule,
        "one session of the pool; a step begins",
    ),
    Hook(
        ENGINE_CORE,
        f"{SCHEDULER}:Scheduler.update_from_output",
        in_engine_core.update_from_output,
        "end the pins of a finished step",
    ),
    Hook(
        WORKER,
        f"{WORKER_CLASS}.initialize_from_config",
        in_worker.initialize_from_config,
        "replace the one KV allocation by the arena",
    ),
    Hook(WORKER, f"{WORKER_CLASS}.shutdown", in_worker.shutdown, "detach"),
    Hook(
        WORKER,
        f"{WORKER_CLASS}.{in_engine_core.DEVICE_FACTS}",
        in_worker.device_facts,
        "say on which device the worker computes",
        is_new=True,
    ),
    Hook(
        WORKER,
        f"{WORKER_CLASS}.{in_engine_core.HAND_OVER}",
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
    Hook(WORKER, f"{WORKER_CLASS}.init_device", in_gpu_worker.measures, "vLLM measures: at start"),
    Hook(
        WORKER,
        f"{WORKER_CLASS}.load_model",
        in_gpu_worker.load_model,
        "have the others make room for the weights",
    ),
    Hook(
        WORKER,
        f"{WORKER_CLASS}.determine_available_memory",
        in_gpu_worker.measures,
        "vLLM measures: what it needs",
    ),
    Hook(
        WORKER, f"{WORKER_CLASS}.sleep", in_gpu_worker.measures, "vLLM measures: what sleep frees"
    ),
    Hook(
        WORKER,
        f"{WORKER_CLASS}.compile_or_warm_up_model",
        in_gpu_worker.compile_or_warm_up_model,
        "warm up over the null block",
    ),
    Hook(
        WORKER,
        f"{BLOCK_TABLES}.gather_block_tables",
        in_gpu_worker.gather_block_tables,
        "no ids behind a row's own",
    ),
    Hook(WORKER, f"{BLOCK_TABLE}.add_row", in_gpu_worker.add_row, "the same (V1)"),
    Hook(WORKER, f"{BLOCK_TABLE}.move_row", in_gpu_worker.move_row, "the same (V1)"),
    Hook(
        CPU_WORKER,
        f"{CPU_WORKER}:CPUWorker.sleep",
        in_worker.cpu_sleep,
        "say what is freed",
    ),
    Hook(
        CPU_WORKER,
        f"{CPU_WORKER}:CPUWorker.wake_up",
        in_worker.cpu_wake_up,
        "the other half of it",
    ),
    Hook(
        CPU_WORKER,
        f"{CPU_WORKER}:get_memory_node_info",
        in_worker.memory_node_info,
        "a capacity independent of free memory at the start",
    ),
    Hook(
        OFFLOADING,
        f"{OFFLOADING}:OffloadingConnector.bind_gpu_block_pool",
        in_offloading.bind_gpu_block_pool,
        "know the pool",
    ),
    Hook(
        OFFLOADING,
        f"{OFFLOADING}:build_offloading_config",
        in_offloading.build_config,
        "the bytes of a block, where ids are sparse",
    ),
    Hook(
        OFFLOADING,
        f"{OFFLOADS}.request_finished",
        in_offloading.request_finished,
        "pin the blocks of a request that ends",
    ),
    Hook(
        OFFLOADING,
        f"{OFFLOADS}.build_connector_meta",
        in_offloading.build_connector_meta,
        "pin what a job reads",
    ),
    Hook(
        OFFLOADING,
        f"{OFFLOADS}.update_connector_output",
        in_offloading.update_connector_output,
        "unpin what no job reads any more",
    ),
    Hook(
        OFFLOADING,
        f"{OFFLOADS}.reset_cache",
        in_offloading.reset_cache,
        "unpin everything",
    ),
)
"""Everything that is wrapped. The front end imports no engine core, and so on: each process sets
the hooks of its own room."""


TIER_HOOKS: Final = (
    Hook(
        ARGUMENTS,
        ENGINE_CONFIG,
        tier_connector.create_engine_config,
        "fill in the connector that brings blocks back from tiers",
    ),
    Hook(
        ENGINE_CORE,
        f"{SCHEDULER}:Scheduler.reset_prefix_cache",
        tier_hooks.reset_prefix_cache,
        "demote before a sleep, or forget the tiers' contents",
    ),
    Hook(
        ENGINE_CORE,
        f"{ENGINE_CORE}:EngineCore._reset_caches",
        tier_hooks.reset_caches,
        "know a sleep's reset from others",
    ),
    Hook(
        ENGINE_CORE,
        f"{ENGINE_CORE}:EngineCore.sleep",
        tier_hooks.sleep,
        "know a sleep's reset from others",
    ),
    Hook(
        ENGINE_CORE,
        f"{ENGINE_CORE}:EngineCore.release_kv_cache_memory",
        tier_hooks.release_kv_cache_memory,
        "the same for a sleep of the KV cache alone",
    ),
    Hook(
        ENGINE_CORE,
        f"{ENGINE_CORE}:EngineCore.collective_rpc",
        tier_hooks.collective_rpc,
        "weights that change in place",
    ),
    Hook(
        ENGINE_CORE,
        ADAPTER_KEYS,
        tier_adapters.adapter_keys,
        "an adapter's contents are a part of its blocks' names",
    ),
    Hook(
        ENGINE_CORE,
        f"{ENGINE_CORE}:EngineCore.add_lora",
        tier_adapters.add_lora,
        "an adapter's contents may change in place",
    ),
    Hook(
        ENGINE_CORE,
        f"{ENGINE_CORE}:EngineCore.remove_lora",
        tier_adapters.remove_lora,
        "another adapter may come under its number",
    ),
)
"""Wrapped besides, where `KVELASTIC_TIERS` is set."""


def hooks_for(_series: str) -> tuple[Hook, ...]:
    """What is wrapped in vLLM of that series, without tiers: the same in all of them."""
    return HOOKS


def arm(series: str, *, tiers: bool = False) -> None:
    """Patch vLLM's modules as they are imported, as that series; again does nothing."""
    engine = f"vLLM {installed_version('vllm')}"
    table.arm(
        engine,
        HOOKS + TIER_HOOKS if tiers else HOOKS,
        {
            ARGUMENTS: functools.partial(probes.arguments, engine),
            FRONT_END: functools.partial(probes.front_end, engine),
            ENGINE_CORE: functools.partial(probes.engine_core, engine, series, tiers),
            WORKER: functools.partial(probes.worker, engine),
            CPU_WORKER: functools.partial(probes.cpu_worker, engine),
            OFFLOADING: functools.partial(probes.offloading, engine),
        },
    )
