"""The library as a program finds it: names, versions, devices, contexts, cuda-python."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import needs
from simdriver import HERE, MIB, PAGE, Driver, library, run

SUCCESS = "CUDA_SUCCESS"


def address(gpu: Driver, name: str, version: int) -> tuple[str, int, int]:
    place, status = ctypes.c_void_p(), ctypes.c_int(-1)
    result = gpu.ask(
        "cuGetProcAddress_v2", name.encode(), ctypes.byref(place), version, 0, ctypes.byref(status)
    )
    return result, place.value or 0, status.value


def exported(gpu: Driver, name: str) -> int:
    return ctypes.cast(getattr(gpu.lib, name), ctypes.c_void_p).value or 0


def test_functions_are_found_by_base_name_and_version() -> None:
    def body() -> None:
        gpu = Driver()
        found = {
            ("cuMemMap", 12000): "cuMemMap",
            ("cuMemAlloc", 3020): "cuMemAlloc_v2",
            ("cuDeviceGetUuid", 9020): "cuDeviceGetUuid",
            ("cuDeviceGetUuid", 11030): "cuDeviceGetUuid",
            ("cuDeviceGetUuid", 13000): "cuDeviceGetUuid_v2",
            ("cuCtxCreate", 12000): "cuCtxCreate_v2",
            ("cuCtxCreate", 12050): "cuCtxCreate_v4",
            ("cuGetProcAddress", 11030): "cuGetProcAddress",
            ("cuGetProcAddress", 12000): "cuGetProcAddress_v2",
        }
        for (name, version), function in found.items():
            assert address(gpu, name, version) == (SUCCESS, exported(gpu, function), 0), name
        assert address(gpu, "cuMemMap", 9000) == (SUCCESS, 0, 2)
        assert address(gpu, "cuNothing", 12000) == (SUCCESS, 0, 1)
        assert address(gpu, "cuMemMap_v2", 12000) == (SUCCESS, 0, 1)
        assert address(gpu, "cuMemMap", 13010)[0] == "CUDA_ERROR_INVALID_VALUE"
        place = ctypes.c_void_p()
        old = [
            gpu.ask("cuGetProcAddress", name, ctypes.byref(place), 12000, 0)
            for name in (b"cuMemMap", b"cuNothing")
        ]
        assert old == [SUCCESS, "CUDA_ERROR_NOT_FOUND"]

    run(body)


def test_older_driver_lacks_newer_functions() -> None:
    def body() -> list[object]:
        gpu = Driver()
        version = gpu.get("cuDriverGetVersion", kind=ctypes.c_int)
        place = ctypes.c_void_p()
        first = gpu.ask("cuGetProcAddress", b"cuMemMap", ctypes.byref(place), 10020, 0)
        return [version, first, address(gpu, "cuMemMap", 10020)[0]]

    assert run(body, KVSIM_DRIVER_VERSION="12020") == [12020, SUCCESS, SUCCESS]
    assert run(body, KVSIM_DRIVER_VERSION="11040") == [11040, SUCCESS, "CUDA_ERROR_NOT_SUPPORTED"]
    assert run(body, KVSIM_DRIVER_VERSION="10020") == [10020, *["CUDA_ERROR_NOT_SUPPORTED"] * 2]


def test_errors_have_names_and_messages() -> None:
    def body() -> list[object]:
        gpu = Driver()
        text = ctypes.c_char_p()
        gpu.call("cuGetErrorString", 2, ctypes.byref(text))
        return [(text.value or b"").decode(), gpu.ask("cuGetErrorName", 4242, ctypes.byref(text))]

    assert run(body) == ["out of memory", "CUDA_ERROR_INVALID_VALUE"]


def test_machine_without_a_device_fails_cuinit() -> None:
    def body() -> list[str]:
        gpu = Driver()
        count = ctypes.c_int()
        return [gpu.ask("cuInit", 0), gpu.ask("cuDeviceGetCount", ctypes.byref(count))]

    expected = ["CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_NOT_INITIALIZED"]
    assert run(body, KVSIM_NO_DEVICE="1") == expected
    assert run(body, KVSIM_DEVICES="0") == expected


def test_device_without_vmm_rejects_vmm_calls() -> None:
    def body() -> list[object]:
        gpu = Driver().start()
        attribute = gpu.get("cuDeviceGetAttribute", 102, 0, kind=ctypes.c_int)
        place = ctypes.c_uint64()
        plain = gpu.get("cuMemAlloc_v2", PAGE)
        gpu.call("cuMemFree_v2", plain)
        return [attribute, gpu.ask("cuMemAddressReserve", ctypes.byref(place), PAGE, 0, 0, 0)]

    assert run(body, KVSIM_NO_VMM="1") == [0, "CUDA_ERROR_NOT_SUPPORTED"]


def test_rdma_is_rejected_if_unsupported() -> None:
    def body() -> list[object]:
        gpu = Driver().start()
        supported = gpu.get("cuDeviceGetAttribute", 110, 0, kind=ctypes.c_int)
        try:
            handle = gpu.create(rdma=True)
        except Exception as error:
            return [supported, str(error)]
        address_ = gpu.reserve(PAGE)
        gpu.map(address_, handle)
        return [supported, gpu.get("cuPointerGetAttribute", 15, address_, kind=ctypes.c_uint)]

    assert run(body) == [1, 1]
    assert run(body, KVSIM_RDMA="0") == [0, "cuMemCreate: CUDA_ERROR_NOT_SUPPORTED"]


def test_device_name_memory_and_uuid_are_reported() -> None:
    def body() -> list[object]:
        gpu = Driver().start()
        name = ctypes.create_string_buffer(64)
        gpu.call("cuDeviceGetName", name, 64, 0)
        capability = [gpu.get("cuDeviceGetAttribute", a, 0, kind=ctypes.c_int) for a in (75, 76)]
        return [name.value.decode(), gpu.get("cuDeviceTotalMem_v2", 0), capability, gpu.uuid(0)]

    uuid = b"kvelastic-sim\0\0\0".hex()
    assert run(body, KVSIM_MEMORY="96M", KVSIM_COMPUTE_CAPABILITY="80") == [
        "Simulated CUDA device",
        96 * MIB,
        [8, 0],
        uuid,
    ]
    assert run(body) == ["Simulated CUDA device", 1024 * MIB, [9, 0], uuid]


def test_primary_context_lives_while_retained() -> None:
    def body() -> list[object]:
        gpu = Driver()
        gpu.call("cuInit", 0)
        flags, active = ctypes.c_uint(), ctypes.c_int()

        def state() -> int:
            gpu.call("cuDevicePrimaryCtxGetState", 0, ctypes.byref(flags), ctypes.byref(active))
            return active.value

        states = [state()]
        gpu.start()
        gpu.start()
        states.append(state())
        plain = gpu.get("cuMemAlloc_v2", PAGE)
        gpu.call("cuDevicePrimaryCtxRelease_v2", 0)
        states.append(state())
        gpu.call("cuDevicePrimaryCtxRelease_v2", 0)
        states.append(state())
        stale = gpu.ask("cuMemFree_v2", plain)
        once_more = gpu.ask("cuDevicePrimaryCtxRelease_v2", 0)
        return [states, stale, once_more, gpu.lib.kvsim_used_bytes(0)]

    assert run(body) == [
        [0, 1, 1, 0],
        "CUDA_ERROR_CONTEXT_IS_DESTROYED",
        "CUDA_ERROR_INVALID_CONTEXT",
        0,
    ]


def test_contexts_are_a_stack() -> None:
    def body() -> list[object]:
        gpu = Driver().start()
        primary = gpu.get("cuCtxGetCurrent")
        own = gpu.get("cuCtxCreate_v2", 0, 0)
        answers: list[object] = [gpu.get("cuCtxGetCurrent") == own]
        answers.append(gpu.get("cuCtxPopCurrent_v2") == own)
        answers.append(gpu.get("cuCtxGetCurrent") == primary)
        gpu.call("cuCtxPushCurrent_v2", own)
        gpu.call("cuCtxDestroy_v2", own)
        answers.append(gpu.get("cuCtxGetCurrent") == primary)
        answers.append(gpu.ask("cuCtxPushCurrent_v2", own))
        answers.append(gpu.ask("cuCtxDestroy_v2", primary))
        return answers

    assert run(body) == [
        True,
        True,
        True,
        True,
        "CUDA_ERROR_CONTEXT_IS_DESTROYED",
        "CUDA_ERROR_INVALID_CONTEXT",
    ]


def test_pointer_attributes_are_reported() -> None:
    def body() -> list[object]:
        gpu = Driver().start()
        base, _ = gpu.mapped(2)
        inside = base + PAGE + 5

        def attribute(which: int, kind: object) -> object:
            return gpu.get("cuPointerGetAttribute", which, inside, kind=kind)

        start, size = ctypes.c_uint64(), ctypes.c_uint64()
        gpu.call("cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(size), inside)
        foreign = ctypes.c_int(7)
        unknown = gpu.ask("cuPointerGetAttribute", ctypes.byref(foreign), 9, id(gpu))
        return [
            attribute(2, ctypes.c_uint),
            attribute(9, ctypes.c_int),
            attribute(11, ctypes.c_uint64) == base,
            attribute(12, ctypes.c_uint64),
            attribute(13, ctypes.c_uint),
            attribute(16, ctypes.c_int),
            start.value == base + PAGE,
            size.value,
            unknown,
        ]

    assert run(body) == [2, 0, True, 2 * PAGE, 1, 3, True, PAGE, "CUDA_ERROR_INVALID_VALUE"]


# --- cuda.h and cuda-python, where they are


@needs.cuda_h
def test_abi_matches_cuda_h() -> None:
    include = needs.find_cuda_include()
    compiler = os.environ.get("CXX", "g++")
    done = subprocess.run(
        [compiler, "-std=c++20", "-fsyntax-only", f"-I{include}", HERE / "cuda_abi_check.cpp"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@needs.cuda_python
def test_cuda_python_runs_against_the_library() -> None:
    path = needs.find_cuda_python()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVSIM_")}
    environment |= {"LD_LIBRARY_PATH": str(library().parent), "KVSIM_MEMORY": "256M"}
    if path:
        environment["PYTHONPATH"] = path
    done = subprocess.run(
        [sys.executable, HERE / "cuda_python_tour.py"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["whole", "tour"]
