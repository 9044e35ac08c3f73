"""Wrappers and measurements for a worker's process (`worker_class`).

While vLLM measures a GPU's free memory, kvelastic excludes the neighbours' use from "used"
(`own_memory`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvelastic import config
from kvelastic.integration.vllm import own_memory, start_reserve, worker_device
from kvelastic.integration.vllm.own_memory import Seen, own_bytes
from kvelastic.shared import ledger

if TYPE_CHECKING:
    from kvelastic.shared.ledger import JoinedLedger

_FIRST = "kvelastic_first_look"
"""Worker attribute with its first `Seen`."""

_NVML_PID = "kvelastic_nvml_pid"
"""Worker attribute with NVML's pid of its process; None if NVML does not report it."""

_measured_worker: Any | None = None
"""The worker of this process that vLLM is measuring now."""


def device_facts(worker: Any) -> worker_device.DeviceFacts:
    """Return the worker's device. Runs in the worker: the engine core opens no device itself."""
    return worker_device.of_worker(worker).facts


@contextmanager
def measuring(worker: Any) -> Iterator[None]:
    """Make vLLM measure this process alone in the body."""
    global _measured_worker
    before, _measured_worker = _measured_worker, worker
    try:
        yield
    finally:
        _measured_worker = before


def memory_info(original: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[int, int]:
    """Wrap `torch.accelerator.get_memory_info`: return a device's free and total bytes."""
    free_bytes, total_bytes = original(*args, **kwargs)
    worker = _measured_worker
    if worker is None or not worker_device.of_worker(worker).facts.is_gpu:
        return free_bytes, total_bytes
    now = _look(worker, total_bytes - free_bytes)
    first = worker.__dict__.setdefault(_FIRST, now)
    return total_bytes - own_bytes(first, now), total_bytes


def memory_node_info(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Report all of the machine's memory as available.

    At start, vLLM sizes its KV cache by free memory and refuses to start with less than configured.
    With kvelastic the cache is only an address range. Memory that is in use now may become
    available later, and a request without memory waits.
    """
    info = copy.copy(original(*args, **kwargs))
    info.available_memory = info.total_memory
    return info


def hand_over_reserve(worker: Any) -> int:
    """End the start reserve; return the bytes that the instance must reserve instead.

    These are what this worker's process holds beside the KV cache, or will hold again in a step. It
    uses the peak of torch's allocator, because torch returns activations to the device between
    profiling and the first request. Returns 0 on the CPU, where the scheduler measures itself.
    Later calls measure again; by then the ledger explains more or less of the neighbours' memory.
    """
    import torch

    if not worker_device.of_worker(worker).facts.is_gpu:
        return 0
    joined: JoinedLedger | None = getattr(worker, "kvelastic_start_reserve", None)
    if joined is not None:
        worker.kvelastic_start_reserve = None
        joined.close()
    first: Seen | None = worker.__dict__.get(_FIRST)
    if first is None:
        return 0
    free_bytes, total_bytes = torch.accelerator.get_memory_info(worker.device)
    now = _look(worker, total_bytes - free_bytes)
    statistics = torch.accelerator.memory_stats(worker.device)
    peak = int(statistics.get("reserved_bytes.all.peak", now.reserved_by_torch))
    return own_bytes(first, now) + max(0, peak - now.reserved_by_torch)


def gather_block_tables(
    original: Callable[..., Any],
    tables: Any,
    idx_mapping: Any,
    num_reqs_padded: int,
    out: Any = None,
    *arguments: Any,
    **named: Any,
) -> Any:
    """Clear the rows first: a row may contain ids of a longer, earlier row behind its own.

    A kernel that reads ahead would access unmapped pages.
    """
    for table in tables.input_block_tables if out is None else out:
        table[:num_reqs_padded].zero_()
    return original(tables, idx_mapping, num_reqs_padded, out, *arguments, **named)


def add_row(original: Callable[..., Any], table: Any, block_ids: list[int], row_idx: int) -> None:
    """Like `gather_block_tables`, for vLLM's older model runner (V1)."""
    table.clear_row(row_idx)
    original(table, block_ids, row_idx)


def move_row(original: Callable[..., Any], table: Any, src: int, tgt: int) -> None:
    """Like `add_row`: the overwritten row may be longer."""
    if src != tgt:
        table.clear_row(tgt)
    original(table, src, tgt)


def _look(worker: Any, used_bytes: int) -> Seen:
    import torch

    device = worker_device.of_worker(worker)
    memory = getattr(worker, "kvelastic_memory", None)
    own_names = {start_reserve.name(), memory.instance_name if memory is not None else None}
    group = config.load().ledger
    of_instances = sum(
        # This process's own reserve counts as its own memory.
        member.granted_bytes + (0 if member.name in own_names else member.pledged_bytes)
        for info in ledger.list_ledgers()
        if info.device == device.facts.name and info.group == group
        for member in info.members
    )
    by_torch = int(torch.accelerator.memory_reserved(worker.device))
    cache_bytes = memory.held_bytes if memory is not None else 0
    return Seen(used_bytes, by_torch, of_instances, _of_process(worker, device, cache_bytes))


def _of_process(worker: Any, device: worker_device.WorkerDevice, cache_bytes: int) -> int | None:
    if not device.facts.is_gpu:
        return None
    if _NVML_PID not in worker.__dict__:
        setattr(worker, _NVML_PID, own_memory.find_pid(device.driver, device.facts.name))
    pid: int | None = worker.__dict__[_NVML_PID]
    held_bytes = None if pid is None else own_memory.processes(device.facts.name).get(pid)
    return None if held_bytes is None else max(0, held_bytes - cache_bytes)
