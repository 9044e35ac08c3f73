"""Our few declarations of CUDA's interface, against cuda.h where there is one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import needs
import pytest

pytestmark = pytest.mark.slow


ROOT = Path(__file__).parents[2]

PROGRAM = """
#include <cuda.h>
#include "cuda_api.h"
#include <type_traits>
using namespace kvelastic::cuda;

static_assert(sizeof(CUresult) == sizeof(Result) && sizeof(CUdevice) == sizeof(Device));
static_assert(sizeof(CUdeviceptr) == sizeof(Address));
static_assert(sizeof(CUmemGenericAllocationHandle) == sizeof(AllocationHandle));
static_assert(sizeof(CUcontext) == sizeof(Context) && sizeof(CUstream) == sizeof(Stream));
static_assert(sizeof(CUuuid) == sizeof(Uuid) && sizeof(CUmemLocation) == sizeof(Location));

static_assert(CUDA_SUCCESS == kSuccess && CUDA_ERROR_OUT_OF_MEMORY == kErrorOutOfMemory);
static_assert(CUDA_ERROR_NO_DEVICE == kErrorNoDevice && CUDA_ERROR_NOT_READY == kErrorNotReady);
static_assert(CU_DEVICE_ATTRIBUTE_MAX_PITCH == kAttributeMaxPitch);
static_assert(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED == kAttributeVmmSupported);
static_assert(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED ==
              kAttributePosixFdSupported);
static_assert(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED ==
              kAttributeRdmaWithVmmSupported);
static_assert(CU_MEM_ALLOCATION_TYPE_PINNED == kAllocationPinned);
static_assert(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR == kHandleTypePosixFd);
static_assert(CU_MEM_LOCATION_TYPE_DEVICE == kLocationDevice);
static_assert(CU_MEM_ACCESS_FLAGS_PROT_READWRITE == kAccessReadWrite);
static_assert(CU_MEM_ALLOC_GRANULARITY_MINIMUM == kGranularityMinimum);
static_assert(CU_EVENT_DISABLE_TIMING == kEventDisableTiming);
static_assert(CU_STREAM_NON_BLOCKING == kStreamNonBlocking);
static_assert(CU_STREAM_DEFAULT == kStreamDefault);
static_assert(CU_STREAM_CAPTURE_MODE_RELAXED == kCaptureModeRelaxed);
static_assert(CU_STREAM_CAPTURE_STATUS_NONE == kCaptureStatusNone);

using P = CUmemAllocationProp;
using O = AllocationProperties;
static_assert(sizeof(P) == sizeof(O) && offsetof(P, type) == offsetof(O, type));
static_assert(offsetof(P, requestedHandleTypes) == offsetof(O, requested_handle_types));
static_assert(offsetof(P, location) == offsetof(O, location));
static_assert(offsetof(P, allocFlags) == offsetof(O, flags));
static_assert(offsetof(P, allocFlags.gpuDirectRDMACapable) ==
              offsetof(O, flags.gpu_direct_rdma_capable));
static_assert(sizeof(CUmemAccessDesc) == sizeof(AccessDescriptor));
static_assert(offsetof(CUmemAccessDesc, flags) == offsetof(AccessDescriptor, flags));

// As many parameters, each of the same size: what the binary interface is made of.
template <typename... A>
constexpr bool same_sizes(CUresult (*)(A...), auto ours) {
  return []<typename... B>(Result (*)(B...)) {
    if constexpr (sizeof...(A) != sizeof...(B)) {
      return false;
    } else {
      return ((sizeof(A) == sizeof(B)) && ...);
    }
  }(ours);
}
#define SAME(name) static_assert(same_sizes(&cu##name, decltype(Api::name){}))
SAME(Init); SAME(DriverGetVersion); SAME(DeviceGetCount); SAME(DeviceGet); SAME(DeviceGetUuid);
SAME(DeviceGetAttribute); SAME(DeviceTotalMem); SAME(DevicePrimaryCtxRetain);
SAME(DevicePrimaryCtxRelease); SAME(CtxPushCurrent); SAME(CtxPopCurrent); SAME(MemGetInfo);
SAME(MemGetAllocationGranularity); SAME(MemAddressReserve); SAME(MemAddressFree); SAME(MemCreate);
SAME(MemRelease); SAME(MemMap); SAME(MemUnmap); SAME(MemSetAccess);
SAME(MemExportToShareableHandle); SAME(MemImportFromShareableHandle); SAME(EventCreate);
static_assert(same_sizes(&cuDeviceGetUuid, decltype(Api::DeviceGetInstanceUuid){}));
SAME(ThreadExchangeStreamCaptureMode); SAME(StreamCreate);
SAME(StreamDestroy); SAME(StreamIsCapturing);
SAME(MemcpyAsync); SAME(Memcpy2DAsync); SAME(MemHostRegister); SAME(MemHostUnregister);
SAME(EventDestroy); SAME(EventRecord); SAME(EventQuery); SAME(GetErrorName);
"""


@needs.cuda_h
def test_our_declarations_are_cuda_hs(tmp_path: Path) -> None:
    include = needs.find_cuda_include()
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler is not None
    source = tmp_path / "abi.cpp"
    source.write_text(PROGRAM)
    done = subprocess.run(
        [compiler, "-std=c++20", "-fsyntax-only", f"-I{include}", f"-I{ROOT / 'vmm_csrc'}", source],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[:3000]
