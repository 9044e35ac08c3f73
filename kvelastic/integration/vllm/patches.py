"""The hooks that kvelastic sets in vLLM 0.32 and 0.33.

vLLM has no extension points for most of this, so functions are wrapped. Each wrapper calls the
original with the arguments it received. Before any hook is set, every function that a wrapper
replaces, calls or relies on is probed (`probes`).
"""

from __future__ import annotations

import functools
from typing import Final

from kvelastic.integration.hooks import table
from kvelastic.integration.hooks.table import Hook
from kvelastic.integration.hooks.versions import installed_version
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
from kvelastic.integration.vllm.wrapped_names import (
    ADAPTER_KEYS,
    ARGUMENTS,
    BLOCK_TABLE,
    BLOCK_TABLES,
    COORDINATOR,
    CORE_CLIENT,
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
        "refuse unsupported settings early; engine cores end with this process",
    ),
    Hook(
        FRONT_END,
        f"{FRONT_END}:shutdown",
        in_front_end.shutdown_engine_cores,
        "remove the remains of a killed engine core",
    ),
    Hook(
        CORE_CLIENT,
        f"{CORE_CLIENT}:AsyncMPClient._call_utility_async",
        in_front_end.call_engine_core,
        "end calls to a killed engine core, so that the server ends too",
    ),
    # vLLM loads its plugins while EngineCore.__init__ already runs: too late to wrap it.
    Hook(
        ENGINE_CORE,
        f"{EXECUTOR}.__init__",
        in_engine_core.executor_init,
        "refuse unsupported settings before anything is loaded",
    ),
    Hook(
        ENGINE_CORE,
        f"{EXECUTOR}.initialize_from_config",
        in_engine_core.executor_initialize,
        "create the instance; give the workers the paged layout",
    ),
    Hook(
        ENGINE_CORE,
        f"{EXECUTOR}.compile_or_warm_up_model",
        in_engine_core.executor_warm_up,
        "reserve what the workers hold besides; start the maintenance thread",
    ),
    Hook(
        ENGINE_CORE,
        f"{EXECUTOR}.sleep",
        in_engine_core.executor_sleep,
        "release the KV cache",
    ),
    Hook(
        ENGINE_CORE,
        f"{EXECUTOR}.wake_up",
        in_engine_core.executor_wake_up,
        "allow block allocation again",
    ),
    Hook(
        ENGINE_CORE,
        f"{EXECUTOR}.discard",
        in_engine_core.executor_discard,
        "release the KV cache alone",
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
        "back off while no request has memory to run",
    ),
    Hook(
        ENGINE_CORE,
        f"{ENGINE_CORE}:EngineCore.step_with_batch_queue",
        in_engine_core.step_with_batch_queue,
        "back off while no request has memory to run (batch queue)",
    ),
    Hook(
        ENGINE_CORE,
        f"{COORDINATOR}:BlockPool",
        in_engine_core.make_block_pool,
        "use the elastic block pool",
    ),
    Hook(
        ENGINE_CORE,
        f"{COORDINATOR}:KVCacheCoordinator.get_num_blocks_to_allocate",
        in_engine_core.make_blocks_needed,
        "map memory before vLLM checks for free blocks",
        is_made=True,
    ),
    Hook(
        ENGINE_CORE,
        f"{SCHEDULER}:Scheduler.schedule",
        in_engine_core.schedule,
        "hold one pool session; begin a step",
    ),
    Hook(
        ENGINE_CORE,
        f"{SCHEDULER}:Scheduler.update_from_output",
        in_engine_core.update_from_output,
        "end a step: release the blocks pinned for it",
    ),
    Hook(
        WORKER,
        f"{WORKER_CLASS}.initialize_from_config",
        in_worker.initialize_from_config,
        "replace the KV cache allocation with the arena",
    ),
    Hook(WORKER, f"{WORKER_CLASS}.shutdown", in_worker.shutdown, "detach from the segment"),
    Hook(
        WORKER,
        "torch.accelerator:get_memory_info",
        in_gpu_worker.memory_info,
        "while vLLM measures, report free memory without neighbours' use",
    ),
    Hook(WORKER, f"{WORKER_CLASS}.init_device", in_gpu_worker.measures, "measure at start"),
    Hook(
        WORKER,
        f"{WORKER_CLASS}.load_model",
        in_gpu_worker.load_model,
        "reclaim memory from others for the weights",
    ),
    Hook(
        WORKER,
        f"{WORKER_CLASS}.determine_available_memory",
        in_gpu_worker.measures,
        "measure what vLLM needs",
    ),
    Hook(WORKER, f"{WORKER_CLASS}.sleep", in_gpu_worker.measures, "measure what a sleep frees"),
    Hook(
        WORKER,
        f"{WORKER_CLASS}.compile_or_warm_up_model",
        in_gpu_worker.compile_or_warm_up_model,
        "warm up on the null block",
    ),
    Hook(
        WORKER,
        f"{BLOCK_TABLES}.gather_block_tables",
        in_gpu_worker.gather_block_tables,
        "clear stale ids behind a row's own",
    ),
    Hook(WORKER, f"{BLOCK_TABLE}.add_row", in_gpu_worker.add_row, "clear stale ids (V1)"),
    Hook(WORKER, f"{BLOCK_TABLE}.move_row", in_gpu_worker.move_row, "clear stale ids (V1)"),
    Hook(
        CPU_WORKER,
        f"{CPU_WORKER}:get_memory_node_info",
        in_worker.memory_node_info,
        "report a capacity that does not depend on free memory at start",
    ),
    Hook(
        OFFLOADING,
        f"{OFFLOADING}:OffloadingConnector.bind_gpu_block_pool",
        in_offloading.bind_gpu_block_pool,
        "connect with the elastic block pool",
    ),
    Hook(
        OFFLOADING,
        f"{OFFLOADING}:build_offloading_config",
        in_offloading.build_config,
        "use the bytes of a block, because ids are sparse",
    ),
    Hook(
        OFFLOADING,
        f"{OFFLOADS}.request_finished",
        in_offloading.request_finished,
        "pin the blocks of a finished request",
    ),
    Hook(
        OFFLOADING,
        f"{OFFLOADS}.build_connector_meta",
        in_offloading.build_connector_meta,
        "pin the blocks that a job reads",
    ),
    Hook(
        OFFLOADING,
        f"{OFFLOADS}.update_connector_output",
        in_offloading.update_connector_output,
        "unpin blocks when their jobs end",
    ),
    Hook(
        OFFLOADING,
        f"{OFFLOADS}.reset_cache",
        in_offloading.reset_cache,
        "unpin everything",
    ),
)
"""All hooks without tiers. Each process imports only its own modules and so sets only its own
hooks."""


TIER_HOOKS: Final = (
    Hook(
        ARGUMENTS,
        ENGINE_CONFIG,
        tier_connector.create_engine_config,
        "configure the connector that loads blocks from tiers",
    ),
    Hook(
        ENGINE_CORE,
        f"{SCHEDULER}:Scheduler.reset_prefix_cache",
        tier_hooks.reset_prefix_cache,
        "demote before a sleep; start a new generation otherwise",
    ),
    Hook(
        ENGINE_CORE,
        f"{ENGINE_CORE}:EngineCore._reset_caches",
        tier_hooks.reset_caches,
        "distinguish a sleep's reset from others",
    ),
    Hook(
        ENGINE_CORE,
        f"{ENGINE_CORE}:EngineCore.sleep",
        tier_hooks.sleep,
        "distinguish a sleep's reset from others",
    ),
    Hook(
        ENGINE_CORE,
        f"{ENGINE_CORE}:EngineCore.release_kv_cache_memory",
        tier_hooks.release_kv_cache_memory,
        "distinguish the reset of a KV cache sleep from others",
    ),
    Hook(
        ENGINE_CORE,
        f"{ENGINE_CORE}:EngineCore.collective_rpc",
        tier_hooks.collective_rpc,
        "detect weights that change in place",
    ),
    Hook(
        ENGINE_CORE,
        ADAPTER_KEYS,
        tier_adapters.adapter_keys,
        "add an adapter's contents to the names of its blocks",
    ),
    Hook(
        ENGINE_CORE,
        f"{ENGINE_CORE}:EngineCore.add_lora",
        tier_adapters.add_lora,
        "detect an adapter whose contents change in place",
    ),
    Hook(
        ENGINE_CORE,
        f"{ENGINE_CORE}:EngineCore.remove_lora",
        tier_adapters.remove_lora,
        "forget an adapter: another one may get its number",
    ),
)
"""Further hooks if `KVELASTIC_TIERS` is set."""


def hooks_for(_series: str) -> tuple[Hook, ...]:
    """Return the hooks for that vLLM series without tiers; all series have the same."""
    return HOOKS


def arm(series: str, *, tiers: bool = False) -> None:
    """Patch that series' vLLM modules as they are imported. Idempotent."""
    engine = f"vLLM {installed_version('vllm')}"
    table.arm(
        engine,
        HOOKS + TIER_HOOKS if tiers else HOOKS,
        {
            ARGUMENTS: functools.partial(probes.arguments, engine),
            FRONT_END: functools.partial(probes.front_end, engine),
            CORE_CLIENT: functools.partial(probes.core_client, engine),
            ENGINE_CORE: functools.partial(probes.engine_core, engine, series, tiers),
            WORKER: functools.partial(probes.worker, engine),
            CPU_WORKER: functools.partial(probes.cpu_worker, engine),
            OFFLOADING: functools.partial(probes.offloading, engine),
        },
    )
