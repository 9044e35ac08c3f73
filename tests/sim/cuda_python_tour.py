"""A tour of the simulated driver with cuda-python's own bindings: run by test_sim_lookup.py."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from cuda.bindings import driver

PAGES = 64


def ok(answer: tuple[Any, ...]) -> Any:
    """The values behind a CUresult that must be success."""
    result, *values = answer
    assert result == driver.CUresult.CUDA_SUCCESS, result
    return values[0] if len(values) == 1 else values


def refused(answer: tuple[Any, ...], result: Any) -> None:
    assert answer[0] == result, answer[0]


ok(driver.cuInit(0))
device = ok(driver.cuDeviceGet(0))
assert ok(driver.cuDeviceGetCount()) == 1
assert ok(driver.cuDeviceGetName(64, device)).rstrip(b"\0 ").startswith(b"Simulated CUDA device")
assert bytes(ok(driver.cuDeviceGetUuid(device)).bytes)[:9] == b"kvelastic"
vmm = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
assert ok(driver.cuDeviceGetAttribute(vmm, device)) == 1
refused(driver.cuMemGetInfo(), driver.CUresult.CUDA_ERROR_INVALID_CONTEXT)
context = ok(driver.cuDevicePrimaryCtxRetain(device))
ok(driver.cuCtxSetCurrent(context))
free, total = ok(driver.cuMemGetInfo())
assert free == total == ok(driver.cuDeviceTotalMem(device)) == 256 << 20

prop = driver.CUmemAllocationProp()
prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
prop.location.id = 0
fd_type = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
prop.requestedHandleTypes = fd_type
minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
page = ok(driver.cuMemGetAllocationGranularity(prop, minimum))
assert page == 2 << 20

address = int(ok(driver.cuMemAddressReserve(PAGES * page, 0, 0, 0)))
handles = [ok(driver.cuMemCreate(page, prop, 0)) for _ in range(PAGES)]
for i, handle in enumerate(handles):
    ok(driver.cuMemMap(address + i * page, page, 0, handle, 0))
access = driver.CUmemAccessDesc()
access.location = prop.location
access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
ok(driver.cuMemSetAccess(address, PAGES * page, [access], 1))
assert ok(driver.cuMemGetInfo()) == [total - PAGES * page, total]

stream = ok(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
event = ok(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
control = ctypes.CDLL("libcuda.so.1")  # the very library that cuda.bindings has open
assert control.kvsim_hold_stream(ctypes.c_void_p(int(stream))) == 0
ok(driver.cuMemsetD8Async(address, 7, PAGES * page, stream))
ok(driver.cuEventRecord(event, stream))
refused(driver.cuEventQuery(event), driver.CUresult.CUDA_ERROR_NOT_READY)
assert control.kvsim_release_stream(ctypes.c_void_p(int(stream))) == 0
ok(driver.cuEventSynchronize(event))
assert ctypes.string_at(address + PAGES * page - 4, 4) == b"\7\7\7\7"
data = bytearray(16)
ok(driver.cuMemcpyDtoH(data, address, 16))
assert data == b"\7" * 16

descriptor = int(ok(driver.cuMemExportToShareableHandle(handles[0], fd_type, 0)))
imported = ok(driver.cuMemImportFromShareableHandle(descriptor, fd_type))
os.close(descriptor)
ok(driver.cuMemRelease(imported))

refused(driver.cuMemUnmap(address + 1, page), driver.CUresult.CUDA_ERROR_INVALID_VALUE)
ok(driver.cuMemUnmap(address, PAGES * page))
for handle in handles:
    ok(driver.cuMemRelease(handle))
ok(driver.cuMemAddressFree(address, PAGES * page))
assert ok(driver.cuMemGetInfo()) == [total, total]
ok(driver.cuEventDestroy(event))
ok(driver.cuStreamDestroy(stream))
ok(driver.cuDevicePrimaryCtxRelease(device))
control.kvsim_count.restype = ctypes.c_uint64
assert control.kvsim_count(b"cuMemMap") == PAGES
assert control.kvsim_count(b"cuMemSetAccess") == 1
print("whole tour")
