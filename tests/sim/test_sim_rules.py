"""Each rule of virtual memory management, with the error that breaking it answers."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable

import pytest
from simdriver import (
    MIB,
    PAGE,
    READ,
    AccessDesc,
    AllocationProp,
    Driver,
    Location,
    prop,
    run,
    start,
)

INVALID_VALUE = "CUDA_ERROR_INVALID_VALUE"
INVALID_DEVICE = "CUDA_ERROR_INVALID_DEVICE"


def value() -> object:
    return ctypes.byref(ctypes.c_uint64())


def create(gpu: Driver, bytes_: int, wanted: AllocationProp, flags: int = 0) -> str:
    return gpu.ask("cuMemCreate", value(), bytes_, ctypes.byref(wanted), flags)


def with_type(type_: int) -> AllocationProp:
    wanted = prop()
    wanted.type = type_
    return wanted


def at(location_type: int, id_: int = 0) -> AllocationProp:
    wanted = prop()
    wanted.location = Location(location_type, id_)
    return wanted


# Each: what is done on a driver that is up, and what it answers.
RULES: dict[str, tuple[Callable[[Driver], str], str]] = {
    "reserve nothing": (lambda g: g.ask("cuMemAddressReserve", value(), 0, 0, 0, 0), INVALID_VALUE),
    "reserve a part of a granule": (
        lambda g: g.ask("cuMemAddressReserve", value(), PAGE + 4096, 0, 0, 0),
        INVALID_VALUE,
    ),
    "reserve with an alignment that is no power of two": (
        lambda g: g.ask("cuMemAddressReserve", value(), PAGE, 3 * MIB, 0, 0),
        INVALID_VALUE,
    ),
    "reserve with flags": (
        lambda g: g.ask("cuMemAddressReserve", value(), PAGE, 0, 0, 1),
        INVALID_VALUE,
    ),
    "reserve more than there is": (
        lambda g: g.ask("cuMemAddressReserve", value(), 1 << 60, 0, 0, 0),
        "CUDA_ERROR_OUT_OF_MEMORY",
    ),
    "create nothing": (lambda g: create(g, 0, prop()), INVALID_VALUE),
    "create a part of a granule": (lambda g: create(g, MIB, prop()), INVALID_VALUE),
    "create with flags": (lambda g: create(g, PAGE, prop(), 1), INVALID_VALUE),
    "create what is not pinned": (lambda g: create(g, PAGE, with_type(0)), INVALID_VALUE),
    "create nowhere": (lambda g: create(g, PAGE, at(0)), INVALID_VALUE),
    "create on the host": (lambda g: create(g, PAGE, at(3)), "CUDA_ERROR_NOT_SUPPORTED"),
    "create on a device that is not there": (lambda g: create(g, PAGE, prop(1)), INVALID_DEVICE),
    "create more than the device has": (
        lambda g: create(g, 66 * MIB, prop()),
        "CUDA_ERROR_OUT_OF_MEMORY",
    ),
    "granularity of a device that is not there": (
        lambda g: g.ask("cuMemGetAllocationGranularity", value(), ctypes.byref(prop(-1)), 0),
        INVALID_DEVICE,
    ),
    "free a range that is none": (
        lambda g: g.ask("cuMemAddressFree", 1 << 30, PAGE),
        INVALID_VALUE,
    ),
    "free a range by another size": (
        lambda g: g.ask("cuMemAddressFree", g.reserve(2 * PAGE), PAGE),
        INVALID_VALUE,
    ),
    "free a part of a range": (
        lambda g: g.ask("cuMemAddressFree", g.reserve(2 * PAGE) + PAGE, PAGE),
        INVALID_VALUE,
    ),
    "free a range with a mapping in it": (
        lambda g: g.ask("cuMemAddressFree", g.mapped(1)[0], PAGE),
        INVALID_VALUE,
    ),
    "map a handle that is none": (
        lambda g: g.ask("cuMemMap", g.reserve(PAGE), PAGE, 0, 12345, 0),
        INVALID_VALUE,
    ),
    "map at an offset": (
        lambda g: g.ask("cuMemMap", g.reserve(PAGE), PAGE, PAGE, g.create(2 * PAGE), 0),
        INVALID_VALUE,
    ),
    "map with flags": (
        lambda g: g.ask("cuMemMap", g.reserve(PAGE), PAGE, 0, g.create(), 1),
        INVALID_VALUE,
    ),
    "map a part of a handle": (
        lambda g: g.ask("cuMemMap", g.reserve(PAGE), PAGE, 0, g.create(2 * PAGE), 0),
        INVALID_VALUE,
    ),
    "map more than a handle": (
        lambda g: g.ask("cuMemMap", g.reserve(2 * PAGE), 2 * PAGE, 0, g.create(), 0),
        INVALID_VALUE,
    ),
    "map between granules": (
        lambda g: g.ask("cuMemMap", g.reserve(2 * PAGE) + MIB, PAGE, 0, g.create(), 0),
        INVALID_VALUE,
    ),
    "map outside every range": (
        lambda g: g.ask("cuMemMap", 1 << 30, PAGE, 0, g.create(), 0),
        INVALID_VALUE,
    ),
    "map over the end of a range": (
        lambda g: g.ask("cuMemMap", g.reserve(PAGE), 2 * PAGE, 0, g.create(2 * PAGE), 0),
        INVALID_VALUE,
    ),
    "map where something is mapped": (
        lambda g: g.ask("cuMemMap", g.mapped(1)[0], PAGE, 0, g.create(), 0),
        INVALID_VALUE,
    ),
    "map over the front of a mapping": (
        lambda g: g.ask("cuMemMap", behind(g), 2 * PAGE, 0, g.create(2 * PAGE), 0),
        INVALID_VALUE,
    ),
    "unmap what is not mapped": (
        lambda g: g.ask("cuMemUnmap", g.reserve(PAGE), PAGE),
        INVALID_VALUE,
    ),
    "unmap a part of a mapping": (
        lambda g: g.ask("cuMemUnmap", g.mapped(1, 2 * PAGE)[0], PAGE),
        INVALID_VALUE,
    ),
    "unmap the second half of a mapping": (
        lambda g: g.ask("cuMemUnmap", g.mapped(1, 2 * PAGE)[0] + PAGE, PAGE),
        INVALID_VALUE,
    ),
    "unmap over a hole": (lambda g: g.ask("cuMemUnmap", with_hole(g), 3 * PAGE), INVALID_VALUE),
    "unmap nothing": (lambda g: g.ask("cuMemUnmap", g.mapped(1)[0], 0), INVALID_VALUE),
    "access to what is not mapped": (
        lambda g: g.ask("cuMemSetAccess", g.reserve(PAGE), PAGE, g.access(), 1),
        INVALID_VALUE,
    ),
    "access over a hole": (
        lambda g: g.ask("cuMemSetAccess", with_hole(g), 3 * PAGE, g.access(), 1),
        INVALID_VALUE,
    ),
    "access to a part of a mapping": (
        lambda g: g.ask("cuMemSetAccess", g.mapped(1, 2 * PAGE)[0], PAGE, g.access(), 1),
        INVALID_VALUE,
    ),
    "access for nobody": (
        lambda g: g.ask("cuMemSetAccess", g.mapped(1)[0], PAGE, g.access(), 0),
        INVALID_VALUE,
    ),
    "access of another device": (
        lambda g: g.ask("cuMemSetAccess", g.mapped(1)[0], PAGE, g.access(1), 1),
        INVALID_DEVICE,
    ),
    "access of a kind that is none": (
        lambda g: g.ask("cuMemSetAccess", g.mapped(1)[0], PAGE, g.access(0, 2), 1),
        INVALID_VALUE,
    ),
    "release a handle that is none": (lambda g: g.ask("cuMemRelease", 12345), INVALID_VALUE),
    "release a handle twice": (lambda g: g.ask("cuMemRelease", released(g)), INVALID_VALUE),
    "map a released handle": (
        lambda g: g.ask("cuMemMap", g.reserve(PAGE), PAGE, 0, released(g), 0),
        INVALID_VALUE,
    ),
    "the handle of what is not mapped": (
        lambda g: g.ask("cuMemRetainAllocationHandle", value(), g.reserve(PAGE)),
        INVALID_VALUE,
    ),
    "export what was not made for it": (
        lambda g: g.ask("cuMemExportToShareableHandle", value(), g.create(), 1, 0),
        INVALID_VALUE,
    ),
    "import what is no descriptor": (
        lambda g: g.ask("cuMemImportFromShareableHandle", value(), 999, 1),
        INVALID_VALUE,
    ),
    "import a descriptor of another file": (
        lambda g: g.ask("cuMemImportFromShareableHandle", value(), 2, 1),
        INVALID_VALUE,
    ),
    "unmap plain memory": (
        lambda g: g.ask("cuMemUnmap", g.get("cuMemAlloc_v2", PAGE), PAGE),
        INVALID_VALUE,
    ),
    "free what cuMemAlloc did not give": (
        lambda g: g.ask("cuMemFree_v2", g.mapped(1)[0]),
        INVALID_VALUE,
    ),
    "copy to an address without access": (
        lambda g: g.ask("cuMemsetD8_v2", without_access(g), 0, PAGE),
        INVALID_VALUE,
    ),
    "copy over the end of a mapping": (
        lambda g: g.ask("cuMemsetD8_v2", g.mapped(1)[0] + MIB, 0, PAGE),
        INVALID_VALUE,
    ),
    "a device that is not there": (lambda g: g.ask("cuDeviceGet", value(), 7), INVALID_DEVICE),
    "an attribute that is none": (
        lambda g: g.ask("cuDeviceGetAttribute", value(), 100000, 0),
        INVALID_VALUE,
    ),
    "a stream that is none": (lambda g: g.ask("cuStreamQuery", 12345), "CUDA_ERROR_INVALID_HANDLE"),
    "an event that is none": (lambda g: g.ask("cuEventQuery", 12345), "CUDA_ERROR_INVALID_HANDLE"),
    "a context that is none": (
        lambda g: g.ask("cuCtxSetCurrent", 12345),
        "CUDA_ERROR_INVALID_CONTEXT",
    ),
}


def behind(gpu: Driver) -> int:
    """A range of three pages whose second is mapped."""
    address = gpu.reserve(3 * PAGE)
    gpu.map(address + PAGE, gpu.create())
    return address


def with_hole(gpu: Driver) -> int:
    """A range of three pages whose first and last are mapped."""
    address = gpu.reserve(3 * PAGE)
    gpu.map(address, gpu.create())
    gpu.map(address + 2 * PAGE, gpu.create())
    return address


def without_access(gpu: Driver) -> int:
    address = gpu.reserve(PAGE)
    gpu.map(address, gpu.create())
    return address


def released(gpu: Driver) -> int:
    handle = gpu.create()
    gpu.call("cuMemRelease", handle)
    return handle


@pytest.mark.parametrize("rule", RULES)
def test_violated_rule_returns_its_error(rule: str) -> None:
    act, expected = RULES[rule]

    def body() -> str:
        return act(Driver().start())

    assert run(body, KVSIM_MEMORY="64M") == expected


def test_calls_before_cuinit_return_not_initialized() -> None:
    def body() -> list[str]:
        gpu = Driver()
        return [
            gpu.ask("cuDeviceGetCount", value()),
            gpu.ask("cuMemAddressReserve", value(), PAGE, 0, 0, 0),
            gpu.ask("cuCtxGetCurrent", value()),
            gpu.ask("cuDriverGetVersion", value()),
        ]

    assert run(body) == ["CUDA_ERROR_NOT_INITIALIZED"] * 3 + ["CUDA_SUCCESS"]


def test_only_non_vmm_calls_need_a_context() -> None:
    def body() -> list[str]:
        gpu = Driver()
        gpu.call("cuInit", 0)
        address, handles = gpu.mapped(1)
        gpu.call("cuMemUnmap", address, PAGE)
        gpu.call("cuMemRelease", handles[0])
        names = ("cuMemGetInfo_v2", "cuStreamCreate", "cuEventCreate", "cuMemAlloc_v2")
        return [gpu.ask(name, value(), value()) for name in names]

    assert run(body) == ["CUDA_ERROR_INVALID_CONTEXT"] * 4


def test_strict_machine_requires_context_in_vmm_calls() -> None:
    def body() -> list[str]:
        gpu = Driver()
        gpu.call("cuInit", 0)
        before = gpu.ask("cuMemAddressReserve", value(), PAGE, 0, 0, 0)
        return [before, gpu.start().ask("cuMemAddressReserve", value(), PAGE, 0, 0, 0)]

    assert run(body, KVSIM_STRICT_CONTEXT="1") == ["CUDA_ERROR_INVALID_CONTEXT", "CUDA_SUCCESS"]


@pytest.mark.parametrize(
    "state", ["reserved", "mapped", "access", "read-only", "unmapped", "freed"]
)
def test_touch_without_access_faults(state: str) -> None:
    def body(_channel: object) -> None:
        gpu = Driver().start()
        address = gpu.reserve(PAGE)
        if state != "reserved":
            gpu.map(address, gpu.create())
        if state in {"access", "unmapped", "freed"}:
            gpu.set_access(address)
        if state == "read-only":
            gpu.set_access(address, flags=READ)
            assert ctypes.string_at(address, 4) == b"\0\0\0\0"
        if state in {"unmapped", "freed"}:
            gpu.call("cuMemUnmap", address, PAGE)
        if state == "freed":
            gpu.call("cuMemAddressFree", address, PAGE)
        ctypes.memset(address, 1, 1)

    assert start(body).killed_by() == (None if state == "access" else signal.SIGSEGV)


def test_failed_call_changes_nothing() -> None:
    def body() -> list[object]:
        gpu = Driver().start()
        address, handles = gpu.mapped(2)
        ctypes.memset(address, 7, 2 * PAGE)
        before = gpu.live(), gpu.free_bytes()
        assert gpu.ask("cuMemUnmap", address, PAGE + MIB) == INVALID_VALUE
        assert gpu.ask("cuMemMap", address, PAGE, 0, handles[0], 0) == INVALID_VALUE
        both = (AccessDesc * 2)(AccessDesc(Location(1, 0), 0), AccessDesc(Location(1, 5), 3))
        assert gpu.ask("cuMemSetAccess", address, 2 * PAGE, both, 2) == INVALID_DEVICE
        assert (gpu.live(), gpu.free_bytes()) == before
        return [ctypes.string_at(address + PAGE, 1).hex(), len(handles)]

    assert run(body) == ["07", 2]


def test_correct_teardown_leaves_nothing_behind() -> None:
    def body() -> dict[str, int]:
        gpu = Driver().start()
        total = gpu.free_bytes()
        address, handles = gpu.mapped(8)
        assert gpu.free_bytes() == total - 8 * PAGE
        ctypes.memset(address, 1, 8 * PAGE)
        gpu.call("cuMemUnmap", address, 4 * PAGE)  # several whole mappings in one call
        gpu.call("cuMemUnmap", address + 4 * PAGE, 4 * PAGE)
        for handle in handles:
            gpu.call("cuMemRelease", handle)
        gpu.call("cuMemAddressFree", address, 8 * PAGE)
        assert gpu.free_bytes() == total
        return gpu.live()

    assert run(body) == {"ranges": 0, "handles": 0, "allocations": 0, "mappings": 0}


def test_memory_lives_until_released_and_unmapped_everywhere() -> None:
    def body() -> None:
        gpu = Driver().start()
        total = gpu.free_bytes()
        first, second = gpu.reserve(PAGE), gpu.reserve(PAGE)
        handle = gpu.create()
        gpu.map(first, handle)
        gpu.map(second, handle)
        gpu.set_access(first)
        gpu.set_access(second)
        ctypes.memset(first, 9, 1)
        assert ctypes.string_at(second, 1) == b"\x09"
        gpu.call("cuMemRelease", handle)
        assert gpu.ask("cuMemRelease", handle) == INVALID_VALUE
        assert gpu.get("cuMemRetainAllocationHandle", second + MIB) == handle
        gpu.call("cuMemUnmap", first, PAGE)
        gpu.call("cuMemUnmap", second, PAGE)
        assert gpu.free_bytes() == total - PAGE
        gpu.call("cuMemRelease", handle)
        assert gpu.free_bytes() == total

    run(body)


def test_recycled_memory_is_zero_unless_poisoned() -> None:
    def body() -> str:
        gpu = Driver().start()
        for _ in range(2):
            address, handles = gpu.mapped(4)  # all that there is
            found = ctypes.string_at(address + 3 * PAGE, 1).hex()
            ctypes.memset(address, 1, 4 * PAGE)
            gpu.call("cuMemUnmap", address, 4 * PAGE)
            for handle in handles:
                gpu.call("cuMemRelease", handle)
        return found

    assert run(body, KVSIM_MEMORY="8M") == "00"
    assert run(body, KVSIM_MEMORY="8M", KVSIM_POISON="1") == "a5"


def test_contents_stay_with_the_handle() -> None:
    def body() -> str:
        gpu = Driver().start()
        address = gpu.reserve(8 * PAGE)
        handle = gpu.create(2 * PAGE)
        gpu.map(address, handle, 2 * PAGE)
        gpu.set_access(address, 2 * PAGE)
        ctypes.memset(address + 3 * MIB, 5, 1)
        gpu.call("cuMemUnmap", address, 2 * PAGE)
        gpu.map(address + 4 * PAGE, handle, 2 * PAGE)
        gpu.set_access(address + 4 * PAGE, 2 * PAGE)
        return ctypes.string_at(address + 4 * PAGE + 3 * MIB, 1).hex()

    assert run(body) == "05"


@pytest.mark.slow
def test_scattered_memory_serves_a_large_handle() -> None:
    def body() -> str:
        gpu = Driver().start()
        handles = [gpu.create() for _ in range(8)]
        for handle in handles[::2]:
            gpu.call("cuMemRelease", handle)
        address, _ = gpu.mapped(1, 4 * PAGE)  # four granules with others between them
        data = bytes(i % 251 for i in range(4 * PAGE))
        gpu.call("cuMemcpyHtoD_v2", address, data, len(data))
        assert ctypes.string_at(address, len(data)) == data
        return gpu.ask("cuMemCreate", value(), PAGE, ctypes.byref(prop()), 0)

    assert run(body, KVSIM_MEMORY="16M") == "CUDA_ERROR_OUT_OF_MEMORY"


def test_granularity_is_configurable() -> None:
    def body() -> list[object]:
        gpu = Driver().start()
        asked = gpu.get("cuMemGetAllocationGranularity", ctypes.byref(prop()), 0)
        return [asked, create(gpu, PAGE, prop()), gpu.reserve(asked) % asked]

    assert run(body, KVSIM_GRANULARITY="4M") == [4 * MIB, INVALID_VALUE, 0]


def test_reservations_are_aligned_and_hints_are_optional() -> None:
    def body() -> None:
        gpu = Driver().start()
        assert gpu.reserve(PAGE, 64 * MIB) % (64 * MIB) == 0
        taken = gpu.reserve(2 * PAGE)
        assert gpu.reserve(PAGE, 0, taken) not in (taken, taken + PAGE)
        gpu.call("cuMemAddressFree", taken, 2 * PAGE)
        assert gpu.reserve(PAGE, 0, taken) == taken

    run(body)


def test_exceeded_mapping_cap_fails_set_access() -> None:
    def body() -> list[str]:
        gpu = Driver().start()
        address = gpu.reserve(4 * PAGE)
        for i in range(4):
            gpu.map(address + i * PAGE, gpu.create())
        over = gpu.ask("cuMemSetAccess", address, 4 * PAGE, gpu.access(), 1)
        touched = ctypes.c_uint64()
        gpu.call("cuMemGetAccess", ctypes.byref(touched), ctypes.byref(Location(1, 0)), address)
        assert touched.value == 0  # the first three were taken back
        within = gpu.ask("cuMemSetAccess", address, 3 * PAGE, gpu.access(), 1)
        gpu.call("cuMemUnmap", address, PAGE)  # makes room for one more
        gpu.set_access(address + 3 * PAGE)
        return [over, within]

    assert run(body, KVSIM_MAX_MAPPINGS="3") == ["CUDA_ERROR_OUT_OF_MEMORY", "CUDA_SUCCESS"]
