// Looks, for a keeper, at what the machine has left and at what the instance's processes hold
// besides pages; memory_relief.h judges it.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/kernel_file.h"
#include "driver/host_memory.h"
#include "pool/memory_relief.h"

namespace kvelastic {

/// One thread. A look reads a few small files: tens of microseconds.
class MemoryWatch {
 public:
  /// `processes` of this pid namespace, each named once. `root` is where `proc` and `sys` are
  /// found. What cannot be opened or read sets no bound.
  explicit MemoryWatch(std::span<const pid_t> processes, const std::string& root = "/");

  struct Look {
    Relief relief;
    /// What stays free, beside every margin, whenever a page is created.
    std::uint64_t keep_free_bytes = 0;
    /// What there is for pages, where there is least.
    std::uint64_t spare_bytes = 0;
    std::chrono::nanoseconds again_in{};
  };
  /// `at_work`: as of TransientMemory::see.
  Look look(bool at_work);

 private:
  const HostMemory memory_;
  std::vector<KernelFile> processes_;  // /proc/PID/status; that of a process that ended stays empty
  TransientMemory transient_;
};

}  // namespace kvelastic
