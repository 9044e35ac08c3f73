// The frame of every driver call: order of checks, faults, delays, the trace. No call throws or
// aborts; nothing here is destroyed at exit, because calls come from other libraries' destructors.
#pragma once

#include <cstdint>
#include <mutex>
#include <new>
#include <optional>

#include "api.h"
#include "delays.h"

namespace kvsim {

enum class Needs {
  kNothing,  ///< works before cuInit: cuInit itself, and questions
  kInit,     ///< cuInit must have succeeded
  kContext,  ///< a living context must be current on this thread
};

/// Taken by every call that changes ranges, handles or mappings, for as long as the call takes: the
/// real driver does one such call of a process after another too.
std::mutex& driver_mutex();

void set_initialised();
bool is_initialised();

/// From now on every call answers `result`, as after a kernel's illegal access.
void set_sticky_error(CUresult result);

namespace detail {
/// What the call must answer without being carried out; none: carry it out.
std::optional<CUresult> before(Function function, Needs needs);
void after(Function function, CUresult result, std::uint64_t began_ns);
}  // namespace detail

/// Runs `body()` as driver function `function`.
template <class Body>
CUresult call(Function function, Needs needs, Body body) noexcept {
  const std::uint64_t began_ns = now_ns();
  CUresult result = CUDA_ERROR_UNKNOWN;
  try {
    if (const auto answer = detail::before(function, needs)) {
      result = *answer;
    } else {
      result = body();
      Delays::instance().spend(function, Work{}, began_ns);
    }
  } catch (const std::bad_alloc&) {
    result = CUDA_ERROR_OUT_OF_MEMORY;
  } catch (...) {
    result = CUDA_ERROR_UNKNOWN;
  }
  detail::after(function, result, began_ns);
  return result;
}

/// As call(), with the driver's mutex held throughout; `body(work)` says what is to be paid for.
template <class Body>
CUresult vmm_call(Function function, Body body) noexcept {
  const std::uint64_t began_ns = now_ns();
  CUresult result = CUDA_ERROR_UNKNOWN;
  try {
    if (const auto answer = detail::before(function, Needs::kInit)) {
      result = *answer;
    } else {
      const std::lock_guard lock(driver_mutex());
      const std::uint64_t turn_ns = now_ns();  // waiting for others is not paid for
      Work work;
      result = body(work);
      Delays::instance().spend(function, work, turn_ns);
    }
  } catch (const std::bad_alloc&) {
    result = CUDA_ERROR_OUT_OF_MEMORY;
  } catch (...) {
    result = CUDA_ERROR_UNKNOWN;
  }
  detail::after(function, result, began_ns);
  return result;
}

}  // namespace kvsim
