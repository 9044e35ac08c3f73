// The availability epoch: a counter that increases whenever more blocks become available, and the
// threads that wait for it to change.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>

#include "base/futex.h"

namespace kvelastic {

class AvailabilityEpoch {
 public:
  /// Lock-free; any thread.
  std::uint32_t count() const { return count_.load(std::memory_order_acquire); }

  // note(), is_awaited() and wait() need the pool's lock.

  /// Increments the epoch and wakes the waiting threads. Without waiting threads it makes no system
  /// call: the pool's lock keeps a thread from starting to wait during the call.
  void note() {
    count_.store(count_.load(std::memory_order_relaxed) + 1, std::memory_order_release);
    if (waiting_ > 0) futex_wake(count_);
  }
  bool is_awaited() const { return waiting_ > 0; }
  /// Releases the lock, waits until the epoch differs from `seen` or `timeout` has passed, then
  /// takes the lock again. May return early.
  void wait(std::unique_lock<std::mutex>& lock, std::uint32_t seen,
            std::chrono::nanoseconds timeout) {
    ++waiting_;
    lock.unlock();
    futex_wait(count_, seen, timeout);
    lock.lock();
    --waiting_;
  }

 private:
  FutexWord count_{0};
  std::uint32_t waiting_ = 0;
};

}  // namespace kvelastic
