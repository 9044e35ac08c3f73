"""vLLM's own GPU worker, computing on the processor, its KV cache on the simulated driver.

Import it before vLLM, in the process that is scheduler and worker in one, and give
`worker_cls="gpu_worker_on_cpu.GpuWorkerOnCpu"`. What torch does on CUDA alone is answered by
stand-ins; every step is vLLM's and kvelastic's own but the warm-up of kernels, the sleep
allocator, and the seams of `simulated_gpu` (the device, its streams, and a range as a tensor).
With `TEST_TRITON`, a folder with triton in it, vLLM takes its newer model runner (V2), whose
kernels Triton's interpreter runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from interpreted_triton import interpret_triton
from simulated_gpu import seams

from kvelastic import _vmm, config
from kvelastic.integration.vllm import worker_device
from kvelastic.pool import tensors
from kvelastic.shared import ledger

CUDA = ctypes.CDLL("libcuda.so.1")
NEIGHBOUR_BYTES = int(os.environ.get("TEST_NEIGHBOUR_BYTES", "0"))
"""What somebody else holds of the device when the engine starts, and frees while it profiles."""
STARTING_BYTES = int(os.environ.get("TEST_STARTING_BYTES", "0"))
"""What another engine that starts has reserved by then, and loads while this one profiles."""
WEIGHTS_BYTES = 8 << 20
"""What torch's allocator says it holds once the model is loaded; on the processor it has none."""

events: list[str] = []
"""What happened, in order: pools that allocations are made in, sleep, wake, looks at memory."""
stream = 0
"""The CUDA stream that the worker computes on, after it has started."""
_pools: list[str] = []
_neighbour: list[tuple[Any, int]] = []
_starting: list[ledger.JoinedLedger] = []
_starting_weights: list[tuple[Any, int]] = []
_loaded: list[bool] = []


def simulated_memory(*_: object) -> tuple[int, int]:
    driver = _vmm.CudaDriver("cuda:0")
    return driver.free_bytes, driver.total_bytes


def _torch_reserves(*_: object) -> int:
    return WEIGHTS_BYTES if _loaded else 0


def _statistics(*_: object) -> dict[str, int]:
    """Asked whenever vLLM looks at memory: the neighbour goes while it profiles."""
    if _loaded and _neighbour:
        driver, handle = _neighbour.pop()
        driver.destroy(handle, NEIGHBOUR_BYTES)
        events.append("neighbour frees")
    if _loaded and _starting and not _starting_weights:
        driver = _vmm.CudaDriver("cuda:0")
        _starting_weights.append((driver, driver.create(STARTING_BYTES)))
        events.append("another engine loads")
    return defaultdict(int, {"reserved_bytes.all.peak": 2 * _torch_reserves()})


def other_engine_ends() -> None:
    """The one that started beside this one."""
    for place in _starting:
        place.close()
    for driver, handle in _starting_weights:
        driver.destroy(handle, STARTING_BYTES)
    _starting.clear()
    _starting_weights.clear()


def _stand_in_for_torch() -> None:
    """Before vLLM's worker is imported: kvelastic wraps one of these then."""
    accelerator = torch.accelerator
    nothing: Callable[..., None] = lambda *_, **__: None  # noqa: E731
    accelerator.set_device_index = accelerator.reset_peak_memory_stats = nothing
    accelerator.device_count = lambda: 1
    accelerator.current_device_index = lambda: 0
    accelerator.memory_stats = _statistics
    accelerator.memory_reserved = _torch_reserves
    accelerator.memory_allocated = accelerator.max_memory_allocated = lambda *_: 0
    torch.cuda.memory.get_allocator_backend = lambda: "expandable"
    torch.cuda.synchronize = nothing


class _Platform:
    """`current_platform` in the modules that ask whether this is a GPU."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        answers = {"is_cuda_alike": True, "is_cuda": True, "is_cpu": False}
        if name in answers:
            return lambda: answers[name]
        if name in ("is_integrated_gpu", "check_if_supports_dtype"):
            return lambda *_: None
        if name == "logical_device_id_to_visible_device_id":
            return lambda index: index
        return getattr(self._real, name)


class _Torch:
    """`torch` in gpu_worker.py: its `torch.device("cuda:0")` is the processor."""

    def __getattr__(self, name: str) -> Any:
        return (lambda *_: torch.device("cpu")) if name == "device" else getattr(torch, name)


class _SleepAllocator:
    """Of vLLM's CuMemAllocator what its worker needs: pools by name, sleep and wake."""

    def get_current_usage(self) -> int:
        return 0

    @contextlib.contextmanager
    def use_memory_pool(self, tag: str) -> Iterator[None]:
        _pools.append(tag)
        try:
            yield
        finally:
            _pools.pop()

    def suspend(self, level: int) -> None:
        events.append(f"weights sleep at level {level}")

    def resume(self, tags: list[str] | None) -> None:
        used = simulated_memory()
        events.append(f"weights wake, {(used[1] - used[0]) >> 20} MiB of the device are used")


_stand_in_for_torch()
if "TEST_TRITON" in os.environ:
    interpret_triton(os.environ["TEST_TRITON"])
import vllm.v1.worker.cpu.shm  # noqa: E402, F401  vLLM's own stand-ins for the V2 runner

torch.accelerator.get_memory_info = simulated_memory
from vllm import SamplingParams  # noqa: E402
from vllm.utils import mem_utils, torch_utils  # noqa: E402
from vllm.v1.worker import gpu_worker  # noqa: E402


class GpuWorkerOnCpu(gpu_worker.Worker):
    def __init__(self, vllm_config: Any, *arguments: Any, **named: Any) -> None:
        gpu_worker.torch = _Torch()
        for module in (gpu_worker, mem_utils):
            module.current_platform = _Platform(module.current_platform)
        gpu_worker.kernel_warmup = lambda _: None
        gpu_worker.get_mem_allocator_instance = _SleepAllocator
        vllm_config.model_config.enable_cumem_allocator = True
        vllm_config.kernel_config.enable_jit_warmup = True  # on the processor vLLM skips it
        # Of the sampler's kernels Triton's interpreter runs those for temperature 0, no grammars.
        SamplingParams.for_sampler_warmup = lambda: SamplingParams(temperature=0, max_tokens=8)
        worker_device.open_driver, tensors.whole_range = seams.open_driver, self._whole_range
        worker_device.model_name = lambda worker: "simulated GPU"
        torch_utils.current_stream = self._current_stream
        if NEIGHBOUR_BYTES:
            driver = _vmm.CudaDriver("cuda:0")
            _neighbour.append((driver, driver.create(NEIGHBOUR_BYTES)))
        if STARTING_BYTES:
            driver = _vmm.CudaDriver("cuda:0")
            settings = config.load()
            _starting.append(
                ledger.join(
                    driver.uuid,
                    group=settings.ledger,
                    capacity_bytes=int(driver.total_bytes * settings.gpu_utilization),
                    name="another_engine",
                    uuid=os.urandom(16),
                    reserve_bytes=STARTING_BYTES,
                )
            )
        super().__init__(vllm_config, *arguments, **named)
        self._sleep_mode_backend = _SleepAllocator()

    def _whole_range(self, memory: Any) -> torch.Tensor:
        events.append(f"arena, in the pools {_pools}")
        return seams.whole_range(memory)

    def _current_stream(self) -> Any:
        global stream
        stream = stream or seams.compute_streams(self)[0]
        return SimpleNamespace(cuda_stream=stream, synchronize=lambda: None)

    def init_device(self) -> None:
        was = self.device_config.device_type
        self.device_config.device_type = "cuda"
        try:
            super().init_device()
        finally:
            self.device_config.device_type = was

    def load_model(self, **named: Any) -> None:
        super().load_model(**named)
        _loaded.append(True)

    def sample_tokens(self, grammar_output: Any) -> Any:
        return super().sample_tokens(None)
