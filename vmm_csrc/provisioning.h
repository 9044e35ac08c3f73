// How many pages stand by, parked, ahead of demand: as many as allocs took lately, within bounds;
// and how many nobody has needed. Pure; its owner holds the lock.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

namespace kvelastic {

class Provisioning {
 public:
  /// `enabled` false: no page is created before an alloc needs it.
  Provisioning(std::uint64_t min_pages, std::uint64_t max_pages, bool enabled)
      : min_pages_(min_pages), max_pages_(max_pages), enabled_(enabled) {}

  /// An alloc took so many parked pages.
  void took(std::uint64_t pages) { demand_pages_ += pages; }
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
  /// Parked pages that no alloc has needed since the last call.
  std::uint64_t take_idle(std::uint64_t parked_pages) {
    return std::exchange(fewest_parked_, parked_pages);
  }

 private:
  const std::uint64_t min_pages_;
  const std::uint64_t max_pages_;
  const bool enabled_;
  std::uint64_t demand_pages_ = 0;   // parked pages that allocs took since take_wanted()
  std::uint64_t fewest_parked_ = 0;  // since take_idle()
};

}  // namespace kvelastic
