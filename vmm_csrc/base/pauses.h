// Backoff between polls: short waits stay short, long waits use little CPU.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

namespace kvelastic {

/// Each pause is twice as long as the last, up to kLongest.
class Pauses {
 public:
  static constexpr std::chrono::nanoseconds kFirst = std::chrono::microseconds(20);
  static constexpr std::chrono::nanoseconds kLongest = std::chrono::milliseconds(1);

  /// Returns the next pause without sleeping.
  std::chrono::nanoseconds next() {
    const std::chrono::nanoseconds now = next_;
    next_ = std::min(2 * next_, kLongest);
    return now;
  }
  void take() { std::this_thread::sleep_for(next()); }

 private:
  std::chrono::nanoseconds next_ = kFirst;
};

/// Spins for kSpin before the first pause, because the shortest sleep takes 70 us.
class PausesAfterSpin {
 public:
  using Time = std::chrono::steady_clock::time_point;
  static constexpr std::chrono::nanoseconds kSpin = std::chrono::microseconds(200);

  explicit PausesAfterSpin(Time begin) : spin_until_(begin + kSpin) {}

  std::chrono::nanoseconds next(Time now) {
    return now < spin_until_ ? std::chrono::nanoseconds(0) : pauses_.next();
  }
  void take() {
    const std::chrono::nanoseconds pause = next(std::chrono::steady_clock::now());
    if (pause.count() > 0) std::this_thread::sleep_for(pause);
  }

 private:
  const Time spin_until_;
  Pauses pauses_;
};

}  // namespace kvelastic
