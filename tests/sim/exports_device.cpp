// Start, version, errors by name, and what a device is.
#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "api.h"
#include "call.h"
#include "context.h"
#include "machine.h"
#include "memory.h"
#include "settings.h"
#include "visible_devices.h"

namespace kvsim {
namespace {

/// Of the GPU that a device is, or is an instance of.
CUuuid gpu_uuid_of(CUdevice device) {
  CUuuid uuid{};
  std::memcpy(uuid.bytes, "kvelastic-sim\0\0", sizeof uuid.bytes);
  uuid.bytes[15] = static_cast<char>(physical_device(device) / std::max(settings().mig, 1));
  return uuid;
}

CUuuid uuid_of(CUdevice device) {
  CUuuid uuid = gpu_uuid_of(device);
  if (settings().mig > 0) {
    uuid.bytes[14] = static_cast<char>(1 + physical_device(device) % settings().mig);
  }
  return uuid;
}

/// Attributes that a program asks a device for; all others are 0.
int attribute_of(CUdevice device, int attribute) {
  const Settings& s = settings();
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_PITCH:
      return static_cast<int>(kMaxPitchBytes);
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
      return 32;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      return 1;
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
      return 1;
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
      return 1;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
      return physical_device(device) + 1;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE:
      return 1 << 20;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
      return 1;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
      return 1;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      return s.compute_capability / 10;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      return s.compute_capability % 10;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
      return s.no_vmm ? 0 : 1;
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
      return s.no_vmm ? 0 : 1;
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED:
      return s.rdma ? 1 : 0;
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED:
      return s.rdma ? 1 : 0;
    default:
      return 0;
  }
}

constexpr int kMostAttributes = 160;

CUresult initialise(unsigned flags) {
  static std::mutex* const mutex = new std::mutex;
  const std::lock_guard lock(*mutex);
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (settings().no_device) return CUDA_ERROR_NO_DEVICE;
  if (const CUresult result = Machine::open(); result != CUDA_SUCCESS) return result;
  if (visible_devices() == 0) return CUDA_ERROR_NO_DEVICE;
  set_initialised();
  return CUDA_SUCCESS;
}

/// "CUDA_ERROR_OUT_OF_MEMORY" -> "out of memory", for every result, made once.
const char* description_of(CUresult result) {
  struct Text {
    CUresult result;
    std::string text;
  };
  static const auto* const texts = [] {
    auto* made = new std::vector<Text>;
    const auto add = [&](CUresult code, std::string name) {
      const std::string prefix = "CUDA_ERROR_";
      if (name.rfind(prefix, 0) == 0) name.erase(0, prefix.size());
      std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) {
        return c == '_' ? ' ' : static_cast<char>(std::tolower(c));
      });
      made->push_back({code, code == CUDA_SUCCESS ? "no error" : name});
    };
#define KVSIM_RESULT(name, number) add(name, #name);
#include "results.inc"
#undef KVSIM_RESULT
    return made;
  }();
  for (const Text& text : *texts) {
    if (text.result == result) return text.text.c_str();
  }
  return nullptr;
}

}  // namespace
}  // namespace kvsim

using namespace kvsim;

KVSIM_API CUresult cuGetErrorName(CUresult error, const char** text) {
  return call(Function::cuGetErrorName, Needs::kNothing, [&] {
    if (text == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *text = name_of(error);
    return *text != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  });
}

KVSIM_API CUresult cuGetErrorString(CUresult error, const char** text) {
  return call(Function::cuGetErrorString, Needs::kNothing, [&] {
    if (text == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *text = description_of(error);
    return *text != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  });
}

KVSIM_API CUresult cuDriverGetVersion(int* version) {
  return call(Function::cuDriverGetVersion, Needs::kNothing, [&] {
    if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *version = settings().driver_version;
    return CUDA_SUCCESS;
  });
}

KVSIM_API CUresult cuInit(unsigned flags) {
  return call(Function::cuInit, Needs::kNothing, [&] { return initialise(flags); });
}

KVSIM_API CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  return call(Function::cuDeviceGet, Needs::kInit, [&] {
    if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
  });
}

KVSIM_API CUresult cuDeviceGetCount(int* count) {
  return call(Function::cuDeviceGetCount, Needs::kInit, [&] {
    if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *count = visible_devices();
    return CUDA_SUCCESS;
  });
}

KVSIM_API CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  return call(Function::cuDeviceGetName, Needs::kInit, [&] {
    if (name == nullptr || length <= 0) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    std::snprintf(name, static_cast<std::size_t>(length), "Simulated CUDA device");
    return CUDA_SUCCESS;
  });
}

namespace {
template <class Which>
CUresult get_uuid(Function function, CUuuid* uuid, CUdevice device, Which which) {
  return call(function, Needs::kInit, [&] {
    if (uuid == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    *uuid = which(device);
    return CUDA_SUCCESS;
  });
}
}  // namespace

KVSIM_API CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  return get_uuid(Function::cuDeviceGetUuid, uuid, device, gpu_uuid_of);
}

KVSIM_API CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  return get_uuid(Function::cuDeviceGetUuid_v2, uuid, device, uuid_of);
}

KVSIM_API CUresult cuDeviceTotalMem_v2(std::size_t* bytes, CUdevice device) {
  return call(Function::cuDeviceTotalMem_v2, Needs::kInit, [&] {
    if (bytes == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    *bytes = Machine::instance().device_bytes();
    return CUDA_SUCCESS;
  });
}

KVSIM_API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return call(Function::cuDeviceGetAttribute, Needs::kInit, [&] {
    if (value == nullptr || attribute <= 0 || attribute >= kMostAttributes) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    *value = attribute_of(device, attribute);
    return CUDA_SUCCESS;
  });
}

KVSIM_API CUresult cuDeviceGetPCIBusId(char* id, int length, CUdevice device) {
  return call(Function::cuDeviceGetPCIBusId, Needs::kInit, [&] {
    if (id == nullptr || length <= 0) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    std::snprintf(id, static_cast<std::size_t>(length), "0000:%02X:00.0",
                  physical_device(device) + 1);
    return CUDA_SUCCESS;
  });
}

KVSIM_API CUresult cuDeviceGetByPCIBusId(CUdevice* device, const char* id) {
  return call(Function::cuDeviceGetByPCIBusId, Needs::kInit, [&] {
    unsigned domain = 0, bus = 0, slot = 0, function = 0;
    if (device == nullptr || id == nullptr ||
        std::sscanf(id, "%x:%x:%x.%x", &domain, &bus, &slot, &function) != 4) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    const CUdevice found = visible_device(static_cast<int>(bus) - 1);
    if (domain != 0 || slot != 0 || function != 0 || found < 0) return CUDA_ERROR_INVALID_DEVICE;
    *device = found;
    return CUDA_SUCCESS;
  });
}

KVSIM_API CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  return call(Function::cuDeviceCanAccessPeer, Needs::kInit, [&] {
    if (can == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device) || !is_device(peer)) return CUDA_ERROR_INVALID_DEVICE;
    *can = 0;
    return CUDA_SUCCESS;
  });
}

KVSIM_API CUresult cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
  return call(Function::cuMemGetInfo_v2, Needs::kContext, [&] {
    if (free == nullptr || total == nullptr) return CUDA_ERROR_INVALID_VALUE;
    Machine& machine = Machine::instance();
    *total = machine.device_bytes();
    *free = *total - machine.used_bytes(physical_device(current_context()->device));
    return CUDA_SUCCESS;
  });
}
