"""cuda-python maps a page that kvelastic has made; each reads what the other one has written."""

from __future__ import annotations

import os
from typing import Any

from cuda.bindings import driver as cuda

from kvelastic import _vmm

BLOCK = 4096


def called(answer: tuple[Any, ...]) -> Any:
    """What a call has returned besides its result, which must be success."""
    assert answer[0] == cuda.CUresult.CUDA_SUCCESS, answer[0]
    return answer[1] if len(answer) > 1 else None


def main() -> None:
    ours = _vmm.CudaDriver("cuda")
    size = ours.granularity_bytes
    handle = ours.create(size)
    address = ours.reserve(size)
    ours.map(address, size, handle)
    ours.set_access(address, size)
    called(cuda.cuInit(0))
    device = called(cuda.cuDeviceGet(0))
    called(cuda.cuCtxSetCurrent(called(cuda.cuDevicePrimaryCtxRetain(device))))
    fd = ours.export_page(handle)
    kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    theirs = called(cuda.cuMemImportFromShareableHandle(fd, kind))
    os.close(fd)
    at = called(cuda.cuMemAddressReserve(size, 0, 0, 0))
    called(cuda.cuMemMap(at, size, 0, theirs, 0))
    access = cuda.CUmemAccessDesc()
    access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = 0
    access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    called(cuda.cuMemSetAccess(at, size, [access], 1))

    blocks = _vmm.EngineBlocks(ours, [(address, BLOCK, BLOCK, 1, BLOCK)], size // BLOCK)
    staging = _vmm.Staging(2, BLOCK)
    written = os.urandom(BLOCK)
    staging.view(0)[:] = written
    blocks.copy_in(staging, [0], [3])
    back = bytearray(BLOCK)
    called(cuda.cuMemcpyDtoH(back, int(at) + 3 * BLOCK, BLOCK))
    assert back == written
    called(cuda.cuMemcpyHtoD(int(at) + 5 * BLOCK, written[::-1], BLOCK))
    blocks.copy_out([5], staging, [1])
    assert bytes(staging.view(1)) == written[::-1]

    called(cuda.cuMemUnmap(at, size))
    called(cuda.cuMemRelease(theirs))
    called(cuda.cuMemAddressFree(at, size))
    print("the same page", flush=True)


if __name__ == "__main__":
    main()
