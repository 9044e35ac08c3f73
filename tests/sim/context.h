// Contexts: one primary context a device, contexts of a caller's own, and each thread's stack.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "cuda_abi.h"
#include "machine.h"

namespace kvsim {

/// Never freed: a stale CUcontext is recognised by `alive`, not by a crash.
struct Context {
  CUdevice device = 0;
  bool primary = false;
  std::atomic<bool> alive{false};
  unsigned references = 0;  ///< of a primary context
  unsigned flags = 0;
  std::uint64_t id = 0;
  std::vector<Head> memory;  ///< KVSIM_CONTEXT_BYTES, and what it has grown by
  bool has_kernels = false;  ///< one was queued in a stream of it
};

/// The calling thread's current context, or null.
Context* current_context();

/// The same, or else the primary context of the first device where that is alive: for kvsim_* calls
/// from a test's own thread.
Context* current_or_first_context();

/// CUDA_ERROR_INVALID_CONTEXT without one, CUDA_ERROR_CONTEXT_IS_DESTROYED with a dead one.
CUresult check_current_context();

/// True for a pointer that is, or was, a context of this library.
bool is_context(const Context* context);

CUresult retain_primary(CUdevice device, Context** context);
CUresult release_primary(CUdevice device);
CUresult reset_primary(CUdevice device);
CUresult set_primary_flags(CUdevice device, unsigned flags);
void primary_state(CUdevice device, unsigned* flags, int* active);

CUresult create_context(CUdevice device, unsigned flags, Context** context);  ///< and pushes it
CUresult destroy_context(Context* context);

/// Takes KVSIM_CONTEXT_GROWTH more for a stream, or for the first kernel. CUDA_ERROR_OUT_OF_MEMORY,
/// and nothing is taken, where the device is full. The caller holds the streams' lock.
CUresult grow(Context* context);

void set_current(Context* context);  ///< null: nothing is current
CUresult push_current(Context* context);
CUresult pop_current(Context** context);

}  // namespace kvsim
