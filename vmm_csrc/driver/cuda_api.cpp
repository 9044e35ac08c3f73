#include "driver/cuda_api.h"

#include <dlfcn.h>

#include <cstdint>
#include <vector>

namespace kvelastic::cuda {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";
/// The first CUDA version with every virtual memory management function used here.
constexpr int kCudaVersion = 11030;
/// Since this version cuDeviceGetUuid distinguishes the MIG instances of a GPU.
constexpr int kMigAwareVersion = 11040;
constexpr std::uint64_t kDefaultSearch = 0;

using GetProcAddress = Result (*)(const char* symbol, void** function, int version,
                                  std::uint64_t flags);

struct Symbol {
  const char* name;
  void** slot;
  int version = kCudaVersion;
};

std::vector<Symbol> symbols_of(Api& api) {
  const auto slot = [](auto& function) { return reinterpret_cast<void**>(&function); };
  return {
      {"cuInit", slot(api.Init)},
      {"cuDriverGetVersion", slot(api.DriverGetVersion)},
      {"cuDeviceGetCount", slot(api.DeviceGetCount)},
      {"cuDeviceGet", slot(api.DeviceGet)},
      {"cuDeviceGetUuid", slot(api.DeviceGetUuid)},
      {"cuDeviceGetUuid", slot(api.DeviceGetInstanceUuid), kMigAwareVersion},
      {"cuDeviceGetAttribute", slot(api.DeviceGetAttribute)},
      {"cuDeviceTotalMem", slot(api.DeviceTotalMem)},
      {"cuDevicePrimaryCtxRetain", slot(api.DevicePrimaryCtxRetain)},
      {"cuDevicePrimaryCtxRelease", slot(api.DevicePrimaryCtxRelease)},
      {"cuCtxPushCurrent", slot(api.CtxPushCurrent)},
      {"cuCtxPopCurrent", slot(api.CtxPopCurrent)},
      {"cuMemGetInfo", slot(api.MemGetInfo)},
      {"cuMemGetAllocationGranularity", slot(api.MemGetAllocationGranularity)},
      {"cuMemAddressReserve", slot(api.MemAddressReserve)},
      {"cuMemAddressFree", slot(api.MemAddressFree)},
      {"cuMemCreate", slot(api.MemCreate)},
      {"cuMemRelease", slot(api.MemRelease)},
      {"cuMemMap", slot(api.MemMap)},
      {"cuMemUnmap", slot(api.MemUnmap)},
      {"cuMemSetAccess", slot(api.MemSetAccess)},
      {"cuMemExportToShareableHandle", slot(api.MemExportToShareableHandle)},
      {"cuMemImportFromShareableHandle", slot(api.MemImportFromShareableHandle)},
      {"cuThreadExchangeStreamCaptureMode", slot(api.ThreadExchangeStreamCaptureMode)},
      {"cuStreamCreate", slot(api.StreamCreate)},
      {"cuStreamDestroy", slot(api.StreamDestroy)},
      {"cuStreamGetCtx", slot(api.StreamGetCtx)},
      {"cuStreamIsCapturing", slot(api.StreamIsCapturing)},
      {"cuMemcpyAsync", slot(api.MemcpyAsync)},
      {"cuMemcpy2DAsync", slot(api.Memcpy2DAsync)},
      {"cuMemHostRegister", slot(api.MemHostRegister)},
      {"cuMemHostUnregister", slot(api.MemHostUnregister)},
      {"cuEventCreate", slot(api.EventCreate)},
      {"cuEventDestroy", slot(api.EventDestroy)},
      {"cuEventRecord", slot(api.EventRecord)},
      {"cuEventQuery", slot(api.EventQuery)},
      {"cuGetErrorName", slot(api.GetErrorName)},
  };
}

Error unavailable(std::string message) {
  return {Errc::kDeviceUnavailable,
          std::move(message) + "; use device=\"cpu\" for the host's memory"};
}

kvelastic::Result<const Api*> load_once() {
  // Never closed: the driver's threads outlive any caller.
  void* library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = ::dlerror();
    return unavailable(std::string("no CUDA driver: ") + (why != nullptr ? why : kLibrary));
  }
  // CUDA 12 renamed the entry point and added an argument. Every driver since 11.3 still exports
  // the old one under this name.
  auto find = reinterpret_cast<GetProcAddress>(::dlsym(library, "cuGetProcAddress"));
  if (find == nullptr) {
    return unavailable("the CUDA driver is older than 11.3: it has no cuGetProcAddress");
  }
  static Api api{};
  for (const Symbol& symbol : symbols_of(api)) {
    if (find(symbol.name, symbol.slot, symbol.version, kDefaultSearch) != kSuccess ||
        *symbol.slot == nullptr) {
      // An older driver has no separate UUIDs for MIG instances, so they cannot be distinguished.
      if (symbol.version == kMigAwareVersion) continue;
      return unavailable(std::string("the CUDA driver is too old: it has no ") + symbol.name);
    }
  }
  if (api.DeviceGetInstanceUuid == nullptr) api.DeviceGetInstanceUuid = api.DeviceGetUuid;
  if (const Result code = api.Init(0); code != kSuccess) {
    return unavailable(api.describe("cuInit", code));
  }
  return &api;
}

}  // namespace

std::string Api::describe(const char* call, Result code) const {
  const char* name = nullptr;
  const bool known = GetErrorName != nullptr && GetErrorName(code, &name) == kSuccess && name;
  return std::string(call) + ": " + (known ? name : "unknown error") + " (" + std::to_string(code) +
         ")";
}

kvelastic::Result<const Api*> load() {
  static const kvelastic::Result<const Api*> loaded = load_once();
  return loaded;
}

}  // namespace kvelastic::cuda
