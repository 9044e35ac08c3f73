// Lines of KVELASTIC_LOG_LEVEL=DEBUG from native threads, where Python's logger cannot be called.
//
//   if (debug_logging()) debug_log("mapped %zu pages", count);
#pragma once

#include <atomic>

namespace kvelastic {

namespace detail {
inline std::atomic<bool> debug_is_on{false};
}

/// Whether lines are wanted: one load, also where an engine waits.
inline bool debug_logging() {
  return detail::debug_is_on.load(std::memory_order_relaxed);
}

/// Turns the lines on or off for the whole process.
inline void set_debug_logging(bool on) {
  detail::debug_is_on = on;
}

/// Writes one line to stderr, as Python's logger of kvelastic writes it. Any thread, under any
/// lock: where stderr would make it wait, the line is dropped, and the next one says how many were.
[[gnu::format(printf, 1, 2)]] void debug_log(const char* format, ...);

}  // namespace kvelastic
