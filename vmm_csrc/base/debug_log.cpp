#include "base/debug_log.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <ctime>

namespace kvelastic {
namespace {

/// Shorter than PIPE_BUF: a pipe that is ready takes the whole line, so lines of two threads never
/// mix.
constexpr std::size_t kLineRoom = 1024;

std::atomic<std::uint64_t> dropped{0};

bool can_write() {
  pollfd stderr_now{STDERR_FILENO, POLLOUT, 0};
  return ::poll(&stderr_now, 1, 0) == 1 && (stderr_now.revents & POLLOUT) != 0;
}

void log_line(const char* level, const char* format, std::va_list arguments) {
  if (!can_write()) {
    ++dropped;
    return;
  }
  char line[kLineRoom];
  std::size_t used = 0;
  // Leaves room for the newline; longer text is cut off.
  const auto count = [&used](int written) {
    if (written > 0) used = std::min(used + static_cast<std::size_t>(written), kLineRoom - 2);
  };
  char when[32] = "";
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  if (::localtime_r(&now, &local) != nullptr) {
    (void)std::strftime(when, sizeof when, " %m-%d %H:%M:%S", &local);
  }
  count(std::snprintf(line, kLineRoom, "%s%s [kvelastic %d] ", level, when, ::getpid()));
  if (const std::uint64_t lost = dropped.exchange(0); lost > 0) {
    count(std::snprintf(line + used, kLineRoom - used, "(%llu lines dropped) ",
                        static_cast<unsigned long long>(lost)));
  }
  count(std::vsnprintf(line + used, kLineRoom - used, format, arguments));
  line[used++] = '\n';
  (void)!::write(STDERR_FILENO, line, used);
}

}  // namespace

void debug_log(const char* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  log_line("DEBUG", format, arguments);
  va_end(arguments);
}

void info_log(const char* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  log_line("INFO", format, arguments);
  va_end(arguments);
}

void warning_log(const char* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  log_line("WARNING", format, arguments);
  va_end(arguments);
}

}  // namespace kvelastic
