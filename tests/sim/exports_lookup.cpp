// cuGetProcAddress: functions by base name and CUDA version.
#include <cstring>
#include <string_view>

#include "api.h"
#include "call.h"
#include "settings.h"

// Every function again, without its types: only the address is wanted here.
namespace {
struct Entry {
  std::string_view base;
  int version;
  const char* exported;
};
constexpr Entry kEntries[] = {
#define KVSIM_FUNCTION(exported, base, version) {#base, version, #exported},
#include "functions.inc"
#undef KVSIM_FUNCTION
};
}  // namespace

using namespace kvsim;

void* kvsim_address_of(std::size_t index);  // addresses.cpp

namespace {

constexpr unsigned long long kKnownFlags = 3;  // legacy stream, per-thread default stream

CUresult look_up(const char* symbol, void** address, int version, unsigned long long flags,
                 CUdriverProcAddressQueryResult* status) {
  if (symbol == nullptr || address == nullptr || flags > kKnownFlags) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *address = nullptr;
  if (version > settings().driver_version) return CUDA_ERROR_INVALID_VALUE;
  const Entry* best = nullptr;
  bool known = false;
  for (const Entry& entry : kEntries) {
    if (entry.base != symbol || entry.version > settings().driver_version) continue;
    known = true;
    if (entry.version <= version) best = &entry;  // ascending versions in functions.inc
  }
  if (best != nullptr) *address = kvsim_address_of(static_cast<std::size_t>(best - kEntries));
  if (status != nullptr) {
    *status = best != nullptr ? CU_GET_PROC_ADDRESS_SUCCESS
              : known         ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                              : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  }
  return CUDA_SUCCESS;
}

}  // namespace

KVSIM_API CUresult cuGetProcAddress(const char* symbol, void** address, int version,
                                    unsigned long long flags) {
  return call(Function::cuGetProcAddress, Needs::kNothing, [&] {
    if (settings().driver_version < 11030) return CUDA_ERROR_NOT_SUPPORTED;
    const CUresult result = look_up(symbol, address, version, flags, nullptr);
    return result == CUDA_SUCCESS && *address == nullptr ? CUDA_ERROR_NOT_FOUND : result;
  });
}

KVSIM_API CUresult cuGetProcAddress_v2(const char* symbol, void** address, int version,
                                       unsigned long long flags,
                                       CUdriverProcAddressQueryResult* status) {
  return call(Function::cuGetProcAddress_v2, Needs::kNothing, [&] {
    if (settings().driver_version < 12000) return CUDA_ERROR_NOT_SUPPORTED;
    return look_up(symbol, address, version, flags, status);
  });
}
