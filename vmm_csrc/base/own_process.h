// Distinguishes a process from its forked children, for objects whose memory, threads and locks
// belong to the process that created them.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "base/status.h"

namespace kvelastic {

namespace detail {
extern std::atomic<std::uint64_t> forks;
}

/// Incremented in every forked child before any other code runs there.
inline std::uint64_t fork_generation() {
  return detail::forks.load(std::memory_order_relaxed);
}

/// The process that created an object. is_this() is one load and no system call, so hot paths may
/// use it. Any thread.
class OwnProcess {
 public:
  bool is_this() const { return generation_ == fork_generation(); }
  pid_t pid() const { return pid_; }

  /// Fails with kDeviceUnavailable in a forked child.
  Status refuse_in_a_child() const;

 private:
  std::uint64_t generation_ = fork_generation();
  pid_t pid_ = ::getpid();
};

}  // namespace kvelastic
