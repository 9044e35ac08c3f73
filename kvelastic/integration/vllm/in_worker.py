"""Wrappers for a worker's process."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvelastic.integration.vllm import worker_device
from kvelastic.integration.vllm.handoff import HANDOFF
from kvelastic.integration.vllm.refusals import refuse_short_offsets

if TYPE_CHECKING:
    from kvelastic.integration.vllm.worker_side import WorkerMemory

_log = logging.getLogger("kvelastic.vllm")


def device_facts(worker: Any) -> worker_device.DeviceFacts:
    """Return this worker's device. The engine core calls it because it opens no device itself."""
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


def shutdown(original: Callable[..., Any], worker: Any) -> None:
    """Detach from the segment after vLLM's shutdown."""
    try:
        original(worker)
    finally:
        memory = _memory_of(worker)
        if memory is not None:
            memory.close()


def cpu_sleep(original: Callable[..., Any], worker: Any, level: int = 1) -> None:
    """On the CPU, vLLM frees nothing and logs so; kvelastic has released the KV cache."""
    if _memory_of(worker) is None:
        original(worker, level)
    else:
        _log.info("Asleep: no KV cache is held; weights stay in memory on the CPU.")


def cpu_wake_up(original: Callable[..., Any], worker: Any, tags: list[str] | None = None) -> None:
    """Skip vLLM's CPU wake-up if kvelastic manages the KV cache."""
    if _memory_of(worker) is None:
        original(worker, tags)


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
