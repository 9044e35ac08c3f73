// The address of every exported function. Declared without their types, which is why nothing else
// may stand in this file: the linker goes by name.
#include <cstddef>

extern "C" {
#define KVSIM_FUNCTION(exported, base, version) \
  __attribute__((visibility("default"))) void exported();
#include "functions.inc"
#undef KVSIM_FUNCTION
}

void* kvsim_address_of(std::size_t index) {
  static constexpr void (*kAddresses[])() = {
#define KVSIM_FUNCTION(exported, base, version) &exported,
#include "functions.inc"
#undef KVSIM_FUNCTION
  };
  return reinterpret_cast<void*>(kAddresses[index]);
}
