// Pauses between looks at what passes by itself: short waits stay short, long ones cost no core.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

namespace kvelastic {

/// Each is twice as long as the one before, to a bound.
class Pauses {
 public:
  static constexpr std::chrono::nanoseconds kFirst = std::chrono::microseconds(20);
  static constexpr std::chrono::nanoseconds kLongest = std::chrono::milliseconds(1);

  /// How long to pause this time.
  std::chrono::nanoseconds next() {
    const std::chrono::nanoseconds now = next_;
    next_ = std::min(2 * next_, kLongest);
    return now;
  }
  void take() { std::this_thread::sleep_for(next()); }

 private:
  std::chrono::nanoseconds next_ = kFirst;
};

}  // namespace kvelastic
