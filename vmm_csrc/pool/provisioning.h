// How many pages stand by, parked, ahead of demand: as many as allocs took lately, within bounds;
// and how many nobody has needed. Pure; its owner holds the lock.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <utility>

namespace kvelastic {

/// What became of parked pages in a time.
struct ParkedUse {
  std::uint64_t unneeded_pages = 0;  ///< parked all through it
  std::uint64_t taken_pages = 0;     ///< by allocs
};

/// How many pages may stand by where `pages` were asked for: one, or as many as are 256 MiB. Ten of
/// 128 MiB are more than a burst needs.
inline std::uint64_t pages_ahead(std::uint64_t pages, std::uint64_t page_bytes) {
  constexpr std::uint64_t kMostBytes = std::uint64_t{256} << 20;
  return std::min(pages, std::max<std::uint64_t>(kMostBytes / page_bytes, 1));
}

class Provisioning {
 public:
  /// `enabled` false: no page is created before an alloc needs it.
  Provisioning(std::uint64_t min_pages, std::uint64_t max_pages, bool enabled)
      : min_pages_(min_pages), max_pages_(max_pages), enabled_(enabled) {}

  /// An alloc took so many parked pages.
  void took(std::uint64_t pages) {
    demand_pages_ += pages;
    taken_pages_ += pages;
  }
  void see_parked(std::uint64_t pages) { fewest_parked_ = std::min(fewest_parked_, pages); }

  /// Whether demand calls for pages. Only demand does: what was just trimmed must not come back by
  /// itself.
  bool is_due(std::uint64_t parked_pages) const {
    return enabled_ && parked_pages < min_pages_ && demand_pages_ > 0;
  }
  /// How many to map, for what was taken since the last time.
  std::uint64_t take_wanted(std::uint64_t parked_pages) {
    const std::uint64_t mark = std::clamp(std::exchange(demand_pages_, 0), min_pages_, max_pages_);
    return mark > parked_pages ? mark - parked_pages : 0;
  }
  /// So many of them were not mapped, and are wanted still.
  void put_back(std::uint64_t pages, std::uint64_t parked_pages) {
    demand_pages_ = std::max(demand_pages_, pages + parked_pages);
  }
  /// What became of parked pages since the last call.
  ParkedUse take_use(std::uint64_t parked_pages) {
    return {std::exchange(fewest_parked_, parked_pages), std::exchange(taken_pages_, 0)};
  }

 private:
  const std::uint64_t min_pages_;
  const std::uint64_t max_pages_;
  const bool enabled_;
  std::uint64_t demand_pages_ = 0;   // parked pages that allocs took since take_wanted()
  std::uint64_t fewest_parked_ = 0;  // since take_use()
  std::uint64_t taken_pages_ = 0;    // since take_use()
};

/// Loads go before pages that nobody waits for yet: a worker carries out one command after another,
/// and zeroing a page takes as long as loading many blocks. Pure; its owner holds the lock.
class LoadsFirst {
 public:
  using Time = std::chrono::steady_clock::time_point;
  /// The copies of one prompt come one after another: so long after one of them there may be more.
  static constexpr std::chrono::milliseconds kMore{20};
  /// Where loads never pause, pages wait no longer for them.
  static constexpr std::chrono::seconds kLongest{1};

  void begin(Time now) {
    if (!is_busy(now)) since_ = now;
    ++under_way_;
  }
  void end(Time now) {
    --under_way_;
    ended_ = now;
  }
  /// Whether pages ahead of demand are to wait.
  bool go_first(Time now) const { return is_busy(now) && now < since_ + kLongest; }

 private:
  bool is_busy(Time now) const { return under_way_ > 0 || now < ended_ + kMore; }

  unsigned under_way_ = 0;  // copies
  Time since_;              // when the first of those began that left no pause
  Time ended_;              // the last one
};

}  // namespace kvelastic
