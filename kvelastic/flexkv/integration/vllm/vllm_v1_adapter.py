"""What vLLM's FlexKVConnectorV1 imports: an object in the scheduler's process and each worker's.

    KVELASTIC_FLEXKV_ALIAS=true vllm serve MODEL \\
        --kv-transfer-config '{"kv_connector": "FlexKVConnectorV1", "kv_role": "kv_both"}'

Whole blocks are copied by whoever serves the tiers, never by a layer: what vLLM asks for layer by
layer has nothing to do here. Imports vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvelastic.config import configure_logging, load
from kvelastic.errors import UnsupportedEngineError
from kvelastic.flexkv.integration.config import FlexKVConfig
from kvelastic.flexkv.integration.vllm.scheduler_side import FlexKVSchedulerConnector
from kvelastic.flexkv.integration.vllm.worker_side import FlexKVWorkerConnector


class StepTaken(KVConnectorStats):  # type: ignore[misc]  # vLLM is untyped here
    """Says nothing. With it a step's output is not empty, and vLLM asks the scheduler's object what
    is over also in a step that ran no model; without it a request that waits for a load alone would
    wait for ever.
    """

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Those of another worker."""
        return other

    def reduce(self) -> dict[str, int | float]:
        """Nothing."""
        return {}

    def reset(self) -> None:
        """Nothing to forget."""

    def is_empty(self) -> bool:
        """It is."""
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
        self._worker: FlexKVWorkerConnector | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = FlexKVSchedulerConnector(config, dp_rank, engine)
            return
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            from kvelastic.flexkv.integration.vllm import shared_cache

            shared_cache.offer_to_vllm()
        self._worker = FlexKVWorkerConnector(
            config, dp_rank, get_tensor_model_parallel_rank(), engine
        )

    def shutdown(self) -> None:
        """Give everything back."""
        for one in (self._scheduler, self._worker):
            if one is not None:
                one.shutdown()

    # --- a worker's ----------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Hand the cache's memory over."""
        assert self._worker is not None
        self._worker.register_to_server(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads run already, or are over."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A request runs when all its layers are there."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks are copied when their request has finished."""

    def wait_for_save(self) -> None:
        """Nothing is saved in a step."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The scheduler's object knows (`update_connector_output`)."""
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Of loads that the scheduler's object has seen fail."""
        return set() if self._worker is None else self._worker.take_failed_blocks()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """A worker's says that there was a step; what the scheduler counts is logged."""
        return None if self._worker is None else StepTaken()

    # --- the scheduler's -----------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """How many tokens lie in tiers behind those computed, and whether they come later."""
        return self._of_scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Where a load goes."""
        self._of_scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Launch what this step has brought. Workers are told nothing."""
        self._of_scheduler.launch()
        return KVConnectorMetadata()

    def update_connector_output(self, connector_output: Any) -> None:
        """Add what is over."""
        self._of_scheduler.take_finished(connector_output)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep what it has computed; whether its blocks are needed for that."""
        return self._of_scheduler.request_finished(request, block_ids), None

    def take_events(self) -> Iterable[Any]:
        """There are none: vLLM's own say what its cache holds."""
        return ()

    @property
    def _of_scheduler(self) -> FlexKVSchedulerConnector:
        assert self._scheduler is not None
        return self._scheduler
