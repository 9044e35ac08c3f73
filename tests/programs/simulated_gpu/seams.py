"""How vLLM's CPU kernels get at the simulated driver's memory: the seams of `worker_device`.

A worker keeps its KV cache in memory of `CudaDriver` over the simulated `libcuda.so.1`, whose
device pointers the processor can read. A real GPU is never taken for this.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

_NON_BLOCKING = 1


def _device_of(worker: Any) -> int:
    return int(worker.local_rank) % int(os.environ.get("KVSIM_DEVICES", "1"))


def open_driver(worker: Any) -> Any:
    """The simulated GPU with the number of the worker's rank."""
    from kvelastic import _vmm

    ctypes.CDLL("libcuda.so.1").kvsim_reset_counts()  # AttributeError: this is a real driver
    return _vmm.CudaDriver(f"cuda:{_device_of(worker)}")


def compute_streams(worker: Any) -> list[int]:
    """A stream that the legacy one does not order, as vLLM's own on a GPU."""
    cuda = ctypes.CDLL("libcuda.so.1")
    context, stream = ctypes.c_void_p(), ctypes.c_void_p()
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), _device_of(worker)) == 0
    assert cuda.cuCtxSetCurrent(context) == 0
    assert cuda.cuStreamCreate(ctypes.byref(stream), _NON_BLOCKING) == 0
    assert stream.value is not None
    return [stream.value]


def whole_range(memory: Any) -> Any:
    """All of a range as flat int8 that the processor computes on."""
    import torch

    raw = (ctypes.c_int8 * memory.range_bytes).from_address(memory.address)
    raw.memory = memory  # it lives as long as the tensor
    return torch.frombuffer(raw, dtype=torch.int8)
