// What is left of the machine's memory for this process: the kernel kills whoever takes more, so a
// page is not created before this has been asked.
//
//   a memory cgroup, this process's and every one above it (v1 and v2):
//       limit - usage + the page cache that the kernel can take back
//   the machine:
//       MemAvailable, in which that is counted already
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "base/kernel_file.h"
#include "base/status.h"

namespace kvelastic {

/// Thread-safe. The cgroups are those of the process when this was made. What cannot be read sets
/// no bound.
class HostMemory {
 public:
  /// `root` is where `proc` and `sys` are found.
  explicit HostMemory(const std::string& root = "/");

  /// Where memory is bounded, and what there is of it.
  struct Room {
    std::string where{};            ///< "the machine", or the cgroup's folder
    std::uint64_t total_bytes = 0;  ///< its limit
    std::uint64_t left_bytes = 0;   ///< as the drawing above says
    /// Never taken: for what this process and others allocate besides pages. 1/32 of the total, and
    /// not less than 16 nor more than 256 MiB.
    std::uint64_t margin_bytes() const;
    /// What may be taken, where `keep_free_bytes` stay free besides.
    std::uint64_t spare_bytes(std::uint64_t keep_free_bytes = 0) const;
  };
  /// Looks now; the tightest comes first. Empty: nothing is bounded.
  std::vector<Room> look() const;

  /// Fails with kOutOfMemory when `bytes` more, and as many for another process that has looked at
  /// the same moment, are not to be had. A call that is answered from what was there a moment ago
  /// takes no look: one in kFresh, or as much as an eighth of what was spare, is enough.
  Status refuse_if_tight(std::size_t bytes);
  /// Leave so much more than the margin from now on (memory_relief.h).
  void keep_free(std::uint64_t bytes) { keep_free_bytes_.store(bytes, std::memory_order_relaxed); }

 private:
  struct Group {
    std::string where;
    KernelFile limit, usage, stat;
    const char* active;  // what its stat calls the page cache
    const char* inactive;
  };
  void add_groups(const std::string& top, const std::string& path, bool is_v2);

  static constexpr std::chrono::milliseconds kFresh{10};

  std::vector<Group> groups_;
  KernelFile meminfo_;
  std::mutex mutex_;  // a leaf
  std::atomic<std::uint64_t> keep_free_bytes_{0};
  std::uint64_t credit_bytes_ = 0;
  std::chrono::steady_clock::time_point looked_at_{};
};

}  // namespace kvelastic
