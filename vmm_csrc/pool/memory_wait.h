// Memory wait: pages that allocs lacked, and how long the pool keeps requesting them. Pure: the
// time is passed in, and the owner holds the lock.
//
//   nothing missing -- begin --> missing -- got all, end --> nothing missing
//                                   |-- not renewed before the ledger's request expires: end
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace kvelastic {

class MemoryWait {
 public:
  using Time = std::chrono::steady_clock::time_point;
  /// After this long an engine that still lacks its pages requests them again.
  static constexpr std::chrono::milliseconds kRequestAgain{10};
  /// After a fruitless wait, allocs do not wait for this many times as long.
  static constexpr int kFruitlessWaits = 8;

  /// The missing pages.
  std::uint64_t pages() const { return pages_; }

  /// An alloc lacked `pages` pages.
  void begin(std::uint64_t pages, Time now) {
    pages_ = pages;
    begun_ = renewed_ = now;
  }
  /// The pages are still missing.
  void renew(Time now) { renewed_ = now; }
  void got(std::uint64_t pages) { pages_ -= std::min(pages, pages_); }
  /// The pages have been found or are no longer needed: allocs may wait again.
  void end() {
    pages_ = 0;
    no_wait_before_ = {};
  }
  /// An alloc waited for `wait` without result.
  void waited_in_vain(std::chrono::nanoseconds wait, Time now) {
    no_wait_before_ = now + kFruitlessWaits * wait;
  }

  /// True unless an alloc waited without result a moment ago.
  bool may_wait(Time now) const { return now >= no_wait_before_; }
  /// True if an alloc should request memory from others again.
  bool may_request(Time now) const { return now - begun_ >= kRequestAgain; }
  /// True if the request was renewed within `expiry`.
  bool is_current(std::chrono::nanoseconds expiry, Time now) const {
    return now - renewed_ <= expiry;
  }

 private:
  std::uint64_t pages_ = 0;
  Time begun_{};
  Time renewed_{};
  Time no_wait_before_{};
};

}  // namespace kvelastic
