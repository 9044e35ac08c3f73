#include "process.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace kvelastic {

std::optional<std::uint64_t> process_start_ticks(pid_t pid) {
  std::array<char, 64> path{};
  std::snprintf(path.data(), path.size(), "/proc/%d/stat", pid);
  const int fd = ::open(path.data(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return std::nullopt;
  std::array<char, 1024> text{};
  const ssize_t length = ::read(fd, text.data(), text.size() - 1);
  ::close(fd);
  if (length <= 0) return std::nullopt;
  // The second field, the name, may hold spaces and brackets: count from its last bracket. What
  // follows is field 3, the state.
  const char* at = std::strrchr(text.data(), ')');
  if (at == nullptr || at[1] != ' ' || at[2] == 'Z' || at[2] == 'X') return std::nullopt;
  constexpr int kStartTimeField = 22;
  at += 2;
  for (int field = 3; field < kStartTimeField; ++field) {
    at = std::strchr(at, ' ');
    if (at == nullptr) return std::nullopt;
    ++at;
  }
  return std::strtoull(at, nullptr, 10);
}

}  // namespace kvelastic
