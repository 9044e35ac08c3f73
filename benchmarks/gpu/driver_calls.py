"""Any driver call by its name, on the GPU or on the simulated driver; and work that takes time.

cuda = DriverCalls()
stream = cuda.new_stream()
with cuda.busy(stream, 1.0):              # a kernel of about a second is queued in the stream
    print(cuda.ask("cuStreamQuery", stream))      # CUDA_ERROR_NOT_READY
"""

from __future__ import annotations

import ctypes
import importlib.util
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.vmm.bare_cuda import BareCuda, CudaError

NON_BLOCKING = 1
GLOBAL, RELAXED = 0, 2
"""Modes of a capture."""
SUCCESS = "CUDA_SUCCESS"
SHORTEST = 0.8
"""Work of so many seconds may take this part of it: clocks change."""
NOT_READY = "CUDA_ERROR_NOT_READY"
_HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@dataclass
class Work:
    """Work in a stream, which lasts until this moment (monotonic) at least."""

    lasts_until: float


class DriverCalls(BareCuda):
    """Device 0; its primary context is current in the thread that made this."""

    def __init__(self) -> None:
        super().__init__()
        # Functions of its own: those of the floor have the types of their parameters.
        self._any = ctypes.CDLL("libcuda.so.1")
        self._running: list[Any] = []

    def ask(self, function: str, *arguments: Any) -> str:
        """Calls; the result's name. Integers are passed as 64 bits: all parameters survive that."""
        passed = [ctypes.c_uint64(a) if isinstance(a, int) else a for a in arguments]
        code = getattr(self._any, function)(*passed)
        text = ctypes.c_char_p()
        self._any.cuGetErrorName(code, ctypes.byref(text))
        return text.value.decode() if text.value else str(code)

    def call(self, function: str, *arguments: Any) -> None:
        """The same; raises `CudaError` for anything but success."""
        if (answer := self.ask(function, *arguments)) != SUCCESS:
            raise CudaError(f"{function}: {answer}")

    def get(self, function: str, *arguments: Any, kind: Any = ctypes.c_uint64) -> Any:
        """Calls with a place for the first parameter; what stands there then."""
        place = kind()
        self.call(function, ctypes.byref(place), *arguments)
        return getattr(place, "value", place)

    def has(self, function: str) -> bool:
        return hasattr(self._any, function)

    def new_stream(self, flags: int = NON_BLOCKING) -> int:
        """By default one that the legacy default stream does not order, as frameworks have."""
        return int(self.get("cuStreamCreate", flags))

    def attribute(self, number: int) -> int:
        return int(self.get("cuDeviceGetAttribute", number, 0, kind=ctypes.c_int))

    def begin_capture(self, stream: int, mode: int = GLOBAL) -> None:
        self.call("cuStreamBeginCapture_v2", stream, mode)

    def end_capture(self, stream: int) -> str:
        graph = ctypes.c_void_p()
        answer = self.ask("cuStreamEndCapture", stream, ctypes.byref(graph))
        if graph.value:
            self.call("cuGraphDestroy", graph.value)
        return answer

    def exchange_mode(self, mode: int) -> int:
        """This thread's mode from now on; returns the one before."""
        place = ctypes.c_int(mode)
        self.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(place))
        return place.value

    def fill(self, address: int, value: int, count: int, stream: int) -> str:
        """Queues a write of `count` bytes."""
        return self.ask("cuMemsetD8Async", address, value, count, stream)

    def read(self, address: int, count: int) -> bytes:
        back = ctypes.create_string_buffer(count)
        self.call("cuMemcpyDtoH_v2", back, address, count)
        return back.raw

    def write(self, address: int, data: bytes) -> None:
        self.call("cuMemcpyHtoD_v2", address, data, len(data))

    def error(self) -> str:
        """What the context answers once all is done: success, or the error of a kernel."""
        return self.ask("cuCtxSynchronize")

    @contextmanager
    def busy(self, stream: int, seconds: float) -> Iterator[Work]:
        """Queues work of about `seconds`, and does not wait for its end.

        A kernel where torch has the GPU; else a function of the host, which a stream waits for as
        it does for a kernel. The simulated driver holds the stream for as long as the block lasts.
        """
        work = Work(time.monotonic() + SHORTEST * seconds)
        if self.has("kvsim_hold_stream"):
            self.call("kvsim_hold_stream", stream)
        elif has_torch():
            spin(stream, seconds)
        else:
            function = _HostFunction(lambda _: time.sleep(seconds))
            self._running.append(function)  # it must outlive its call
            self.call("cuLaunchHostFunc", stream, function, None)
        try:
            yield work
        finally:
            if self.has("kvsim_release_stream"):
                work.lasts_until = time.monotonic()
                self.call("kvsim_release_stream", stream)


def has_torch() -> bool:
    """Whether this process can launch kernels with torch."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def spin(stream: int, seconds: float) -> None:
    """A kernel that takes about so long."""
    import torch

    # Of a pointer that is null torch makes another stream of its pool.
    there = torch.cuda.ExternalStream(stream) if stream else torch.cuda.default_stream()
    with torch.cuda.stream(there):
        torch.cuda._sleep(int(seconds * _cycles_a_second()))


_cycles: list[float] = []


def _cycles_a_second() -> float:
    """Measured until it stays the same: an idle GPU's clock takes some milliseconds to go up."""
    if not _cycles:
        import torch

        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1000)
        found = [0.0]
        for _ in range(20):
            begin.record()
            torch.cuda._sleep(50_000_000)
            end.record()
            end.synchronize()
            found.append(50_000_000 / begin.elapsed_time(end) * 1000)
            if abs(found[-1] - found[-2]) < 0.02 * found[-1]:
                break
        _cycles.append(found[-1])
    return _cycles[0]
