"""The class that vLLM's FlexKVConnectorV1 imports, for the scheduler's process and each worker's.

    KVELASTIC_FLEXKV_ALIAS=true vllm serve MODEL \\
        --kv-transfer-config '{"kv_connector": "FlexKVConnectorV1", "kv_role": "kv_both"}'

The process that has the tiers copies whole blocks, so vLLM's calls for a layer do nothing here.
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
    """Empty statistics. They make a step's output non-empty, so that vLLM calls the scheduler's
    `update_connector_output` after a step that ran no model, too. Without them a request that waits
    for a load alone would never run.
    """

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Return the other worker's."""
        return other

    def reduce(self) -> dict[str, int | float]:
        """No value."""
        return {}

    def reset(self) -> None:
        """No value."""

    def is_empty(self) -> bool:
        """True."""
        return True


class FlexKVConnectorV1Impl:
    """See the module. Each method is vLLM's of the same name."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole) -> None:
        """Raises what `FlexKVConfig` raises for settings and models that are not served."""
        configure_logging(load())
        config = FlexKVConfig.from_env()
        config.post_init_from_vllm_config(vllm_config)
        if not config.enable_flexkv:
            raise UnsupportedEngineError(
                "ENABLE_FLEXKV=0 and the connector FlexKVConnectorV1 contradict each other; leave"
                " --kv-transfer-config out"
            )
        dp_rank = vllm_config.parallel_config.data_parallel_rank
        engine = f"{vllm_config.instance_id}_{dp_rank}"
        self._scheduler: FlexKVSchedulerConnector | None = None
        self._worker: worker_side.FlexKVWorkerConnector | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = FlexKVSchedulerConnector(config, dp_rank, engine)
            return
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            worker_side.share_cpu_cache()
        self._worker = worker_side.FlexKVWorkerConnector(
            config, dp_rank, get_tensor_model_parallel_rank(), engine
        )

    def shutdown(self) -> None:
        """Give everything back."""
        for one in (self._scheduler, self._worker):
            if one is not None:
                one.shutdown()

    # --- worker --------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Register the cache's memory."""
        assert self._worker is not None
        self._worker.register_to_server(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads run without the worker: this and the next three do nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A request runs when all its layers are loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks are copied when their request has finished."""

    def wait_for_save(self) -> None:
        """A step saves nothing."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The scheduler adds the finished loads (`update_connector_output`)."""
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of loads that the scheduler has seen fail."""
        return set() if self._worker is None else self._worker.take_failed_blocks()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """A worker reports that there was a step; the scheduler logs its counts."""
        return None if self._worker is None else StepTaken()

    # --- scheduler -----------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """The tokens in tiers after the computed ones, and whether they load asynchronously."""
        return self._of_scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Take the blocks that a load goes into."""
        self._of_scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Launch this step's tasks. Workers receive nothing."""
        self._of_scheduler.launch()
        return KVConnectorMetadata()

    def update_connector_output(self, connector_output: Any) -> None:
        """Add the tasks that have ended."""
        self._of_scheduler.take_finished(connector_output)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep the computed blocks; returns whether the request's blocks are needed for that."""
        return self._of_scheduler.request_finished(request, block_ids), None

    def take_events(self) -> Iterable[Any]:
        """No events: vLLM's own report its cache."""
        return ()

    @property
    def _of_scheduler(self) -> FlexKVSchedulerConnector:
        assert self._scheduler is not None
        return self._scheduler
