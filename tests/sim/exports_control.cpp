// What a test does to the driver and asks it, beside the driver's own calls: kvsim_*. With ctypes,
// in the process under test: ctypes.CDLL("libcuda.so.1").kvsim_count(b"cuMemMap").
#include <cstdint>
#include <limits>

#include "api.h"
#include "call.h"
#include "faults.h"
#include "machine.h"
#include "memory.h"
#include "streams.h"
#include "trace.h"

using namespace kvsim;

namespace {
constexpr std::uint64_t kUnknown = std::numeric_limits<std::uint64_t>::max();

bool ready() {
  return is_initialised();
}
}  // namespace

/// Calls of a function in this process, by exported or base name; "*" is all. Unknown: 2^64 - 1.
KVSIM_API std::uint64_t kvsim_count(const char* name) {
  if (name == nullptr) return kUnknown;
  if (name[0] == '*') return calls_of_all();
  const auto function = function_named(name);
  return function ? calls_of(*function) : kUnknown;
}

KVSIM_API void kvsim_reset_counts() {
  reset_counts();
}

/// Sets the fault plan as KVSIM_FAIL does, counting from this moment; "" ends all faults.
/// 0, or -1 when the text does not parse.
KVSIM_API int kvsim_fail(const char* plan) {
  return FaultPlan::instance().set(plan != nullptr ? plan : "") ? 0 : -1;
}

/// Starts work in a stream that lasts until kvsim_release_stream: a kernel that takes its time.
KVSIM_API CUresult kvsim_hold_stream(CUstream stream) {
  return hold_stream(stream);
}
KVSIM_API CUresult kvsim_release_stream(CUstream stream) {
  return release_stream(stream);
}

/// Queues a read of [address, +bytes) in a stream: a kernel that uses these blocks. When it comes
/// to run and a byte is not accessible, it ends as on a GPU: CUDA_ERROR_ILLEGAL_ADDRESS, from then
/// on the answer of every call.
KVSIM_API CUresult kvsim_enqueue_read(CUstream stream, CUdeviceptr address, std::size_t bytes) {
  if (!ready()) return CUDA_ERROR_NOT_INITIALIZED;
  return enqueue_kernel(stream, [=] {
    const std::lock_guard lock(driver_mutex());
    if (!memory().accessible(address, bytes, false)) set_sticky_error(CUDA_ERROR_ILLEGAL_ADDRESS);
  });
}

/// What this process has, for tests that look for leaks.
KVSIM_API std::uint64_t kvsim_live_ranges() {
  const std::lock_guard lock(driver_mutex());
  return memory().live_ranges();
}
KVSIM_API std::uint64_t kvsim_live_handles() {
  const std::lock_guard lock(driver_mutex());
  return memory().live_handles();
}
KVSIM_API std::uint64_t kvsim_live_allocations() {
  const std::lock_guard lock(driver_mutex());
  return memory().live_allocations();
}
KVSIM_API std::uint64_t kvsim_live_mappings() {
  const std::lock_guard lock(driver_mutex());
  return memory().live_mappings();
}

/// All memory that this process holds goes back, as at its end, and the process lives on: one that
/// dies, whose files are closed later. It must use none of it again.
KVSIM_API void kvsim_drop_memory() {
  if (ready()) Machine::instance().drop_all();
}

/// Bytes of a device that all processes hold, and that one process holds. 0 before cuInit.
KVSIM_API std::uint64_t kvsim_used_bytes(int device) {
  if (!ready() || device < 0 || device >= Machine::instance().devices()) return 0;
  return Machine::instance().used_bytes(device);
}
KVSIM_API std::uint64_t kvsim_process_bytes(int device, int pid) {
  if (!ready() || device < 0 || device >= Machine::instance().devices()) return 0;
  return Machine::instance().process_bytes(device, pid);
}
