"""Names of the vLLM modules and classes that kvelastic wraps, replaces or relies on.

The modules of the first group also select hooks: a process sets the hooks of the modules that it
imports.
"""

from __future__ import annotations

from typing import Final

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
SCHEDULER: Final = "vllm.v1.core.sched.scheduler"
BLOCK_POOL: Final = "vllm.v1.core.block_pool:BlockPool"
CACHE_CONFIG: Final = "vllm.v1.kv_cache_interface:KVCacheConfig"
WORKER_CLASS: Final = "vllm.v1.worker.gpu_worker:Worker"
BLOCK_TABLE: Final = "vllm.v1.worker.block_table:BlockTable"
BLOCK_TABLES: Final = "vllm.v1.worker.gpu.block_table:BlockTables"
OFFLOADS: Final = (
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler:OffloadingConnectorScheduler"
)
ENGINE_CONFIG: Final = "vllm.engine.arg_utils:EngineArgs.create_engine_config"
CONNECTOR_CONFIG: Final = "vllm.config.kv_transfer:KVTransferConfig"
OFFLOAD_BASE: Final = "vllm.v1.kv_offload.base"
NODE_INFO: Final = "vllm.utils.cpu_resource_utils"
