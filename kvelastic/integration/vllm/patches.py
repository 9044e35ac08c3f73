"""The hooks that kvelastic sets in vLLM 0.32 and 0.33.

Most of kvelastic is in subclasses of vLLM's executor, scheduler, worker and connector
(`executor_class`). The functions here have no class that vLLM's settings could name. Each wrapper
calls the original with the arguments it received. Before any hook is set, every function that a
wrapper or a subclass replaces, calls or relies on is probed (`probes`).
"""

from __future__ import annotations

import functools
from typing import Final

from kvelastic.integration.hooks import table
from kvelastic.integration.hooks.probe import require
from kvelastic.integration.hooks.table import Hook
from kvelastic.integration.hooks.versions import installed_version
from kvelastic.integration.vllm import (
    connector_settings,
    executor_class,
    in_engine_core,
    in_front_end,
    in_worker,
    probes,
    tier_adapters,
)
from kvelastic.integration.vllm.probes import (
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
    EXECUTORS,
    FRONT_END,
    OFFLOADING,
    WORKER,
)

HOOKS: Final = (
    Hook(FRONT_END, f"{FRONT_END}:CoreEngineProcManager.__init__", in_front_end.start_engine_cores),
    Hook(FRONT_END, f"{FRONT_END}:shutdown", in_front_end.shutdown_engine_cores),
    Hook(
        CORE_CLIENT,
        f"{CORE_CLIENT}:AsyncMPClient._call_utility_async",
        in_front_end.call_engine_core,
    ),
    Hook(EXECUTORS, f"{EXECUTOR}.get_class", executor_class.get_class),
    Hook(ENGINE_CORE, f"{ENGINE_CORE}:EngineCore.shutdown", in_engine_core.engine_core_shutdown),
    Hook(ENGINE_CORE, f"{ENGINE_CORE}:EngineCore.step", in_engine_core.step),
    Hook(
        ENGINE_CORE,
        f"{ENGINE_CORE}:EngineCore.step_with_batch_queue",
        in_engine_core.step_with_batch_queue,
    ),
    Hook(ENGINE_CORE, f"{COORDINATOR}:BlockPool", in_engine_core.make_block_pool),
    Hook(
        ENGINE_CORE,
        f"{COORDINATOR}:KVCacheCoordinator.get_num_blocks_to_allocate",
        in_engine_core.make_blocks_needed,
        is_made=True,
    ),
    Hook(WORKER, "torch.accelerator:get_memory_info", in_worker.memory_info),
    Hook(WORKER, f"{BLOCK_TABLES}.gather_block_tables", in_worker.gather_block_tables),
    Hook(WORKER, f"{BLOCK_TABLE}.add_row", in_worker.add_row),
    Hook(WORKER, f"{BLOCK_TABLE}.move_row", in_worker.move_row),
    Hook(CPU_WORKER, f"{CPU_WORKER}:get_memory_node_info", in_worker.memory_node_info),
)
"""All hooks without tiers. Each process imports only its own modules and so sets only its own
hooks."""


TIER_HOOKS: Final = (
    Hook(ARGUMENTS, ENGINE_CONFIG, connector_settings.create_engine_config),
    Hook(ENGINE_CORE, f"{ENGINE_CORE}:EngineCore._reset_caches", in_engine_core.reset_caches),
    Hook(ENGINE_CORE, f"{ENGINE_CORE}:EngineCore.sleep", in_engine_core.sleep),
    Hook(
        ENGINE_CORE,
        f"{ENGINE_CORE}:EngineCore.release_kv_cache_memory",
        in_engine_core.release_kv_cache_memory,
    ),
    Hook(ENGINE_CORE, ADAPTER_KEYS, tier_adapters.adapter_keys),
)
"""Further hooks if `KVELASTIC_TIERS` is set."""


PROBED_ONLY: Final = (OFFLOADING,)
"""Modules that are probed when vLLM imports them, because a subclass depends on them."""


def hooks_for(_series: str) -> tuple[Hook, ...]:
    """Return the hooks for that vLLM series without tiers; all series have the same."""
    return HOOKS


def arm(series: str, *, tiers: bool = False) -> None:
    """Patch that series' vLLM modules as they are imported. Idempotent."""
    engine = f"vLLM {installed_version('vllm')}"
    rooms = {
        room: functools.partial(require, engine, text, page=probes.PAGE)
        for room, text in probes.requirements(series, tiers=tiers).items()
    }
    table.arm(engine, HOOKS + TIER_HOOKS if tiers else HOOKS, rooms)
