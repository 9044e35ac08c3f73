// Telling a process from its forked children, for objects whose memory, threads and locks are those
// of the process that made them.
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

/// Goes up by one in every forked child, before anything else runs there.
inline std::uint64_t fork_generation() {
  return detail::forks.load(std::memory_order_relaxed);
}

/// The process that made an object. To ask whether it is this one costs a load, no system call, so
/// the fastest calls may ask. Any thread.
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
