"""vLLM's worker with the arena: a subclass of the worker class in its settings.

On a GPU, vLLM measures the device's free memory three times: before loading, after profiling, and
around its sleep. It exits if the values do not fit, and next to a neighbour they never do. In these
calls, kvelastic excludes the neighbours' use from "used" (`in_worker.measuring`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from kvelastic.integration.vllm import in_worker, start_reserve, worker_device
from kvelastic.integration.vllm.handoff import HANDOFF
from kvelastic.integration.vllm.probes import CPU_WORKER
from kvelastic.integration.vllm.refusals import refuse_short_offsets
from kvelastic.integration.vllm.subclasses import Subclasses

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker

    from kvelastic.integration.vllm.worker_side import WorkerMemory
    from kvelastic.shared.ledger import JoinedLedger
else:
    Worker = object


class ElasticWorker(Worker):  # type: ignore[misc]  # vLLM has no type information here
    """Overrides vLLM's worker: the arena, and a GPU's reserve and measurements."""

    kvelastic_memory: WorkerMemory | None = None
    kvelastic_start_reserve: JoinedLedger | None = None
    """On a GPU, its ledger membership between loading and the end of warm-up."""

    def init_device(self) -> None:
        """Measure at start."""
        with in_worker.measuring(self):
            super().init_device()

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        """On a GPU, reserve memory for the weights first; other instances give it."""
        if self.kvelastic_start_reserve is None:
            self.kvelastic_start_reserve = start_reserve.claim(self)
        return super().load_model(*args, **kwargs)

    def determine_available_memory(self) -> Any:
        """Measure what vLLM needs."""
        with in_worker.measuring(self):
            return super().determine_available_memory()

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Replace the KV cache allocation with the arena."""
        handoff = getattr(kv_cache_config, HANDOFF, None)
        if handoff is None:
            super().initialize_from_config(kv_cache_config)
            return
        from kvelastic.integration.vllm import worker_side

        memory = worker_side.attach(handoff, worker_device.of_worker(self))
        self.kvelastic_memory = memory
        with memory.as_kv_allocation():
            super().initialize_from_config(kv_cache_config)
        memory.check_views(self.model_runner.kv_caches, kv_cache_config.num_blocks)
        refuse_short_offsets(self.model_runner)
        logging.getLogger(CPU_WORKER).addFilter(_is_no_sleep_warning)

    def compile_or_warm_up_model(self) -> Any:
        """Warm up on the null block, the only block that has memory at that time.

        vLLM's newer model runner (V2) warms up with block ids that were never allocated.
        """
        tables = getattr(self.model_runner, "block_tables", None)
        if not hasattr(tables, "redirect_writes_to_null_block"):
            tables = None
        if tables is not None:
            tables.redirect_writes_to_null_block = True
        try:
            with in_worker.measuring(self):
                return super().compile_or_warm_up_model()
        finally:
            if tables is not None:
                tables.redirect_writes_to_null_block = False

    def sleep(self, *args: Any, **kwargs: Any) -> Any:
        """Measure what a sleep frees."""
        with in_worker.measuring(self):
            return super().sleep(*args, **kwargs)

    def shutdown(self) -> None:
        """Detach from the segment after vLLM's shutdown."""
        try:
            super().shutdown()
        finally:
            if self.kvelastic_memory is not None:
                self.kvelastic_memory.close()


def _is_no_sleep_warning(record: logging.LogRecord) -> bool:
    """Drop vLLM's warning that a sleep does nothing on a CPU: it releases the KV cache."""
    return not record.getMessage().startswith("sleep mode is not supported on CPU")


_subclasses = Subclasses(ElasticWorker)
__getattr__ = _subclasses.find
path = _subclasses.path
