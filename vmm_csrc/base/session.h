// Whose turn it is to take blocks and pages away: one thread's, as often nested as it likes.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>

namespace kvelastic {

/// A recursive mutex that knows whether it is this thread's.
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
  /// How often the owner has entered. Pre: is_mine().
  std::uint32_t depth() const { return depth_; }
  bool is_mine() const {
    return owner_.load(std::memory_order_relaxed) == std::this_thread::get_id();
  }

 private:
  void entered() {
    if (depth_++ == 0) owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  }

  std::recursive_mutex mutex_;
  std::uint32_t depth_ = 0;  // mutex_ is held
  std::atomic<std::thread::id> owner_{};
};

}  // namespace kvelastic
