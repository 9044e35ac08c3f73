// A count that goes up whenever blocks can be had that could not be had before, and those who wait
// for it.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>

#include "base/futex.h"

namespace kvelastic {

class Arrivals {
 public:
  /// Lock-free.
  std::uint32_t count() const { return count_.load(std::memory_order_acquire); }

  // The pool's lock is held:

  /// Nobody can begin to wait meanwhile, so who waits is woken, and nobody else costs a call.
  void note() {
    count_.store(count_.load(std::memory_order_relaxed) + 1, std::memory_order_release);
    if (waiting_ > 0) futex_wake(count_);
  }
  bool is_awaited() const { return waiting_ > 0; }
  /// Waits, without the lock, until the count is another than `seen`, `timeout` at most.
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
