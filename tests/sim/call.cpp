#include "call.h"

#include <pthread.h>

#include <atomic>

#include "capture.h"
#include "context.h"
#include "faults.h"
#include "settings.h"
#include "trace.h"

namespace kvsim {
namespace {

std::atomic<bool> initialised{false};
std::atomic<bool> forked{false};
std::atomic<CUresult> sticky_error{CUDA_SUCCESS};

// A child of fork() shares the parent's memory but is nobody to the driver: every call fails in it.
void in_forked_child() {
  if (initialised.load()) forked.store(true);
}

}  // namespace

std::mutex& driver_mutex() {
  static std::mutex* const mutex = new std::mutex;
  return *mutex;
}

void set_initialised() {
  static const int registered = ::pthread_atfork(nullptr, nullptr, in_forked_child);
  (void)registered;
  initialised.store(true);
}

bool is_initialised() {
  return initialised.load() && !forked.load();
}

void set_sticky_error(CUresult result) {
  CUresult none = CUDA_SUCCESS;
  sticky_error.compare_exchange_strong(none, result);
}

namespace detail {

std::optional<CUresult> before(Function function, Needs needs) {
  if (is_question(function)) return std::nullopt;
  if (forked.load()) return CUDA_ERROR_NOT_INITIALIZED;
  if (const auto fault = FaultPlan::instance().next(function)) return fault;
  if (needs == Needs::kNothing) return std::nullopt;  // cuInit
  if (!initialised.load()) return CUDA_ERROR_NOT_INITIALIZED;
  if (const CUresult sticky = sticky_error.load(); sticky != CUDA_SUCCESS) return sticky;
  if (needs == Needs::kContext) {
    if (const CUresult none = check_current_context(); none != CUDA_SUCCESS) return none;
  }
  if (const CUresult unsafe = check_captures(function); unsafe != CUDA_SUCCESS) return unsafe;
  return std::nullopt;
}

void after(Function function, CUresult result, std::uint64_t began_ns) {
  trace_call(function, result, (now_ns() - began_ns) / 1000);
}

}  // namespace detail
}  // namespace kvsim
