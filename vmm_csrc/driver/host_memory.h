// How much of the machine's memory this process may still use. The kernel kills processes that use
// more, so this is checked before a page is created.
//
//   a memory cgroup, for this process's cgroup and every one above it (v1 and v2):
//       limit - usage + the page cache that the kernel can reclaim
//   the machine:
//       MemAvailable, which already includes that cache
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

/// Thread-safe. Uses the cgroups that the process had when this object was created. A file that
/// cannot be read imposes no bound.
class HostMemory {
 public:
  /// `root` is the folder that contains `proc` and `sys`.
  explicit HostMemory(const std::string& root = "/");

  /// One memory bound and its remaining memory.
  struct Room {
    std::string where{};            ///< "the machine", or the cgroup's folder
    std::uint64_t total_bytes = 0;  ///< its limit
    std::uint64_t left_bytes = 0;   ///< computed as described above
    /// Reserved for allocations of this and other processes besides pages. 1/32 of the total, at
    /// least 16 and at most 256 MiB.
    std::uint64_t margin_bytes() const;
    /// What may be used if `keep_free_bytes` stay free besides the margin.
    std::uint64_t spare_bytes(std::uint64_t keep_free_bytes = 0) const;
  };
  /// Reads the current values, tightest bound first. Empty: nothing is bounded.
  std::vector<Room> look() const;

  /// Fails with kOutOfMemory unless twice `bytes` are available: another process may check at the
  /// same moment. To save reads, a check is reused for kFresh or for an eighth of the spare memory.
  Status refuse_if_tight(std::size_t bytes);
  /// From now on, keeps this much free besides the margin (memory_relief.h).
  void keep_free(std::uint64_t bytes) { keep_free_bytes_.store(bytes, std::memory_order_relaxed); }

 private:
  struct Group {
    std::string where;
    KernelFile limit, usage, stat;
    const char* active;  // keys of the page cache in `stat`
    const char* inactive;
  };
  void add_groups(const std::string& top, const std::string& path, bool is_v2);

  static constexpr std::chrono::milliseconds kFresh{10};

  std::vector<Group> groups_;
  KernelFile meminfo_;
  std::mutex mutex_;  // a leaf lock
  std::atomic<std::uint64_t> keep_free_bytes_{0};
  std::uint64_t credit_bytes_ = 0;
  std::chrono::steady_clock::time_point looked_at_{};
};

}  // namespace kvelastic
