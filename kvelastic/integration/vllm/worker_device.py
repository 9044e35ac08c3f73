"""A worker's device: where its pages lie, its driver, and its streams.

    device = of_worker(worker)              # host memory, or the worker's own GPU
    arena = reserve_range(device.driver, geometry, guard_pages=False)

Only worker processes open a GPU. The scheduler receives these facts from its workers
(`DeviceFacts`) and never calls CUDA. Imports torch only inside functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvelastic import _vmm, config
from kvelastic.device import page_size
from kvelastic.device.selection import HOST

_KEPT = "kvelastic_worker_device"
"""Worker attribute that caches its `WorkerDevice`."""


@dataclass(frozen=True)
class DeviceFacts:
    """What the scheduler must know about a worker's device; plain values."""

    name: str
    """`host`, or the GPU's UUID."""
    total_bytes: int = 0
    """The GPU's memory; 0 on the host."""
    model: str = ""
    """The GPU's product name, e.g. `NVIDIA H100 80GB HBM3`."""
    page_price_us: float = 0.0
    """The driver's cost to create and destroy a handle (`page_size`); 0: not measured."""

    @property
    def is_gpu(self) -> bool:
        """True if pages lie on a GPU."""
        return self.name != HOST


@dataclass(frozen=True)
class WorkerDevice:
    """A worker's device, opened."""

    facts: DeviceFacts
    driver: _vmm.Driver


def of_worker(worker: Any) -> WorkerDevice:
    """Return the device of a worker; the first call opens it. `worker.device` must be set.

    Call it on the thread that computes. Raises `DeviceUnavailableError` for a GPU without virtual
    memory management.
    """
    known: WorkerDevice | None = getattr(worker, _KEPT, None)
    if known is not None:
        return known
    driver = open_driver(worker)
    facts = DeviceFacts(HOST)
    if isinstance(driver, _vmm.CudaDriver):
        price_us = page_size.price_us(config.load(), driver)
        facts = DeviceFacts(driver.uuid, driver.total_bytes, model_name(worker), price_us)
        driver.use_streams(compute_streams(worker))
    opened = WorkerDevice(facts, driver)
    setattr(worker, _KEPT, opened)
    return opened


def open_driver(worker: Any) -> _vmm.Driver:
    """Open the driver of the worker's device; torch numbers GPUs as CUDA does."""
    device = worker.device
    if device.type == "cpu":
        return _vmm.HostDriver()
    return _vmm.CudaDriver(f"cuda:{device.index or 0}")


def compute_streams(worker: Any) -> list[int]:
    """Return the CUDA streams on which the worker's kernels access blocks. Call on its thread.

    vLLM computes on one private stream. Before a step ends, vLLM joins all other streams with
    it.
    """
    from vllm.utils.torch_utils import current_stream

    return [current_stream().cuda_stream]


def model_name(worker: Any) -> str:
    """Return the product name of the worker's GPU."""
    import torch

    return str(torch.cuda.get_device_name(worker.device))
