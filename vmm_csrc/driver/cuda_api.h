// Loads libcuda.so.1 on first use. The module is not linked to it and also loads on machines
// without it.
#pragma once

#include <string>

#include "base/status.h"
#include "driver/cuda_abi.h"

namespace kvelastic::cuda {

/// The driver's functions. Member names are those of cuda.h without "cu".
struct Api {
  Result (*Init)(unsigned flags);
  Result (*DriverGetVersion)(int* version);
  Result (*DeviceGetCount)(int* count);
  Result (*DeviceGet)(Device* device, int ordinal);
  Result (*DeviceGetUuid)(Uuid* uuid, Device device);          ///< of the whole GPU
  Result (*DeviceGetInstanceUuid)(Uuid* uuid, Device device);  ///< of a MIG instance, if it is one
  Result (*DeviceGetAttribute)(int* value, int attribute, Device device);
  Result (*DeviceTotalMem)(std::size_t* bytes, Device device);
  Result (*DevicePrimaryCtxRetain)(Context* context, Device device);
  Result (*DevicePrimaryCtxRelease)(Device device);
  Result (*CtxPushCurrent)(Context context);
  Result (*CtxPopCurrent)(Context* context);
  Result (*MemGetInfo)(std::size_t* free_bytes, std::size_t* total_bytes);
  Result (*MemGetAllocationGranularity)(std::size_t* bytes, const AllocationProperties*,
                                        int option);
  Result (*MemAddressReserve)(Address*, std::size_t bytes, std::size_t alignment, Address hint,
                              unsigned long long flags);
  Result (*MemAddressFree)(Address address, std::size_t bytes);
  Result (*MemCreate)(AllocationHandle*, std::size_t bytes, const AllocationProperties*,
                      unsigned long long flags);
  Result (*MemRelease)(AllocationHandle handle);
  Result (*MemMap)(Address address, std::size_t bytes, std::size_t offset, AllocationHandle handle,
                   unsigned long long flags);
  Result (*MemUnmap)(Address address, std::size_t bytes);
  Result (*MemSetAccess)(Address address, std::size_t bytes, const AccessDescriptor*,
                         std::size_t count);
  Result (*MemExportToShareableHandle)(void* shareable, AllocationHandle handle, int type,
                                       unsigned long long flags);
  Result (*MemImportFromShareableHandle)(AllocationHandle*, void* shareable, int type);
  Result (*ThreadExchangeStreamCaptureMode)(int* mode);
  Result (*StreamCreate)(Stream* stream, unsigned flags);
  Result (*StreamDestroy)(Stream stream);
  Result (*StreamGetCtx)(Stream stream, Context* context);
  Result (*StreamIsCapturing)(Stream stream, int* status);
  Result (*MemcpyAsync)(Address to, Address from, std::size_t bytes, Stream stream);
  Result (*Memcpy2DAsync)(const Copy2D* copy, Stream stream);
  Result (*MemHostRegister)(void* memory, std::size_t bytes, unsigned flags);
  Result (*MemHostUnregister)(void* memory);
  Result (*EventCreate)(Event* event, unsigned flags);
  Result (*EventDestroy)(Event event);
  Result (*EventRecord)(Event event, Stream stream);
  Result (*EventQuery)(Event event);
  Result (*GetErrorName)(Result code, const char** name);

  /// "cuMemMap: CUDA_ERROR_UNKNOWN (999)".
  std::string describe(const char* call, Result code) const;
};

/// Loads the library and resolves every function, once per process; later calls return the same
/// result. Fails with kDeviceUnavailable if there is no library, it lacks a function (named in the
/// message), or the driver does not initialise.
kvelastic::Result<const Api*> load();

}  // namespace kvelastic::cuda
