"""The connector that vLLM's FlexKVConnectorV1 imports: one for the scheduler, one for each worker.

    KVELASTIC_FLEXKV_ALIAS=true vllm serve MODEL \\
        --kv-transfer-config '{"kv_connector": "FlexKVConnectorV1", "kv_role": "kv_both"}'

The process that runs the tiers copies whole blocks, so vLLM's per-layer calls do nothing here.

vLLM takes failed blocks only from its workers' output, and not after the step that ends the load.
The scheduler learns of a failure first. It notifies the workers with the next step's metadata, and
reports the load as finished in the step whose output names its blocks. Imports vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvelastic.config import configure_logging, load
from kvelastic.errors import UnsupportedEngineError, UnsupportedError
from kvelastic.flexkv.common.memory_handle import shared_zeros
from kvelastic.flexkv.integration.config import FlexKVConfig
from kvelastic.flexkv.integration.vllm.scheduler_side import FlexKVSchedulerConnector
from kvelastic.flexkv.server.client import KVTPClient


def FlexKVConnectorV1Impl(  # noqa: N802  # FlexKV's name; vLLM calls it as a class
    vllm_config: Any, role: KVConnectorRole
) -> SchedulerConnector | WorkerConnector:
    """Return the connector of this process, with vLLM's methods.

    Raises what `FlexKVConfig` raises for unsupported settings and models.
    """
    configure_logging(load())
    config = FlexKVConfig.from_env()
    config.post_init_from_vllm_config(vllm_config)
    if not config.enable_flexkv:
        raise UnsupportedEngineError(
            "ENABLE_FLEXKV=0 and the connector FlexKVConnectorV1 contradict each other; leave"
            " --kv-transfer-config out"
        )
    dp_rank = vllm_config.parallel_config.data_parallel_rank
    if role == KVConnectorRole.SCHEDULER:
        return SchedulerConnector(config, dp_rank)
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
    from vllm.platforms import current_platform

    _extend_connector(is_cpu=current_platform.is_cpu())
    return WorkerConnector(config, dp_rank, get_tensor_model_parallel_rank())


class FailedBlocks(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is untyped here
    """Blocks of the engine that could not be loaded, for the output of the step."""

    def __init__(self, block_ids: set[int]) -> None:
        self.block_ids = block_ids


class SchedulerConnector(FlexKVSchedulerConnector):
    """The scheduler's connector, with vLLM's type of metadata."""

    def build_connector_meta(self, scheduler_output: Any) -> FailedBlocks:
        """Launch this step's tasks. Workers receive the blocks of failed loads."""
        self.launch()
        return FailedBlocks(self.take_failed_blocks())


class StepTaken(KVConnectorStats):  # type: ignore[misc]  # vLLM is untyped here
    """Empty statistics, which make a step's output non-empty.

    vLLM then calls the scheduler's `update_connector_output` even after a step without a model run.
    Otherwise a request that only waits for a load would never run.
    """

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Return the other worker's statistics, which are equal."""
        return other

    def reduce(self) -> dict[str, int | float]:
        """Return no values."""
        return {}

    def reset(self) -> None:
        """Do nothing: there are no values."""

    def is_empty(self) -> bool:
        """True: there are no values."""
        return True


class WorkerConnector:
    """The connector of one rank: it registers the KV cache, and reports failed blocks."""

    def __init__(self, config: FlexKVConfig, dp_rank: int, tp_rank: int) -> None:
        self._block_size = config.cache_config.tokens_per_block
        self._failed_blocks: set[int] = set()
        self._client = KVTPClient(
            config.gpu_register_port,
            dp_client_id=config.dp_client_id_of_instance + dp_rank,
            tp_rank=tp_rank,
        )

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Register the layers' tensors, in the order of the layers. Does not block."""
        blocks = [self._by_block(tensor) for tensor in kv_caches.values()]
        self._client.register_to_server(blocks, block_axis=0)

    def _by_block(self, tensor: Any) -> Any:
        """View a layer's cache, [kernel blocks, heads, tokens, content], by the engine's blocks."""
        shape = tuple(tensor.shape)
        is_known = len(shape) == 4 and self._block_size % shape[2] == 0
        kernel_blocks = self._block_size // shape[2] if is_known else 0
        if not kernel_blocks or shape[0] % kernel_blocks:
            raise UnsupportedError(
                f"a KV cache of the shape {shape} has no blocks of {self._block_size} tokens"
            )
        return tensor.unflatten(0, (-1, kernel_blocks))

    def bind_connector_metadata(self, metadata: KVConnectorMetadata) -> None:
        """Take the failed blocks that the scheduler sends with a step, for the step's output."""
        if isinstance(metadata, FailedBlocks):
            self._failed_blocks |= metadata.block_ids

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the failed blocks since the last call."""
        taken, self._failed_blocks = self._failed_blocks, set()
        return taken

    def get_kv_connector_stats(self) -> KVConnectorStats:
        """Report a step; the scheduler logs its counts."""
        return StepTaken()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, None]:
        """Return no ids: `update_connector_output` adds finished loads in the scheduler."""
        return None, None

    def start_load_kv(self, *arguments: Any, **more: Any) -> None:
        """Do nothing: copies run without the worker, before and after their request."""

    wait_for_layer_load = save_kv_layer = wait_for_save = start_load_kv

    def shutdown(self) -> None:
        """Unregister. Idempotent."""
        self._client.close()


class SharedZeros(TorchFunctionMode):  # type: ignore[misc]  # torch is untyped here
    """Puts vLLM's cache, which `torch.zeros(bytes, dtype=int8)` allocates, in shared memory."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Handle a function call. Torch calls this for every function while the mode is active."""
        kwargs = kwargs or {}
        is_flat = len(args) == 1 and isinstance(args[0], int) and args[0] > 0
        if func is torch.zeros and is_flat and kwargs.get("dtype") is torch.int8:
            return torch.from_numpy(shared_zeros(args[0], "int8"))
        return func(*args, **kwargs)


def _extend_connector(*, is_cpu: bool) -> None:
    """Make vLLM's FlexKVConnectorV1 forward two more calls to its adapter.

    These are a step's metadata, and on the CPU the allocation of the cache.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1 import flexkv_connector

    connector = flexkv_connector.FlexKVConnectorV1

    def bind(self: Any, metadata: Any) -> None:
        super(connector, self).bind_connector_metadata(metadata)
        self._flexkv_connector.bind_connector_metadata(metadata)

    if "bind_connector_metadata" not in vars(connector):
        connector.bind_connector_metadata = bind
    if is_cpu and "get_mem_pool_context" not in vars(connector):
        connector.get_mem_pool_context = lambda self: SharedZeros()
