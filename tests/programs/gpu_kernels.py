"""Kernels of the simulated driver that a test holds back, and captures; see test_kernels.py.

gpu = Gpu(); gpu.hold(); gpu.read(address, 64)     # a kernel that reads, behind one that lasts
memory.unmap([1])                                  # waits until gpu.release()
"""

from __future__ import annotations

import ctypes

from kvelastic import _vmm

SUCCESS = 0
NON_BLOCKING = 1
GLOBAL, THREAD_LOCAL = 0, 1


class Gpu:
    """The simulated driver's own calls, and a stream for kernels in the primary context."""

    def __init__(self, flags: int = NON_BLOCKING) -> None:
        self.driver = _vmm.CudaDriver("cuda")
        self.sim = ctypes.CDLL("libcuda.so.1")
        self.sim.kvsim_count.restype = ctypes.c_uint64
        self.sim.kvsim_live_mappings.restype = ctypes.c_uint64
        self._context = ctypes.c_void_p()
        assert self.sim.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), 0) == SUCCESS
        self.enter()
        self.stream = self.new_stream(flags)

    def enter(self) -> None:
        """Makes the context this thread's own, as a framework does."""
        assert self.sim.cuCtxSetCurrent(self._context) == SUCCESS

    def new_stream(self, flags: int = NON_BLOCKING) -> int:
        made = ctypes.c_void_p()
        assert self.sim.cuStreamCreate(ctypes.byref(made), flags) == SUCCESS
        return made.value or 0

    def _on(self, stream: int | None) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.stream if stream is None else stream)

    def hold(self, stream: int | None = None) -> None:
        """Starts a kernel that lasts until `release`."""
        assert self.sim.kvsim_hold_stream(self._on(stream)) == SUCCESS

    def release(self, stream: int | None = None) -> None:
        assert self.sim.kvsim_release_stream(self._on(stream)) == SUCCESS

    def read(self, address: int, size_bytes: int, stream: int | None = None) -> None:
        """Queues a kernel that reads these bytes."""
        at, size = ctypes.c_uint64(address), ctypes.c_size_t(size_bytes)
        assert self.sim.kvsim_enqueue_read(self._on(stream), at, size) == SUCCESS

    def error(self) -> int:
        """What the context answers: 0, or 700 after a read of what was not mapped."""
        return int(self.sim.cuCtxGetDevice(ctypes.byref(ctypes.c_int())))

    def begin_capture(self, mode: int = GLOBAL, stream: int | None = None) -> None:
        assert self.sim.cuStreamBeginCapture_v2(self._on(stream), mode) == SUCCESS

    def end_capture(self, stream: int | None = None) -> int:
        """0, or 901 where a call has ended the capture."""
        return int(self.sim.cuStreamEndCapture(self._on(stream), ctypes.byref(ctypes.c_void_p())))

    def count(self, function: str) -> int:
        """Calls of a driver function in this process."""
        return int(self.sim.kvsim_count(function.encode()))
