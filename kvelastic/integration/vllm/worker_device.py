"""Where a worker's pages lie: the device that it computes on, its driver, and its streams.

    device = of_worker(worker)              # host memory, or the worker's own GPU
    arena = reserve_range(device.driver, geometry, guard_pages=False)

Only a worker's process opens a GPU: the scheduler has none, learns these facts from its workers
(`DeviceFacts`) and never calls into CUDA. Imports torch only inside its functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvelastic import _vmm, config, page_size
from kvelastic.device import HOST

_KEPT = "kvelastic_worker_device"
"""Attribute of a worker that has its `WorkerDevice`, once it was asked for."""


@dataclass(frozen=True)
class DeviceFacts:
    """What the scheduler has to know of a worker's device: plain values."""

    name: str
    """`host`, or the GPU's UUID."""
    total_bytes: int = 0
    """Of the GPU; 0 on the host."""
    model: str = ""
    """What the GPU is called, `NVIDIA H100 80GB HBM3` say."""
    page_price_us: float = 0.0
    """What its driver charges for a handle, from creation to end (`page_size`); 0: not asked."""

    @property
    def is_gpu(self) -> bool:
        """Whether pages lie on a GPU."""
        return self.name != HOST


@dataclass(frozen=True)
class WorkerDevice:
    """A worker's device, opened."""

    facts: DeviceFacts
    driver: _vmm.Driver


def of_worker(worker: Any) -> WorkerDevice:
    """The device of a worker, opened at the first call; `worker.device` must be there.

    To be called on the thread that computes. Raises `DeviceUnavailableError` for a GPU without
    virtual memory.
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
    """The seam to the memory that a worker computes on; torch counts GPUs as CUDA does."""
    device = worker.device
    if device.type == "cpu":
        return _vmm.HostDriver()
    return _vmm.CudaDriver(f"cuda:{device.index or 0}")


def compute_streams(worker: Any) -> list[int]:
    """The CUDA streams on which the worker's kernels read and write blocks; asked on its thread.

    vLLM computes on a stream of its own, which waits for no other; what it starts on further
    streams it joins with this one before a step ends.
    """
    from vllm.utils.torch_utils import current_stream

    return [current_stream().cuda_stream]


def model_name(worker: Any) -> str:
    """What the worker's GPU is called."""
    import torch

    return str(torch.cuda.get_device_name(worker.device))
