"""libcuda's own virtual memory calls through ctypes: the floor that kvelastic is compared with.

    cuda = BareCuda()       # whichever libcuda.so.1 the loader finds: simulated or real
    address, handle = cuda.reserve(2 << 20), cuda.create(2 << 20)
    cuda.map(address, 2 << 20, handle)

The methods have the names and arguments of `_vmm.Driver`, so that one loop can time either. ctypes
itself costs about a microsecond a call; `ctypes_us` says how much on this machine.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from typing import Final

_PINNED: Final = 1
_ON_DEVICE: Final = 1
_READ_WRITE: Final = 3


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("win32", c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", c_int))


_SIGNATURES: Final = {
    "cuInit": (ctypes.c_uint,),
    "cuDriverGetVersion": (c_void_p,),
    "cuDeviceGet": (c_void_p, c_int),
    "cuDevicePrimaryCtxRetain": (c_void_p, c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuGetErrorName": (c_int, c_void_p),
    "cuMemGetInfo_v2": (c_void_p, c_void_p),
    "cuMemAddressReserve": (c_void_p, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemCreate": (c_void_p, c_size_t, c_void_p, c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemSetAccess": (c_uint64, c_size_t, c_void_p, c_size_t),
    "cuMemUnmap": (c_uint64, c_size_t),
}


class CudaError(Exception):
    """A call answered something else than success; the text names both."""


class BareCuda:
    """Device 0 with its primary context current in the thread that made this."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        for name, arguments in _SIGNATURES.items():
            getattr(self._library, name).argtypes = arguments
        self._check("cuInit", self._library.cuInit(0))
        device, context = c_int(), c_void_p()
        self._check("cuDeviceGet", self._library.cuDeviceGet(byref(device), 0))
        code = self._library.cuDevicePrimaryCtxRetain(byref(context), device)
        self._check("cuDevicePrimaryCtxRetain", code)
        self._check("cuCtxSetCurrent", self._library.cuCtxSetCurrent(context))
        self._properties = _Properties(type=_PINNED, location=_Location(_ON_DEVICE, device.value))
        self._access = _Access(_Location(_ON_DEVICE, device.value), _READ_WRITE)

    def _check(self, call: str, code: int) -> None:
        if code == 0:
            return
        name = ctypes.c_char_p()
        self._library.cuGetErrorName(code, byref(name))
        raise CudaError(f"{call}: {name.value.decode() if name.value else code}")

    def reserve(self, bytes_: int) -> int:
        address = c_uint64()
        code = self._library.cuMemAddressReserve(byref(address), bytes_, 0, 0, 0)
        self._check("cuMemAddressReserve", code)
        return address.value

    def release(self, address: int, bytes_: int) -> None:
        self._check("cuMemAddressFree", self._library.cuMemAddressFree(address, bytes_))

    def create(self, bytes_: int) -> int:
        handle = c_uint64()
        self._check(
            "cuMemCreate",
            self._library.cuMemCreate(byref(handle), bytes_, byref(self._properties), 0),
        )
        return handle.value

    def destroy(self, handle: int, bytes_: int) -> None:
        self._check("cuMemRelease", self._library.cuMemRelease(handle))

    def map(self, address: int, bytes_: int, handle: int) -> None:
        self._check("cuMemMap", self._library.cuMemMap(address, bytes_, 0, handle, 0))

    def set_access(self, address: int, bytes_: int) -> None:
        self._check(
            "cuMemSetAccess", self._library.cuMemSetAccess(address, bytes_, byref(self._access), 1)
        )

    def unmap(self, address: int, bytes_: int) -> None:
        self._check("cuMemUnmap", self._library.cuMemUnmap(address, bytes_))

    def free_bytes(self) -> int:
        """What nobody holds on the device."""
        free, total = c_size_t(), c_size_t()
        self._check("cuMemGetInfo", self._library.cuMemGetInfo_v2(byref(free), byref(total)))
        return free.value

    def driver_version(self) -> str:
        """The CUDA version of the driver, such as 13.0."""
        version = c_int()
        self._check("cuDriverGetVersion", self._library.cuDriverGetVersion(byref(version)))
        return f"{version.value // 1000}.{version.value % 1000 // 10}"

    def ctypes_us(self, calls: int = 2000) -> float:
        """Microseconds of the cheapest call there is: what ctypes adds to each of the others."""
        version, samples = c_int(), []
        for _ in range(calls):
            start = time.perf_counter_ns()
            self._library.cuDriverGetVersion(byref(version))
            samples.append((time.perf_counter_ns() - start) / 1000)
        return statistics.median(samples)
