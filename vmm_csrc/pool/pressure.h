// Memory pressure: a limit below the operator's while other instances are owed blocks in use. Pure:
// the time is passed in, and the owner holds the lock.
//
//   none -- begin(to) --> in force -- met: held <= to --> met, for kRepeatedFor --> none
//             ^  again      |                               a repeated request has no effect
//             '-------------'-- not requested for kExpiry --> none
#pragma once

#include <chrono>
#include <cstdint>

namespace kvelastic {

class Pressure {
 public:
  using Time = std::chrono::steady_clock::time_point;
  static constexpr std::uint64_t kNone = ~std::uint64_t{0};
  /// Pressure that is not requested again for this long ends.
  static constexpr std::chrono::milliseconds kExpiry{500};
  /// After pressure was met, an equal request may still be a repetition of the met one.
  static constexpr std::chrono::milliseconds kRepeatedFor{40};

  /// The pages that may be held; kNone without pressure.
  std::uint64_t pages() const { return pages_; }
  bool is_in_force() const { return pages_ != kNone; }

  /// The lowest bound that another request may set. Requests for blocks in use are repeated until
  /// they are met. A repetition written just before the last page was released is processed just
  /// after. Neither may take memory twice.
  std::uint64_t floor(Time now) const {
    if (is_in_force()) return pages_;
    return now < met_until_ ? met_pages_ : 0;
  }

  /// Begins pressure or renews it.
  void begin(std::uint64_t pages, Time now) {
    pages_ = pages;
    until_ = now + kExpiry;
  }

  /// Ends the pressure if the pool is no longer `over` it, or if it was not renewed in time.
  /// Returns whether it has ended. Pre: is_in_force().
  bool expire(bool over, Time now) {
    if (over && now < until_) return false;
    if (!over) {
      met_pages_ = pages_;
      met_until_ = now + kRepeatedFor;
    }
    pages_ = kNone;
    return true;
  }

 private:
  std::uint64_t pages_ = kNone;
  Time until_{};
  std::uint64_t met_pages_ = 0;  // of the last pressure that was met
  Time met_until_{};             // until when that counts
};

}  // namespace kvelastic
