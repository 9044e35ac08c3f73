// What an address is: the attributes of pointers.
#include <cstring>

#include "api.h"
#include "call.h"
#include "context.h"
#include "memory.h"

using namespace kvsim;

namespace {

template <class Value>
CUresult put(void* data, Value value) {
  std::memcpy(data, &value, sizeof value);
  return CUDA_SUCCESS;
}

/// `place` is zero for an address that is none of this driver's.
CUresult attribute(void* data, int which, CUdeviceptr address, const Place& place, bool known) {
  switch (which) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      return put(data, place.context);
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      return put(data, known ? unsigned{CU_MEMORYTYPE_DEVICE} : 0U);
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      return put(data, known ? address : CUdeviceptr{0});
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      return put(data, static_cast<void*>(nullptr));
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
      return put(data, 0U);
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      return put(data, std::uint64_t{place.handle});
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      return put(data, 0U);
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      return put(data, known ? place.device : -2);
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
      return put(data, 0U);
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      return put(data, place.range_base);
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      return put(data, place.range_bytes);
    case CU_POINTER_ATTRIBUTE_MAPPED:
      return put(data, place.mapped ? 1U : 0U);
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
      return put(data, std::uint64_t{place.exportable ? 1U : 0U});
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
      return put(data, place.rdma ? 1U : 0U);
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
      return put(data, static_cast<int>(place.access));
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
      return put(data, static_cast<void*>(nullptr));
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
      return put(data, place.mapping_bytes);
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
      return put(data, place.mapping_base);
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
      return put(data, std::uint64_t{place.handle});
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

}  // namespace

KVSIM_API CUresult cuPointerGetAttribute(void* data, CUpointer_attribute which,
                                         CUdeviceptr address) {
  return call(Function::cuPointerGetAttribute, Needs::kInit, [&] {
    const std::lock_guard lock(driver_mutex());
    Place place{};
    if (data == nullptr || !memory().find(address, &place)) return CUDA_ERROR_INVALID_VALUE;
    return attribute(data, which, address, place, true);
  });
}

// An address that the driver does not know is an error above, and a row of zeros here.
KVSIM_API CUresult cuPointerGetAttributes(unsigned count, const CUpointer_attribute* which,
                                          void** data, CUdeviceptr address) {
  return call(Function::cuPointerGetAttributes, Needs::kInit, [&] {
    if (which == nullptr || data == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const std::lock_guard lock(driver_mutex());
    Place place{};
    const bool known = memory().find(address, &place);
    for (unsigned i = 0; i < count; ++i) {
      const CUresult result = attribute(data[i], which[i], address, place, known);
      if (result != CUDA_SUCCESS) return result;
    }
    return CUDA_SUCCESS;
  });
}

KVSIM_API CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, std::size_t* bytes,
                                           CUdeviceptr address) {
  return call(Function::cuMemGetAddressRange_v2, Needs::kContext, [&] {
    const std::lock_guard lock(driver_mutex());
    Place place{};
    if (!memory().find(address, &place) || !place.mapped) return CUDA_ERROR_NOT_FOUND;
    const bool plain = place.context != nullptr;
    if (base != nullptr) *base = plain ? place.range_base : place.mapping_base;
    if (bytes != nullptr) *bytes = plain ? place.range_bytes : place.mapping_bytes;
    return CUDA_SUCCESS;
  });
}
