// Log lines from native threads, where Python's logger cannot be called.
//
//   if (debug_logging()) debug_log("mapped %zu pages", count);
#pragma once

#include <atomic>

namespace kvelastic {

namespace detail {
inline std::atomic<int> log_level{30};
}

/// Python's level numbers.
inline constexpr int kLogDebug = 10, kLogInfo = 20, kLogWarning = 30;

/// True if DEBUG lines are written. One atomic load, so hot paths may call it.
inline bool debug_logging() {
  return detail::log_level.load(std::memory_order_relaxed) <= kLogDebug;
}
inline bool info_logging() {
  return detail::log_level.load(std::memory_order_relaxed) <= kLogInfo;
}
inline bool warning_logging() {
  return detail::log_level.load(std::memory_order_relaxed) <= kLogWarning;
}

/// Sets the lowest level that is written, for the whole process.
inline void set_log_level(int level) {
  detail::log_level = level;
}

/// Writes one line to stderr in the format of kvelastic's Python logger. Callable from any thread
/// and under any lock. Never blocks: if stderr is not ready, the line is dropped, and the next line
/// states how many lines were dropped.
[[gnu::format(printf, 1, 2)]] void debug_log(const char* format, ...);
[[gnu::format(printf, 1, 2)]] void info_log(const char* format, ...);
[[gnu::format(printf, 1, 2)]] void warning_log(const char* format, ...);

}  // namespace kvelastic
