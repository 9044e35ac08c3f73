// Plain memory, copies, fills, and the attributes of pointers.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "api.h"
#include "call.h"
#include "context.h"
#include "memory.h"
#include "streams.h"

using namespace kvsim;

namespace {

CUdeviceptr address_of(const void* pointer) {
  return reinterpret_cast<CUdeviceptr>(pointer);
}
/// Of either side's memory; under driver_mutex() where it is a device's.
void* pointer_to(CUdeviceptr address) {
  return memory().reach(address);
}

enum class Side { kDevice, kHost, kEither };

/// Whether a copy may read or write here. Host memory cannot be checked; addresses of a range can.
bool usable(CUdeviceptr address, std::size_t bytes, bool write, Side side) {
  if (memory().touches_range(address, bytes)) return memory().accessible(address, bytes, write);
  return side != Side::kDevice;
}

/// Does `touch` when the addresses are usable, under the lock that keeps them so. In a stream,
/// where there is nobody to answer to, unusable addresses are what they are on a GPU: the end.
template <class Check, class Touch>
bool guarded(Check check, Touch touch) {
  const std::lock_guard lock(driver_mutex());
  if (!check()) return false;
  touch();
  return true;
}

struct Copy {
  CUdeviceptr to;
  Side to_side;
  CUdeviceptr from;
  Side from_side;
  std::size_t bytes;

  bool possible() const {
    return usable(to, bytes, true, to_side) && usable(from, bytes, false, from_side);
  }
};

CUresult check_copy(const Copy& copy) {
  const std::lock_guard lock(driver_mutex());
  return copy.possible() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/// Memory of the host that is registered: copies read it when their turn in the stream comes.
std::map<CUdeviceptr, std::size_t>& registered_host() {
  static std::map<CUdeviceptr, std::size_t> ranges;
  return ranges;
}

bool is_registered(CUdeviceptr address, std::size_t bytes) {
  const std::lock_guard lock(driver_mutex());
  const auto after = registered_host().upper_bound(address);
  if (after == registered_host().begin()) return false;
  const auto& [begin, size] = *std::prev(after);
  return address + bytes <= begin + size;
}

bool is_device_address(CUdeviceptr address, std::size_t bytes) {
  const std::lock_guard lock(driver_mutex());
  return memory().touches_range(address, bytes);
}

/// Memory of the host of which a copy in a stream has what was there at the call.
bool is_pageable(CUdeviceptr address, std::size_t bytes) {
  return !is_device_address(address, bytes) && !is_registered(address, bytes);
}

bool is_within_devices(const Copy& copy) {
  return is_device_address(copy.from, copy.bytes) && is_device_address(copy.to, copy.bytes);
}

/// What lies at an address of the host now: a copy of it.
std::shared_ptr<std::vector<char>> staged_copy(CUdeviceptr from, std::size_t bytes) {
  const std::lock_guard lock(driver_mutex());
  const auto* begin = static_cast<const char*>(pointer_to(from));
  return std::make_shared<std::vector<char>>(begin, begin + bytes);
}

CUresult copy_in(CUstream stream, const Copy& copy, std::shared_ptr<std::vector<char>> staged) {
  return enqueue(stream, [copy, staged] {
    const auto move = [&] {
      const void* from = staged != nullptr ? staged->data() : pointer_to(copy.from);
      std::memmove(pointer_to(copy.to), from, copy.bytes);
    };
    if (!guarded([&] { return copy.possible(); }, move)) {
      set_sticky_error(CUDA_ERROR_ILLEGAL_ADDRESS);
    }
  });
}

CUresult copy_now(Function function, const Copy& copy) {
  return call(function, Needs::kContext, [&] {
    if (copy.bytes == 0) return CUDA_SUCCESS;
    if (const CUresult result = check_copy(copy); result != CUDA_SUCCESS) return result;
    const CUresult result = copy_in(nullptr, copy, nullptr);
    // Between two places of devices the real call returns before the copy is done.
    if (result != CUDA_SUCCESS || is_within_devices(copy)) return result;
    return synchronize_stream(nullptr);
  });
}

CUresult copy_later(Function function, const Copy& copy, CUstream stream) {
  return call(function, Needs::kContext, [&] {
    if (copy.bytes == 0) return CUDA_SUCCESS;
    if (const CUresult result = check_copy(copy); result != CUDA_SUCCESS) return result;
    // From pageable memory the driver has copied by the time it returns.
    const bool stages = is_pageable(copy.from, copy.bytes);
    return copy_in(stream, copy, stages ? staged_copy(copy.from, copy.bytes) : nullptr);
  });
}

/// One row of a strided copy; an end is of the kind that the copy says, nothing else is understood.
Copy row_of(const CUDA_MEMCPY2D& copy, std::size_t row) {
  const auto end = [&](CUmemorytype type, const void* host, CUdeviceptr device, std::size_t x,
                       std::size_t y, std::size_t pitch) {
    const CUdeviceptr base = type == CU_MEMORYTYPE_HOST ? address_of(host) : device;
    return base + (y + row) * pitch + x;
  };
  const auto side = [](CUmemorytype type) {
    return type == CU_MEMORYTYPE_HOST ? Side::kHost : Side::kDevice;
  };
  return {end(copy.dstMemoryType, copy.dstHost, copy.dstDevice, copy.dstXInBytes, copy.dstY,
              copy.dstPitch),
          side(copy.dstMemoryType),
          end(copy.srcMemoryType, copy.srcHost, copy.srcDevice, copy.srcXInBytes, copy.srcY,
              copy.srcPitch),
          side(copy.srcMemoryType), copy.WidthInBytes};
}

/// Fills `count` values of `width` bytes.
CUresult fill(Function function, CUdeviceptr to, unsigned value, std::size_t width,
              std::size_t count, CUstream stream) {
  return call(function, Needs::kContext, [&] {
    const std::size_t bytes = width * count;
    if (to % width != 0) return CUDA_ERROR_INVALID_VALUE;
    if (count == 0) return CUDA_SUCCESS;
    const auto possible = [=] { return usable(to, bytes, true, Side::kDevice); };
    if (!guarded(possible, [] {})) return CUDA_ERROR_INVALID_VALUE;
    return enqueue_kernel(stream, [=] {
      const auto write = [&] {
        auto* at = static_cast<char*>(pointer_to(to));
        for (std::size_t i = 0; i < count; ++i) std::memcpy(at + i * width, &value, width);
      };
      if (!guarded(possible, write)) set_sticky_error(CUDA_ERROR_ILLEGAL_ADDRESS);
    });
  });
}

}  // namespace

KVSIM_API CUresult cuMemAlloc_v2(CUdeviceptr* address, std::size_t bytes) {
  return call(Function::cuMemAlloc_v2, Needs::kContext, [&] {
    const std::lock_guard lock(driver_mutex());
    return memory().alloc(address, bytes, current_context());
  });
}

KVSIM_API CUresult cuMemFree_v2(CUdeviceptr address) {
  return call(Function::cuMemFree_v2, Needs::kContext, [&] {
    (void)synchronize_context();  // as the real one: nothing in flight can still read it
    const std::lock_guard lock(driver_mutex());
    return memory().free(address);
  });
}

namespace {
CUresult alloc_host(Function function, void** pointer, std::size_t bytes) {
  return call(function, Needs::kContext, [&] {
    if (pointer == nullptr || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    constexpr std::size_t kAlignment = 4096;
    *pointer = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
    return *pointer != nullptr ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
  });
}
}  // namespace

KVSIM_API CUresult cuMemAllocHost_v2(void** pointer, std::size_t bytes) {
  return alloc_host(Function::cuMemAllocHost_v2, pointer, bytes);
}

KVSIM_API CUresult cuMemHostAlloc(void** pointer, std::size_t bytes, unsigned) {
  return alloc_host(Function::cuMemHostAlloc, pointer, bytes);
}

KVSIM_API CUresult cuMemFreeHost(void* pointer) {
  return call(Function::cuMemFreeHost, Needs::kContext, [&] {
    std::free(pointer);
    return CUDA_SUCCESS;
  });
}

KVSIM_API CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, std::size_t bytes) {
  return copy_now(Function::cuMemcpy, {to, Side::kEither, from, Side::kEither, bytes});
}

KVSIM_API CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, std::size_t bytes,
                                 CUstream stream) {
  return copy_later(Function::cuMemcpyAsync, {to, Side::kEither, from, Side::kEither, bytes},
                    stream);
}

KVSIM_API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, std::size_t bytes) {
  return copy_now(Function::cuMemcpyHtoD_v2,
                  {to, Side::kDevice, address_of(from), Side::kHost, bytes});
}

KVSIM_API CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, std::size_t bytes) {
  return copy_now(Function::cuMemcpyDtoH_v2,
                  {address_of(to), Side::kHost, from, Side::kDevice, bytes});
}

KVSIM_API CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, std::size_t bytes) {
  return copy_now(Function::cuMemcpyDtoD_v2, {to, Side::kDevice, from, Side::kDevice, bytes});
}

KVSIM_API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, std::size_t bytes,
                                        CUstream stream) {
  return copy_later(Function::cuMemcpyHtoDAsync_v2,
                    {to, Side::kDevice, address_of(from), Side::kHost, bytes}, stream);
}

KVSIM_API CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, std::size_t bytes,
                                        CUstream stream) {
  return copy_later(Function::cuMemcpyDtoHAsync_v2,
                    {address_of(to), Side::kHost, from, Side::kDevice, bytes}, stream);
}

KVSIM_API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, std::size_t bytes,
                                        CUstream stream) {
  return copy_later(Function::cuMemcpyDtoDAsync_v2, {to, Side::kDevice, from, Side::kDevice, bytes},
                    stream);
}

KVSIM_API CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D* copy, CUstream stream) {
  return call(Function::cuMemcpy2DAsync_v2, Needs::kContext, [&] {
    const auto known = [](CUmemorytype type) {
      return type == CU_MEMORYTYPE_HOST || type == CU_MEMORYTYPE_DEVICE;
    };
    if (copy == nullptr || !known(copy->srcMemoryType) || !known(copy->dstMemoryType) ||
        copy->WidthInBytes > copy->srcPitch || copy->WidthInBytes > copy->dstPitch ||
        std::max(copy->srcPitch, copy->dstPitch) > kMaxPitchBytes) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (copy->WidthInBytes == 0) return CUDA_SUCCESS;
    for (std::size_t row = 0; row < copy->Height; ++row) {
      if (const CUresult result = check_copy(row_of(*copy, row)); result != CUDA_SUCCESS) {
        return result;
      }
    }
    for (std::size_t row = 0; row < copy->Height; ++row) {
      const Copy one = row_of(*copy, row);
      const bool stages = is_pageable(one.from, one.bytes);
      const auto staged = stages ? staged_copy(one.from, one.bytes) : nullptr;
      if (const CUresult result = copy_in(stream, one, staged); result != CUDA_SUCCESS) {
        return result;
      }
    }
    return CUDA_SUCCESS;
  });
}

KVSIM_API CUresult cuMemHostRegister_v2(void* pointer, std::size_t bytes, unsigned) {
  return call(Function::cuMemHostRegister_v2, Needs::kContext, [&] {
    if (pointer == nullptr || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    const std::lock_guard lock(driver_mutex());
    auto& ranges = registered_host();
    const auto next = ranges.lower_bound(address_of(pointer));
    const bool over_next = next != ranges.end() && next->first < address_of(pointer) + bytes;
    const bool over_previous =
        next != ranges.begin() &&
        std::prev(next)->first + std::prev(next)->second > address_of(pointer);
    if (over_next || over_previous) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    ranges.emplace(address_of(pointer), bytes);
    return CUDA_SUCCESS;
  });
}

KVSIM_API CUresult cuMemHostUnregister(void* pointer) {
  return call(Function::cuMemHostUnregister, Needs::kContext, [&] {
    const std::lock_guard lock(driver_mutex());
    return registered_host().erase(address_of(pointer)) == 1
               ? CUDA_SUCCESS
               : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  });
}

KVSIM_API CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, std::size_t count) {
  return fill(Function::cuMemsetD8_v2, to, value, 1, count, nullptr);
}

KVSIM_API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, std::size_t count,
                                   CUstream stream) {
  return fill(Function::cuMemsetD8Async, to, value, 1, count, stream);
}

KVSIM_API CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned value, std::size_t count) {
  return fill(Function::cuMemsetD32_v2, to, value, 4, count, nullptr);
}

KVSIM_API CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, std::size_t count,
                                    CUstream stream) {
  return fill(Function::cuMemsetD32Async, to, value, 4, count, stream);
}
