"""Wrappers for a worker's process."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvelastic.integration.vllm import worker_device
from kvelastic.integration.vllm.handoff import HANDOFF
from kvelastic.integration.vllm.refusals import refuse_short_offsets
from kvelastic.integration.vllm.wrapped_names import CPU_WORKER

if TYPE_CHECKING:
    from kvelastic.integration.vllm.worker_side import WorkerMemory


def device_facts(worker: Any) -> worker_device.DeviceFacts:
    """Return the worker's device. Runs in the worker: the engine core opens no device itself."""
    return worker_device.of_worker(worker).facts


def initialize_from_config(original: Callable[..., Any], worker: Any, kv_cache_config: Any) -> None:
    """Replace the KV cache allocation with the arena."""
    handoff = getattr(kv_cache_config, HANDOFF, None)
    if handoff is None:
        original(worker, kv_cache_config)
        return
    from kvelastic.integration.vllm import worker_side

    memory = worker_side.attach(handoff, worker_device.of_worker(worker))
    worker.kvelastic_memory = memory
    with memory.as_kv_allocation():
        original(worker, kv_cache_config)
    memory.check_views(worker.model_runner.kv_caches, kv_cache_config.num_blocks)
    refuse_short_offsets(worker.model_runner)
    logging.getLogger(CPU_WORKER).addFilter(_is_no_sleep_warning)


def _is_no_sleep_warning(record: logging.LogRecord) -> bool:
    """Drop vLLM's warning that a sleep does nothing on a CPU: it releases the KV cache."""
    return not record.getMessage().startswith("sleep mode is not supported on CPU")


def shutdown(original: Callable[..., Any], worker: Any) -> None:
    """Detach from the segment after vLLM's shutdown."""
    try:
        original(worker)
    finally:
        memory = _memory_of(worker)
        if memory is not None:
            memory.close()


def memory_node_info(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Report all of the machine's memory as available.

    At start, vLLM sizes its KV cache by free memory and refuses to start with less than configured.
    With kvelastic the cache is only an address range. Memory that is in use now may become
    available later, and a request without memory waits.
    """
    info = copy.copy(original(*args, **kwargs))
    info.available_memory = info.total_memory
    return info


def _memory_of(worker: Any) -> WorkerMemory | None:
    return getattr(worker, "kvelastic_memory", None)
