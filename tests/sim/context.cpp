#include "context.h"

#include <array>
#include <memory>
#include <mutex>
#include <vector>

#include "call.h"
#include "memory.h"
#include "settings.h"
#include "streams.h"
#include "visible_devices.h"

namespace kvsim {
namespace {

// One lock for all contexts. Streams and memory are taken inside it, never the other way.
std::mutex& contexts_mutex() {
  static std::mutex* const mutex = new std::mutex;
  return *mutex;
}

auto& primaries = *new std::array<Context, Machine::kMaxDevices>;
std::uint64_t next_id = 1;

/// Trivial to destroy: a call may come after a thread's own objects are gone.
struct Stack {
  static constexpr unsigned kDeepest = 64;
  Context* contexts[kDeepest];
  unsigned depth;

  Context* top() const { return depth > 0 ? contexts[depth - 1] : nullptr; }
  bool push(Context* context) {
    if (depth == kDeepest) return false;
    contexts[depth++] = context;
    return true;
  }
};
thread_local Stack stack;

std::vector<Context*>& own_contexts() {
  static auto* const contexts = new std::vector<Context*>;
  return *contexts;
}

/// Whole granules of the context's device.
CUresult take_memory(Context* context, std::size_t bytes) {
  if (bytes == 0) return CUDA_SUCCESS;
  Machine& machine = Machine::instance();
  const std::size_t granule_bytes = machine.granularity_bytes();
  bytes = (bytes + granule_bytes - 1) / granule_bytes * granule_bytes;
  Head head = 0;
  const CUresult result =
      machine.create(physical_device(context->device), bytes, false, false, &head);
  if (result == CUDA_SUCCESS) context->memory.push_back(head);
  return result;
}

CUresult bring_up(Context* context, CUdevice device) {
  context->device = device;
  const CUresult result = take_memory(context, settings().context_bytes);
  if (result != CUDA_SUCCESS) return result;
  context->id = next_id++;
  context->alive = true;
  return CUDA_SUCCESS;
}

void tear_down(Context* context) {
  destroy_streams_of(context);
  {
    const std::lock_guard lock(driver_mutex());
    memory().free_all_of(context);
  }
  for (const Head head : context->memory) Machine::instance().drop(head);
  context->memory.clear();
  context->has_kernels = false;
  context->alive = false;
  context->references = 0;
}

}  // namespace

Context* current_context() {
  return stack.top();
}

Context* current_or_first_context() {
  if (Context* context = current_context()) return context;
  return primaries[0].alive ? &primaries[0] : nullptr;
}

CUresult check_current_context() {
  const Context* context = current_context();
  if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  return context->alive ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

bool is_context(const Context* context) {
  const std::lock_guard lock(contexts_mutex());
  for (const Context& primary : primaries) {
    if (&primary == context) return primary.primary;
  }
  for (const Context* own : own_contexts()) {
    if (own == context) return true;
  }
  return false;
}

CUresult retain_primary(CUdevice device, Context** context) {
  const std::lock_guard lock(contexts_mutex());
  Context& primary = primaries[static_cast<std::size_t>(device)];
  if (!primary.alive) {
    if (const CUresult result = bring_up(&primary, device); result != CUDA_SUCCESS) return result;
    primary.primary = true;
  }
  ++primary.references;
  *context = &primary;
  return CUDA_SUCCESS;
}

CUresult release_primary(CUdevice device) {
  const std::lock_guard lock(contexts_mutex());
  Context& primary = primaries[static_cast<std::size_t>(device)];
  if (primary.references == 0) return CUDA_ERROR_INVALID_CONTEXT;
  if (--primary.references == 0) tear_down(&primary);
  return CUDA_SUCCESS;
}

CUresult reset_primary(CUdevice device) {
  const std::lock_guard lock(contexts_mutex());
  Context& primary = primaries[static_cast<std::size_t>(device)];
  if (primary.alive) tear_down(&primary);
  return CUDA_SUCCESS;
}

CUresult set_primary_flags(CUdevice device, unsigned flags) {
  const std::lock_guard lock(contexts_mutex());
  primaries[static_cast<std::size_t>(device)].flags = flags;
  return CUDA_SUCCESS;
}

void primary_state(CUdevice device, unsigned* flags, int* active) {
  const std::lock_guard lock(contexts_mutex());
  const Context& primary = primaries[static_cast<std::size_t>(device)];
  *flags = primary.flags;
  *active = primary.alive ? 1 : 0;
}

CUresult create_context(CUdevice device, unsigned flags, Context** context) {
  const std::lock_guard lock(contexts_mutex());
  auto made = std::make_unique<Context>();
  made->flags = flags;
  if (const CUresult result = bring_up(made.get(), device); result != CUDA_SUCCESS) return result;
  own_contexts().push_back(made.get());
  *context = made.release();
  return push_current(*context);
}

CUresult destroy_context(Context* context) {
  const std::lock_guard lock(contexts_mutex());
  if (context->primary) return CUDA_ERROR_INVALID_CONTEXT;
  if (!context->alive) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  tear_down(context);
  if (stack.top() == context) --stack.depth;
  return CUDA_SUCCESS;
}

CUresult grow(Context* context) {
  return take_memory(context, settings().growth_bytes);
}

void set_current(Context* context) {
  if (stack.depth > 0) --stack.depth;
  if (context != nullptr) (void)stack.push(context);
}

CUresult push_current(Context* context) {
  return stack.push(context) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult pop_current(Context** context) {
  if (stack.depth == 0) return CUDA_ERROR_INVALID_CONTEXT;
  *context = stack.contexts[--stack.depth];
  return CUDA_SUCCESS;
}

}  // namespace kvsim
