"""The class that vLLM's FlexKVConnectorV1 imports, for the scheduler's and each worker's process.

    KVELASTIC_FLEXKV_ALIAS=true vllm serve MODEL \\
        --kv-transfer-config '{"kv_connector": "FlexKVConnectorV1", "kv_role": "kv_both"}'

The process that runs the tiers copies whole blocks, so vLLM's per-layer calls do nothing here.
Imports vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvelastic.config import configure_logging, load
from kvelastic.errors import UnsupportedEngineError
from kvelastic.flexkv.integration.config import FlexKVConfig
from kvelastic.flexkv.integration.vllm import worker_side
from kvelastic.flexkv.integration.vllm.scheduler_side import FlexKVSchedulerConnector


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


class FailedBlocks(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is untyped here
    """Blocks of the engine that could not be loaded, for the output of the step."""

    def __init__(self, block_ids: set[int]) -> None:
        self.block_ids = block_ids


class FlexKVConnectorV1Impl:
    """The connector. Each method implements vLLM's method of the same name."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole) -> None:
        """Raises what `FlexKVConfig` raises for unsupported settings and models."""
        configure_logging(load())
        config = FlexKVConfig.from_env()
        config.post_init_from_vllm_config(vllm_config)
        if not config.enable_flexkv:
            raise UnsupportedEngineError(
                "ENABLE_FLEXKV=0 and the connector FlexKVConnectorV1 contradict each other; leave"
                " --kv-transfer-config out"
            )
        dp_rank = vllm_config.parallel_config.data_parallel_rank
        self._scheduler: FlexKVSchedulerConnector | None = None
        self._worker: worker_side.FlexKVWorkerConnector | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = FlexKVSchedulerConnector(config, dp_rank)
            return
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
        from vllm.platforms import current_platform

        worker_side.extend_connector(is_cpu=current_platform.is_cpu())
        tp_rank = get_tensor_model_parallel_rank()
        self._worker = worker_side.FlexKVWorkerConnector(config, dp_rank, tp_rank)

    def shutdown(self) -> None:
        """Release everything that this process holds."""
        for one in (self._scheduler, self._worker):
            if one is not None:
                one.shutdown()

    # --- worker --------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Register the cache's memory."""
        assert self._worker is not None
        self._worker.register_to_server(kv_caches)

    def bind_connector_metadata(self, metadata: KVConnectorMetadata) -> None:
        """Take the failed blocks that the scheduler sends with a step."""
        if self._worker is not None and isinstance(metadata, FailedBlocks):
            self._worker.note_failed_blocks(metadata.block_ids)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing: loads run without the worker."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request runs only after all its layers are loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: blocks are copied after their request has finished."""

    def wait_for_save(self) -> None:
        """Do nothing: a step saves no blocks."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return no ids: `update_connector_output` adds finished loads in the scheduler."""
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks of loads that the scheduler has seen fail."""
        return set() if self._worker is None else self._worker.take_failed_blocks()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return `StepTaken` to report a step; the scheduler logs its counts."""
        return None if self._worker is None else StepTaken()

    # --- scheduler -----------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return the number of tokens in tiers after the computed ones, and if loads are async."""
        return self._of_scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Set the target blocks of a load."""
        self._of_scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Launch this step's tasks. Workers receive the blocks of failed loads."""
        self._of_scheduler.launch()
        return FailedBlocks(self._of_scheduler.take_failed_blocks())

    def update_connector_output(self, connector_output: Any) -> None:
        """Add the ended tasks to a step's output."""
        self._of_scheduler.take_finished(connector_output)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Start to store a finished request's blocks.

        Return whether the blocks are still needed.
        """
        return self._of_scheduler.request_finished(request, block_ids), None

    def take_events(self) -> Iterable[Any]:
        """Return no events: vLLM reports its cache's events itself."""
        return ()

    @property
    def _of_scheduler(self) -> FlexKVSchedulerConnector:
        assert self._scheduler is not None
        return self._scheduler
