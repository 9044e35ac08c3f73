#include "base/process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace kvelastic {
namespace {

struct Stat {
  bool readable = false;
  std::optional<std::uint64_t> start_ticks{};  // none: the process is dead
};

Stat read_stat(pid_t pid) {
  std::array<char, 64> path{};
  std::snprintf(path.data(), path.size(), "/proc/%d/stat", pid);
  const int fd = ::open(path.data(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {};
  std::array<char, 1024> text{};
  const ssize_t length = ::read(fd, text.data(), text.size() - 1);
  ::close(fd);
  if (length <= 0) return {};
  // The second field, the name, may contain spaces and parentheses, so parsing starts at the last
  // ')'. Field 3, the state, follows.
  const char* at = std::strrchr(text.data(), ')');
  if (at == nullptr || at[1] != ' ') return {};
  const bool dead = at[2] == 'Z' || at[2] == 'X';
  constexpr int kThreadsField = 20, kStartTimeField = 22;
  at += 2;
  for (int field = 3; field < kStartTimeField; ++field) {
    // A thread group's leader can be a zombie while its other threads run.
    if (field == kThreadsField && dead && std::strtoull(at, nullptr, 10) <= 1) {
      return {true, std::nullopt};
    }
    at = std::strchr(at, ' ');
    if (at == nullptr) return {};
    ++at;
  }
  return {true, std::strtoull(at, nullptr, 10)};
}

}  // namespace

std::uint64_t own_pid_namespace() {
  struct stat state{};
  return ::stat("/proc/self/ns/pid", &state) == 0 ? state.st_ino : 0;
}

bool process_is_seen(pid_t pid, std::uint64_t start_ticks) {
  const Stat stat = read_stat(pid);
  return stat.readable && stat.start_ticks == start_ticks;
}

std::optional<std::uint64_t> process_start_ticks(pid_t pid) {
  return read_stat(pid).start_ticks;
}

bool process_is_gone(pid_t pid, std::uint64_t start_ticks) {
  const Stat stat = read_stat(pid);
  if (stat.readable) return stat.start_ticks != start_ticks;
  return pid <= 0 || (::kill(pid, 0) != 0 && errno == ESRCH);
}

}  // namespace kvelastic
