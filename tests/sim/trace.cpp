#include "trace.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>

#include "settings.h"

namespace kvsim {
namespace {

std::array<std::atomic<std::uint64_t>, kFunctions> counts{};

int open_trace() {
  if (settings().trace.empty()) return -1;
  const int fd = ::open(settings().trace.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (fd < 0) complain("KVSIM_TRACE=" + settings().trace + ": " + std::strerror(errno));
  return fd;
}

}  // namespace

void trace_call(Function function, CUresult result, std::uint64_t took_us) {
  counts[static_cast<std::size_t>(function)].fetch_add(1, std::memory_order_relaxed);
  static const int fd = open_trace();
  if (fd < 0) return;
  char line[160];
  const char* result_name = name_of(result);
  const int length =
      std::snprintf(line, sizeof line, "%s %s %llu %d\n", name_of(function),
                    result_name != nullptr ? result_name : "?",
                    static_cast<unsigned long long>(took_us), static_cast<int>(::getpid()));
  (void)!::write(fd, line, static_cast<std::size_t>(length));
}

std::uint64_t calls_of(Function function) {
  return counts[static_cast<std::size_t>(function)].load(std::memory_order_relaxed);
}

std::uint64_t calls_of_all() {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < kFunctions; ++i) {
    if (!is_question(static_cast<Function>(i))) sum += counts[i].load(std::memory_order_relaxed);
  }
  return sum;
}

void reset_counts() {
  for (auto& count : counts) count.store(0, std::memory_order_relaxed);
}

}  // namespace kvsim
