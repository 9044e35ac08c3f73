"""Our few declarations of CUDA's interface, against cuda.h where there is one."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import needs
import pytest
from processes import PROGRAMS, run_python
from simulated_machine import SimulatedMachine

pytestmark = pytest.mark.slow


ROOT = Path(__file__).parents[2]

PROGRAM = """
#include <cuda.h>
#include <cudaTypedefs.h>
#include "driver/cuda_api.h"
#include <cstddef>
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
static_assert(CUDA_ERROR_CAPTURED_EVENT == kErrorCapturedEvent);
static_assert(CU_MEM_HANDLE_TYPE_NONE == 0);
static_assert(CU_MEMHOSTREGISTER_PORTABLE == kHostRegisterPortable);
static_assert(CU_MEMORYTYPE_HOST == kMemoryTypeHost);
static_assert(CU_MEMORYTYPE_DEVICE == kMemoryTypeDevice);

using P = CUmemAllocationProp;
using O = AllocationProperties;
static_assert(sizeof(P) == sizeof(O) && offsetof(P, type) == offsetof(O, type));
static_assert(offsetof(P, requestedHandleTypes) == offsetof(O, requested_handle_types));
static_assert(offsetof(P, location) == offsetof(O, location));
static_assert(offsetof(CUmemLocation, id) == offsetof(Location, id));
static_assert(offsetof(P, win32HandleMetaData) == offsetof(O, win32_handle_meta_data));
static_assert(offsetof(P, allocFlags) == offsetof(O, flags));
static_assert(offsetof(P, allocFlags.compressionType) == offsetof(O, flags.compression_type));
static_assert(offsetof(P, allocFlags.gpuDirectRDMACapable) ==
              offsetof(O, flags.gpu_direct_rdma_capable));
static_assert(offsetof(P, allocFlags.usage) == offsetof(O, flags.usage));
static_assert(sizeof(CUmemAccessDesc) == sizeof(AccessDescriptor));
static_assert(offsetof(CUmemAccessDesc, flags) == offsetof(AccessDescriptor, flags));

using C = CUDA_MEMCPY2D;
using D = Copy2D;
static_assert(sizeof(C) == sizeof(D));
static_assert(offsetof(C, srcXInBytes) == offsetof(D, from.x_bytes));
static_assert(offsetof(C, srcY) == offsetof(D, from.y));
static_assert(offsetof(C, srcMemoryType) == offsetof(D, from.memory_type));
static_assert(offsetof(C, srcHost) == offsetof(D, from.host));
static_assert(offsetof(C, srcDevice) == offsetof(D, from.device));
static_assert(offsetof(C, srcArray) == offsetof(D, from.array));
static_assert(offsetof(C, srcPitch) == offsetof(D, from.pitch_bytes));
static_assert(offsetof(C, dstXInBytes) == offsetof(D, to.x_bytes));
static_assert(offsetof(C, dstY) == offsetof(D, to.y));
static_assert(offsetof(C, dstMemoryType) == offsetof(D, to.memory_type));
static_assert(offsetof(C, dstHost) == offsetof(D, to.host));
static_assert(offsetof(C, dstDevice) == offsetof(D, to.device));
static_assert(offsetof(C, dstArray) == offsetof(D, to.array));
static_assert(offsetof(C, dstPitch) == offsetof(D, to.pitch_bytes));
static_assert(offsetof(C, WidthInBytes) == offsetof(D, width_bytes));
static_assert(offsetof(C, Height) == offsetof(D, height));

// A function's type with every pointer, every enumeration and every 64-bit number being one type.
template <typename T> struct Strip {
  using type = std::conditional_t<
      std::is_pointer_v<T>, void*,
      std::conditional_t<std::is_enum_v<T>, int,
                         std::conditional_t<std::is_same_v<T, unsigned long long>, unsigned long,
                                            T>>>;
};
template <typename F> struct Plain;
template <typename R, typename... A> struct Plain<R (*)(A...)> {
  using type = typename Strip<R>::type (*)(typename Strip<A>::type...);
};
#define SAME(ours, theirs) \\
  static_assert(std::is_same_v<Plain<decltype(Api::ours)>::type, Plain<theirs>::type>, #theirs)
"""


VERSION = re.compile(r"constexpr int (k\w+Version) = (\d+);")
SYMBOL = re.compile(r'\{"(cu\w+)", slot\(api\.(\w+)\)(?:, (k\w+Version))?\}')
TYPEDEF = re.compile(r"\*PFN_(cu\w+?)_v(\d+)\)")


def comparisons(include: Path) -> str:
    """A line for each function of the loader: against its type in the version that is asked for."""
    loader = (ROOT / "vmm_csrc" / "driver" / "cuda_api.cpp").read_text()
    asked = {name: int(number) for name, number in VERSION.findall(loader)}
    there: dict[str, list[int]] = {}
    for name, version in TYPEDEF.findall((include / "cudaTypedefs.h").read_text()):
        there.setdefault(name, []).append(int(version))
    lines = []
    for symbol, ours, version in SYMBOL.findall(loader):
        most = asked[version or "kCudaVersion"]
        newest = max(each for each in there[symbol] if each <= most)
        lines.append(f"SAME({ours}, PFN_{symbol}_v{newest});")
    assert len(lines) == loader.count("slot(api."), "a symbol that the pattern does not know"
    return "\n".join(lines)


@needs.cuda_h
def test_declarations_match_cuda_h(tmp_path: Path) -> None:
    include = needs.find_cuda_include()
    assert include is not None
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler is not None
    source = tmp_path / "abi.cpp"
    source.write_text(PROGRAM + comparisons(include))
    done = subprocess.run(
        [compiler, "-std=c++20", "-fsyntax-only", f"-I{include}", f"-I{ROOT / 'vmm_csrc'}", source],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[:3000]


@needs.cuda_python
def test_cuda_python_maps_an_exported_page(tmp_path: Path) -> None:
    """A client that is not ours, of the interface that we have written down by hand."""
    path = needs.find_cuda_python()
    with SimulatedMachine(tmp_path, memory_bytes=64 << 20) as machine:
        environment = dict(machine.environment)
        if path:
            environment["PYTHONPATH"] = path
        ran = run_python(PROGRAMS / "cuda_python_page.py", environment=environment)
        assert ran.stdout == "the same page\n"
        assert machine.used_bytes() == 0
