// How many pages are parked ahead of demand (as many as allocs took recently, within bounds), and
// how many were not needed. Pure; its owner holds the lock.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <utility>

namespace kvelastic {

/// The use of parked pages during an interval.
struct ParkedUse {
  std::uint64_t unneeded_pages = 0;  ///< parked for the whole interval
  std::uint64_t taken_pages = 0;     ///< by allocs
};

/// Bounds the pages ahead of demand: at most 256 MiB, but at least one page. Ten pages of 128 MiB
/// are more than a burst needs.
inline std::uint64_t pages_ahead(std::uint64_t pages, std::uint64_t page_bytes) {
  constexpr std::uint64_t kMostBytes = std::uint64_t{256} << 20;
  return std::min(pages, std::max<std::uint64_t>(kMostBytes / page_bytes, 1));
}

class Provisioning {
 public:
  /// `enabled` false: pages are created only when an alloc needs them.
  Provisioning(std::uint64_t min_pages, std::uint64_t max_pages, bool enabled)
      : min_pages_(min_pages), max_pages_(max_pages), enabled_(enabled) {}

  /// An alloc took this many parked pages.
  void took(std::uint64_t pages) {
    demand_pages_ += pages;
    taken_pages_ += pages;
  }
  void see_parked(std::uint64_t pages) { fewest_parked_ = std::min(fewest_parked_, pages); }

  /// True if demand requires pages. Only demand does: a page that was just trimmed must not be
  /// mapped again without need.
  bool is_due(std::uint64_t parked_pages) const {
    return enabled_ && parked_pages < min_pages_ && demand_pages_ > 0;
  }
  /// Returns how many pages to map for the use since the last call.
  std::uint64_t take_due(std::uint64_t parked_pages) {
    if (demand_pages_ == 0) return 0;
    const std::uint64_t mark = std::clamp(std::exchange(demand_pages_, 0), min_pages_, max_pages_);
    return mark > parked_pages ? mark - parked_pages : 0;
  }
  /// A trim cancels the pages that earlier use required: they would be mapped again right after it.
  void cancel() { demand_pages_ = 0; }
  /// These pages were not mapped and are still needed.
  void put_back(std::uint64_t pages, std::uint64_t parked_pages) {
    demand_pages_ = std::max(demand_pages_, pages + parked_pages);
  }
  /// Returns the use of parked pages since the last call.
  ParkedUse take_use(std::uint64_t parked_pages) {
    return {std::exchange(fewest_parked_, parked_pages), std::exchange(taken_pages_, 0)};
  }

 private:
  const std::uint64_t min_pages_;
  const std::uint64_t max_pages_;
  const bool enabled_;
  std::uint64_t demand_pages_ = 0;   // parked pages used by allocs since take_due()
  std::uint64_t fewest_parked_ = 0;  // since take_use()
  std::uint64_t taken_pages_ = 0;    // since take_use()
};

/// Loads have priority over pages ahead of demand: a worker executes commands one after the other,
/// and zeroing a page takes as long as loading many blocks. Pure; its owner holds the lock.
class LoadsFirst {
 public:
  using Time = std::chrono::steady_clock::time_point;
  /// The copies of a prompt follow each other: this soon after one, more may come.
  static constexpr std::chrono::milliseconds kMore{20};
  /// If loads never pause, pages wait at most this long.
  static constexpr std::chrono::seconds kLongest{1};

  void begin(Time now) {
    if (!is_busy(now)) since_ = now;
    ++under_way_;
  }
  void end(Time now) {
    --under_way_;
    ended_ = now;
  }
  /// True if pages ahead of demand must wait.
  bool go_first(Time now) const { return is_busy(now) && now < since_ + kLongest; }

 private:
  bool is_busy(Time now) const { return under_way_ > 0 || now < ended_ + kMore; }

  unsigned under_way_ = 0;  // copies
  Time since_;              // when the first copy began after the last pause
  Time ended_;              // when the last copy ended
};

}  // namespace kvelastic
