// What is left of the machine's memory for this process: the kernel kills whoever takes more, so a
// page is not created before this has been asked.
//
//   a memory cgroup, this process's and every one above it (v1 and v2):
//       limit - usage + the page cache that the kernel can take back
//   the machine:
//       MemAvailable, in which that is counted already
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "status.h"

namespace kvelastic {

/// An open file that is read from its start again and again; closed with it.
class PolledFile {
 public:
  explicit PolledFile(const std::string& path);
  PolledFile(PolledFile&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  PolledFile(const PolledFile&) = delete;
  PolledFile& operator=(const PolledFile&) = delete;
  ~PolledFile();

  bool is_open() const { return fd_ >= 0; }
  /// Its first 16 KiB as they are now; empty where it cannot be read.
  std::string read() const;

 private:
  int fd_;
};

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
    /// What may be taken.
    std::uint64_t spare_bytes() const;
  };
  /// Looks now; the tightest comes first. Empty: nothing is bounded.
  std::vector<Room> look() const;

  /// Fails with kOutOfMemory when `bytes` more, and as many for another process that has looked at
  /// the same moment, are not to be had. A call that is answered from what was there a moment ago
  /// takes no look: one in kFresh, or as much as an eighth of what was spare, is enough.
  Status refuse_if_tight(std::size_t bytes);

 private:
  struct Group {
    std::string where;
    PolledFile limit, usage, stat;
    const char* active;  // what its stat calls the page cache
    const char* inactive;
  };
  void add_groups(const std::string& top, const std::string& path, bool is_v2);

  static constexpr std::chrono::milliseconds kFresh{10};

  std::vector<Group> groups_;
  PolledFile meminfo_;
  std::mutex mutex_;  // a leaf
  std::uint64_t credit_bytes_ = 0;
  std::chrono::steady_clock::time_point looked_at_{};
};

}  // namespace kvelastic
