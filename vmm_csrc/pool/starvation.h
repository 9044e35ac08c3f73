// What allocs could not be granted, and how long a pool goes on asking others for it. Pure: the
// time is passed in, and whoever owns it holds the lock.
//
//   nothing missing -- begin --> missing -- got all, end --> nothing missing
//                                   |-- nobody has wanted it for the ledger's lease: end
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace kvelastic {

class Starvation {
 public:
  using Time = std::chrono::steady_clock::time_point;
  /// After this long an engine that goes on without the pages it wants asks for them once more.
  static constexpr std::chrono::milliseconds kAskAgain{10};
  /// After a wait in vain, allocs do not wait for this many times as long.
  static constexpr int kFruitlessWaits = 8;

  /// Pages that are missing.
  std::uint64_t pages() const { return pages_; }

  /// An alloc could not be granted `pages`, and wants them.
  void begin(std::uint64_t pages, Time now) {
    pages_ = pages;
    begun_ = wanted_ = now;
  }
  /// Somebody still wants them.
  void want(Time now) { wanted_ = now; }
  void got(std::uint64_t pages) { pages_ -= std::min(pages, pages_); }
  /// All of it is there, or nobody wants it any more: allocs may wait again.
  void end() {
    pages_ = 0;
    no_wait_before_ = {};
  }
  /// An alloc has waited for `wait` and got nothing.
  void waited_in_vain(std::chrono::nanoseconds wait, Time now) {
    no_wait_before_ = now + kFruitlessWaits * wait;
  }

  /// Whether an alloc may wait for others now, or one before it did so in vain a moment ago.
  bool may_wait(Time now) const { return now >= no_wait_before_; }
  /// Whether an alloc should ask others once more.
  bool may_ask(Time now) const { return now - begun_ >= kAskAgain; }
  /// Whether somebody has wanted the pages within `lease`.
  bool is_wanted(std::chrono::nanoseconds lease, Time now) const { return now - wanted_ <= lease; }

 private:
  std::uint64_t pages_ = 0;
  Time begun_{};
  Time wanted_{};
  Time no_wait_before_{};
};

}  // namespace kvelastic
