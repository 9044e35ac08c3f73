"""Copies: what the processor cannot read, how far rows may lie apart, and what returns early."""

from __future__ import annotations

import ctypes
import signal

import pytest
from simdriver import MIB, PAGE, CudaError, Driver, run, start

LEGACY = 0
HOST, DEVICE = 1, 2
MAX_PITCH = 11
GIB = 1 << 30


class End(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_size_t),
        ("y", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("host", ctypes.c_void_p),
        ("device", ctypes.c_uint64),
        ("array", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t),
    )


class Copy2D(ctypes.Structure):
    _fields_ = (
        ("source", End),
        ("target", End),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


def read(gpu: Driver, address: int, size: int) -> bytes:
    back = ctypes.create_string_buffer(size)
    gpu.call("cuMemcpyDtoH_v2", back, address, size)
    return back.raw


@pytest.mark.parametrize("state", ["access", "unmapped"])
def test_cpu_access_to_device_memory_faults(state: str) -> None:
    def body(_channel: object) -> None:
        gpu = Driver().start()
        address, _ = gpu.mapped(2)
        if state == "unmapped":
            gpu.call("cuMemUnmap", address, 2 * PAGE)
        ctypes.string_at(address + PAGE, 1)

    assert start(body, KVSIM_UNREADABLE="1").killed_by() == signal.SIGSEGV


def test_driver_copies_reach_memory_unreadable_by_cpu() -> None:
    def body() -> list[object]:
        gpu = Driver().start()
        address, handles = gpu.mapped(3)
        gpu.call("cuMemcpyHtoD_v2", address + PAGE - 2, b"abcd", 4)
        gpu.call("cuMemcpyDtoD_v2", address + 2 * PAGE, address + PAGE - 2, 4)
        gpu.call("cuMemsetD8_v2", address + 2 * PAGE, 7, 1)
        found: list[object] = [read(gpu, address + 2 * PAGE, 4).hex()]
        gpu.call("cuMemUnmap", address, 3 * PAGE)
        try:
            read(gpu, address, 1)
        except CudaError as error:
            found.append(error.name)
        gpu.map(address + PAGE, handles[2])  # contents stay with their handle
        gpu.set_access(address + PAGE)
        found.append(read(gpu, address + PAGE, 4).hex())
        gpu.call("cuMemUnmap", address + PAGE, PAGE)
        gpu.call("cuMemAddressFree", address, 3 * PAGE)
        for handle in handles:
            gpu.call("cuMemRelease", handle)
        return [*found, gpu.live()]

    nothing = {"ranges": 0, "handles": 0, "allocations": 0, "mappings": 0}
    there = b"\x07bcd".hex()
    expected = [there, "CUDA_ERROR_INVALID_VALUE", there, nothing]
    assert run(body, KVSIM_UNREADABLE="1") == expected


def test_row_pitch_is_bounded_by_the_maximum() -> None:
    def body() -> list[object]:
        gpu = Driver().start()
        most = gpu.get("cuDeviceGetAttribute", MAX_PITCH, 0, kind=ctypes.c_int)
        address = gpu.reserve(6 * GIB)
        for offset in (0, most + 1, 3 * GIB):
            gpu.map(address + offset, gpu.create())
            gpu.set_access(address + offset)
        host = ctypes.create_string_buffer(16)
        answers = []
        for pitch in (most + 1, 3 * GIB):
            source = End(type=DEVICE, device=address, pitch=pitch)
            target = End(type=HOST, host=ctypes.addressof(host), pitch=8)
            copy = Copy2D(source, target, 8, 2)
            answers.append(gpu.ask("cuMemcpy2DAsync_v2", ctypes.byref(copy), LEGACY))
        return [most, *answers]

    refused = "CUDA_ERROR_INVALID_VALUE"
    assert run(body) == [(1 << 31) - 1, refused, refused]


@pytest.mark.parametrize("call", ["cuMemcpyDtoD_v2", "cuMemcpy"])
def test_device_to_device_copy_is_asynchronous(call: str) -> None:
    def body() -> list[str]:
        gpu = Driver().start()
        address, _ = gpu.mapped()
        gpu.call("cuMemcpyHtoD_v2", address, b"abcd", 4)
        gpu.call("kvsim_hold_stream", LEGACY)
        gpu.call(call, address + MIB, address, 4)
        before = ctypes.string_at(address + MIB, 4).hex()
        gpu.call("kvsim_release_stream", LEGACY)
        return [before, ctypes.string_at(address + MIB, 4).hex()]

    assert run(body) == [bytes(4).hex(), b"abcd".hex()]
