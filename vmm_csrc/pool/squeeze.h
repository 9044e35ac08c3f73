// A limit below the operator's, for as long as others are owed blocks in use. Pure: the time is
// passed in, and whoever owns it holds the lock.
//
//   none -- begin(to) --> in force -- met: held <= to --> met, for kRepeatedFor --> none
//             ^  again      |                               a repeated request takes nothing more
//             '-------------'-- nobody has asked for kSqueezeLease --> none
#pragma once

#include <chrono>
#include <cstdint>

namespace kvelastic {

class Squeeze {
 public:
  using Time = std::chrono::steady_clock::time_point;
  static constexpr std::uint64_t kNone = ~std::uint64_t{0};
  /// A squeeze that nobody has asked for so long is lifted.
  static constexpr std::chrono::milliseconds kLease{500};
  /// After a squeeze was met, a request for as much may still be one of those that repeated it.
  static constexpr std::chrono::milliseconds kRepeatedFor{40};

  /// What may be held; kNone: there is no squeeze.
  std::uint64_t pages() const { return pages_; }
  bool is_in_force() const { return pages_ != kNone; }

  /// The least that another request may squeeze to. Requests for blocks in use are repeated until
  /// they are met, and one that was written just before the last page went is carried out just
  /// after: neither may take anything twice.
  std::uint64_t floor(Time now) const {
    if (is_in_force()) return pages_;
    return now < met_until_ ? met_pages_ : 0;
  }

  /// Begins, or is asked for again.
  void begin(std::uint64_t pages, Time now) {
    pages_ = pages;
    until_ = now + kLease;
  }

  /// Ends where the pool is no longer `over` it, or where nobody asks for it any more; answers
  /// whether it has ended. Pre: is_in_force().
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
  std::uint64_t met_pages_ = 0;  // of the last one that was met
  Time met_until_{};             // until when that counts
};

}  // namespace kvelastic
