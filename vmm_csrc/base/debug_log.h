// Lines of the log from native threads, where Python's logger cannot be called.
//
//   if (debug_logging()) debug_log("mapped %zu pages", count);
#pragma once

#include <atomic>

namespace kvelastic {

namespace detail {
inline std::atomic<int> log_level{30};
}

/// Python's numbers of levels.
inline constexpr int kLogDebug = 10, kLogInfo = 20;

/// Whether lines at DEBUG are wanted: one load, also where an engine waits.
inline bool debug_logging() {
  return detail::log_level.load(std::memory_order_relaxed) <= kLogDebug;
}
/// The same for INFO.
inline bool info_logging() {
  return detail::log_level.load(std::memory_order_relaxed) <= kLogInfo;
}

/// Sets the least level that is written, for the whole process.
inline void set_log_level(int level) {
  detail::log_level = level;
}

/// Writes one line to stderr, as Python's logger of kvelastic writes it. Any thread, under any
/// lock: where stderr would make it wait, the line is dropped, and the next one says how many were.
[[gnu::format(printf, 1, 2)]] void debug_log(const char* format, ...);
/// The same at INFO.
[[gnu::format(printf, 1, 2)]] void info_log(const char* format, ...);

}  // namespace kvelastic
