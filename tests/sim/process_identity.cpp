#include "process_identity.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace kvsim {
namespace {

/// State and start time out of /proc/<pid>/stat. False when there is no such process.
bool read_stat(std::int32_t pid, char* state, std::uint64_t* start_ticks) {
  char path[32];
  std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
  const int fd = ::open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  char text[1024];
  const ssize_t length = ::read(fd, text, sizeof text - 1);
  ::close(fd);
  if (length <= 0) return false;
  text[length] = '\0';
  // The name, in parentheses, may hold spaces and parentheses: the fields follow its last one.
  const char* at = std::strrchr(text, ')');
  if (at == nullptr || at[1] != ' ') return false;
  *state = at[2];
  at += 2;
  constexpr int kFieldsFromStateToStart = 19;
  for (int i = 0; i < kFieldsFromStateToStart; ++i) {
    at = std::strchr(at, ' ');
    if (at == nullptr) return false;
    ++at;
  }
  *start_ticks = std::strtoull(at, nullptr, 10);
  return true;
}

}  // namespace

ProcessIdentity this_process() {
  ProcessIdentity self{static_cast<std::int32_t>(::getpid()), 0};
  char state = 0;
  (void)read_stat(self.pid, &state, &self.start_ticks);
  return self;
}

bool is_alive(const ProcessIdentity& process) {
  char state = 0;
  std::uint64_t start_ticks = 0;
  if (!read_stat(process.pid, &state, &start_ticks)) return false;
  return state != 'Z' && state != 'X' && start_ticks == process.start_ticks;
}

}  // namespace kvsim
