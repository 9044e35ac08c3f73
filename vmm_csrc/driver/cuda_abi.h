// The part of cuda.h that kvelastic uses: types and constants of the driver's ABI, which NVIDIA
// keeps stable. The build therefore needs no CUDA. tests/driver compares these with cuda.h where
// it is installed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvelastic::cuda {

using Result = int;                      // CUresult
using Device = int;                      // CUdevice
using Context = void*;                   // CUcontext
using Stream = void*;                    // CUstream
using Event = void*;                     // CUevent
using Address = std::uint64_t;           // CUdeviceptr
using AllocationHandle = std::uint64_t;  // CUmemGenericAllocationHandle

inline constexpr Result kSuccess = 0;
inline constexpr Result kErrorOutOfMemory = 2;
inline constexpr Result kErrorNoDevice = 100;
inline constexpr Result kErrorNotReady = 600;
inline constexpr Result kErrorCapturedEvent = 907;

inline constexpr int kAttributeMaxPitch = 11;
inline constexpr int kAttributeVmmSupported = 102;
inline constexpr int kAttributePosixFdSupported = 103;
inline constexpr int kAttributeRdmaWithVmmSupported = 110;

inline constexpr int kAllocationPinned = 1;
inline constexpr int kHandleTypePosixFd = 1;
inline constexpr int kLocationDevice = 1;
inline constexpr int kAccessReadWrite = 3;
inline constexpr int kGranularityMinimum = 0;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kStreamDefault = 0;
inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr int kCaptureModeRelaxed = 2;
inline constexpr int kCaptureStatusNone = 0;

/// True for the legacy default stream: null or CU_STREAM_LEGACY.
inline bool is_legacy(Stream stream) {
  return reinterpret_cast<std::uintptr_t>(stream) <= 1;
}

struct Uuid {
  unsigned char bytes[16];
};

struct Location {
  int type;
  int id;
};

struct AllocationProperties {
  int type;
  int requested_handle_types;
  Location location;
  void* win32_handle_meta_data;
  struct {
    unsigned char compression_type;
    unsigned char gpu_direct_rdma_capable;
    unsigned short usage;
    unsigned char reserved[4];
  } flags;
};

struct AccessDescriptor {
  Location location;
  int flags;
};

inline constexpr unsigned kHostRegisterPortable = 1;
inline constexpr int kMemoryTypeHost = 1;
inline constexpr int kMemoryTypeDevice = 2;

/// CUDA_MEMCPY2D: rows of one width; each end has its own pitch.
struct Copy2D {
  struct End {
    std::size_t x_bytes;
    std::size_t y;
    int memory_type;
    void* host;
    Address device;
    void* array;
    std::size_t pitch_bytes;
  };
  End from, to;
  std::size_t width_bytes;
  std::size_t height;
};

static_assert(sizeof(Copy2D) == 128);
static_assert(sizeof(AllocationProperties) == 32 && sizeof(AccessDescriptor) == 12);
static_assert(offsetof(AllocationProperties, flags) == 24);

}  // namespace kvelastic::cuda
