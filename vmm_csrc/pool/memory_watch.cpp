#include "pool/memory_watch.h"

#include <limits>

namespace kvelastic {

MemoryWatch::MemoryWatch(std::span<const pid_t> processes, const std::string& root)
    : memory_(root) {
  for (const pid_t pid : processes) {
    processes_.emplace_back(root + "/proc/" + std::to_string(pid) + "/status");
  }
}

MemoryWatch::Look MemoryWatch::look(bool at_work) {
  // Before the rooms: memory allocated in between is counted twice rather than not at all.
  std::uint64_t held = 0;
  for (const KernelFile& process : processes_) {
    held += field_in(process.read(), "RssAnon:").value_or(0) * 1024;
  }
  transient_.see(held, at_work);
  const std::vector<HostMemory::Room> rooms = memory_.look();
  Look look;
  look.relief = relief(rooms, transient_.now_bytes());
  look.keep_free_bytes = transient_.recent_bytes();
  look.spare_bytes = rooms.empty() ? std::numeric_limits<std::uint64_t>::max()
                                   : rooms.front().spare_bytes(look.keep_free_bytes);
  look.again_in = next_look_in(rooms, transient_.now_bytes());
  return look;
}

}  // namespace kvelastic
