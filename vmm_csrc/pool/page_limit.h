// How many pages a pool may hold: the operator's limit, bounded by the device's capacity and the
// range; less under memory pressure; none while asleep. Pure; its owner holds the lock.
#pragma once

#include <algorithm>
#include <cstdint>

#include "pool/pressure.h"

namespace kvelastic {

class PageLimit {
 public:
  PageLimit(std::uint64_t requested_bytes, std::uint64_t capacity_bytes, std::uint64_t page_bytes,
            std::uint64_t range_pages)
      : page_bytes_(page_bytes), range_pages_(range_pages), seen_capacity_bytes_(capacity_bytes) {
    request(requested_bytes, capacity_bytes);
  }

  void request(std::uint64_t bytes, std::uint64_t capacity_bytes) {
    requested_bytes_ = bytes;
    // Page 0 holds the null block and is unmapped only in sleep, so one page is the minimum.
    pages_ =
        std::clamp<std::uint64_t>(std::min(bytes, capacity_bytes) / page_bytes_, 1, range_pages_);
  }
  /// True if the last see_capacity() had this value.
  bool has_seen(std::uint64_t capacity_bytes) const {
    return seen_capacity_bytes_ == capacity_bytes;
  }
  void see_capacity(std::uint64_t bytes) {
    seen_capacity_bytes_ = bytes;
    request(requested_bytes_, bytes);
  }
  void set_asleep(bool asleep) { asleep_ = asleep; }

  /// The bound of limit and device without memory pressure; none while asleep.
  std::uint64_t allowed_pages() const { return asleep_ ? 0 : pages_; }
  std::uint64_t pages() const { return asleep_ ? 0 : std::min(pages_, pressure.pages()); }
  std::uint64_t requested_bytes() const { return requested_bytes_; }
  bool is_asleep() const { return asleep_; }
  bool is_under_pressure() const { return !asleep_ && pressure.pages() < pages_; }

  Pressure pressure;

 private:
  const std::uint64_t page_bytes_;
  const std::uint64_t range_pages_;
  std::uint64_t requested_bytes_ = 0;
  std::uint64_t pages_ = 0;
  std::uint64_t seen_capacity_bytes_;
  bool asleep_ = false;
};

}  // namespace kvelastic
