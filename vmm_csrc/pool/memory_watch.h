// Samples the machine's free memory and the memory of the instance's processes besides pages;
// memory_relief.h evaluates it.
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

/// One thread. A sample reads a few small files: tens of microseconds.
class MemoryWatch {
 public:
  /// `processes` are distinct pids of this pid namespace. `root` contains `proc` and `sys`. A file
  /// that cannot be read sets no bound.
  explicit MemoryWatch(std::span<const pid_t> processes, const std::string& root = "/");

  struct Look {
    Relief relief;
    /// To be left free besides every margin when a page is created.
    std::uint64_t keep_free_bytes = 0;
    /// Memory available for pages, in the tightest room.
    std::uint64_t spare_bytes = 0;
    std::chrono::nanoseconds again_in{};
  };
  /// `at_work`: see TransientMemory::see.
  Look look(bool at_work);

 private:
  const HostMemory memory_;
  std::vector<KernelFile> processes_;  // /proc/PID/status; empty once the process has ended
  TransientMemory transient_;
};

}  // namespace kvelastic
