// Virtual memory management, by its driver names. The rules are in memory.cpp.
#include "api.h"
#include "call.h"
#include "context.h"
#include "machine.h"
#include "memory.h"
#include "settings.h"
#include "visible_devices.h"

using namespace kvsim;

namespace {

/// A call of this file: not on a device without VMM, and, under KVSIM_STRICT_CONTEXT, not on a
/// thread without a context (real drivers do these calls without one).
template <class Body>
CUresult vmm(Function function, Body body) {
  return vmm_call(function, [&](Work& work) {
    if (settings().no_vmm) return CUDA_ERROR_NOT_SUPPORTED;
    if (settings().strict_context) {
      if (const CUresult result = check_current_context(); result != CUDA_SUCCESS) return result;
    }
    return body(work);
  });
}

int descriptor(void* os_handle) {
  return static_cast<int>(reinterpret_cast<std::intptr_t>(os_handle));
}

}  // namespace

KVSIM_API CUresult cuMemGetAllocationGranularity(std::size_t* bytes,
                                                 const CUmemAllocationProp* prop,
                                                 CUmemAllocationGranularity_flags option) {
  return vmm(Function::cuMemGetAllocationGranularity, [&](Work&) {
    if (bytes == nullptr || prop == nullptr || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
        prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
        (option != CU_MEM_ALLOC_GRANULARITY_MINIMUM &&
         option != CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (!is_device(prop->location.id)) return CUDA_ERROR_INVALID_DEVICE;
    *bytes = Machine::instance().granularity_bytes();
    return CUDA_SUCCESS;
  });
}

KVSIM_API CUresult cuMemAddressReserve(CUdeviceptr* address, std::size_t bytes,
                                       std::size_t alignment, CUdeviceptr hint,
                                       unsigned long long flags) {
  return vmm(Function::cuMemAddressReserve,
             [&](Work&) { return memory().reserve(address, bytes, alignment, hint, flags); });
}

KVSIM_API CUresult cuMemAddressFree(CUdeviceptr address, std::size_t bytes) {
  return vmm(Function::cuMemAddressFree,
             [&](Work&) { return memory().free_range(address, bytes); });
}

KVSIM_API CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, std::size_t bytes,
                               const CUmemAllocationProp* prop, unsigned long long flags) {
  return vmm(Function::cuMemCreate, [&](Work& work) {
    work.granules = bytes / Machine::instance().granularity_bytes();
    return memory().create(handle, bytes, prop, flags);
  });
}

KVSIM_API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  return vmm(Function::cuMemRelease, [&](Work&) { return memory().release(handle); });
}

KVSIM_API CUresult cuMemMap(CUdeviceptr address, std::size_t bytes, std::size_t offset,
                            CUmemGenericAllocationHandle handle, unsigned long long flags) {
  return vmm(Function::cuMemMap, [&](Work& work) {
    return memory().map(address, bytes, offset, handle, flags, &work);
  });
}

KVSIM_API CUresult cuMemUnmap(CUdeviceptr address, std::size_t bytes) {
  return vmm(Function::cuMemUnmap,
             [&](Work& work) { return memory().unmap(address, bytes, &work); });
}

KVSIM_API CUresult cuMemSetAccess(CUdeviceptr address, std::size_t bytes,
                                  const CUmemAccessDesc* descriptions, std::size_t count) {
  return vmm(Function::cuMemSetAccess, [&](Work& work) {
    return memory().set_access(address, bytes, descriptions, count, &work);
  });
}

KVSIM_API CUresult cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location,
                                  CUdeviceptr address) {
  return vmm(Function::cuMemGetAccess,
             [&](Work&) { return memory().get_access(flags, location, address); });
}

KVSIM_API CUresult cuMemExportToShareableHandle(void* shareable,
                                                CUmemGenericAllocationHandle handle,
                                                CUmemAllocationHandleType type,
                                                unsigned long long flags) {
  return vmm(Function::cuMemExportToShareableHandle, [&](Work&) {
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags != 0) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    return memory().export_fd(static_cast<int*>(shareable), handle);
  });
}

KVSIM_API CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle,
                                                  void* os_handle, CUmemAllocationHandleType type) {
  return vmm(Function::cuMemImportFromShareableHandle, [&](Work&) {
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
    return memory().import_fd(handle, descriptor(os_handle));
  });
}

KVSIM_API CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle,
                                               void* address) {
  return vmm(Function::cuMemRetainAllocationHandle, [&](Work&) {
    return memory().retain(handle, reinterpret_cast<CUdeviceptr>(address));
  });
}

KVSIM_API CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* prop,
                                                          CUmemGenericAllocationHandle handle) {
  return vmm(Function::cuMemGetAllocationPropertiesFromHandle,
             [&](Work&) { return memory().properties(prop, handle); });
}
