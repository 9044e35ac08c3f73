"""Wrappers for a worker's process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from kvelastic.integration.vllm import worker_device


def device_facts(worker: Any) -> worker_device.DeviceFacts:
    """Return the worker's device. Runs in the worker: the engine core opens no device itself."""
    return worker_device.of_worker(worker).facts


def memory_node_info(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Report all of the machine's memory as available.

    At start, vLLM sizes its KV cache by free memory and refuses to start with less than configured.
    With kvelastic the cache is only an address range. Memory that is in use now may become
    available later, and a request without memory waits.
    """
    info = copy.copy(original(*args, **kwargs))
    info.available_memory = info.total_memory
    return info
