#include "base/own_process.h"

#include <pthread.h>

#include <string>

namespace kvelastic {
namespace detail {

constinit std::atomic<std::uint64_t> forks{0};

}  // namespace detail

namespace {

// Registered when the module is loaded, before any OwnProcess exists.
[[maybe_unused]] const int registered = ::pthread_atfork(
    nullptr, nullptr, [] { detail::forks.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

Status OwnProcess::refuse_in_a_child() const {
  if (is_this()) return ok();
  return Error{Errc::kDeviceUnavailable, "this memory belongs to process " + std::to_string(pid_) +
                                             "; a forked child must create its own pool"};
}

}  // namespace kvelastic
