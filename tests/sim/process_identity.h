// Which process a pid means, and whether it still lives.
#pragma once

#include <cstdint>

namespace kvsim {

struct ProcessIdentity {
  std::int32_t pid;
  std::uint64_t start_ticks;  ///< tells a process from a later one with the same pid
};

ProcessIdentity this_process();

/// False also for a zombie: the kernel has taken its memory back, whoever has yet to wait for it.
bool is_alive(const ProcessIdentity& process);

}  // namespace kvsim
