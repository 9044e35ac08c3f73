// The session: the exclusive right of one thread to take blocks and pages. May be nested.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>

namespace kvelastic {

/// A recursive mutex that knows whether the calling thread holds it.
class Session {
 public:
  void lock() {
    mutex_.lock();
    entered();
  }
  bool try_lock() {
    if (!mutex_.try_lock()) return false;
    entered();
    return true;
  }
  /// Pre: is_mine().
  void unlock() {
    if (--depth_ == 0) owner_.store(std::thread::id(), std::memory_order_relaxed);
    mutex_.unlock();
  }
  /// How many times the owner holds the lock. Pre: is_mine().
  std::uint32_t depth() const { return depth_; }
  bool is_mine() const {
    return owner_.load(std::memory_order_relaxed) == std::this_thread::get_id();
  }

 private:
  void entered() {
    if (depth_++ == 0) owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  }

  std::recursive_mutex mutex_;
  std::uint32_t depth_ = 0;  // guarded by mutex_
  std::atomic<std::thread::id> owner_{};
};

}  // namespace kvelastic
