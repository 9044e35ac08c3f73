#include "pool/memory_relief.h"

#include <algorithm>

namespace kvelastic {
namespace {

/// Upper bound of how fast a machine's memory fills.
constexpr std::uint64_t kBytesPerMillisecond = std::uint64_t{8} << 20;
constexpr std::chrono::milliseconds kSoonestLook{200};
constexpr std::chrono::milliseconds kLatestLook{2000};

std::uint64_t missing(std::uint64_t wanted, std::uint64_t there) {
  return wanted > there ? wanted - there : 0;
}

}  // namespace

void TransientMemory::see(std::uint64_t held_bytes, bool at_work) {
  if (at_work && ++looks_ > kWindowLooks) {
    former_peak_bytes_ = peak_bytes_;
    peak_bytes_ = 0;
    looks_ = 1;
  }
  held_bytes_ = held_bytes;
  peak_bytes_ = std::max(peak_bytes_, held_bytes);
  recent_[recent_next_] = held_bytes;
  recent_next_ = (recent_next_ + 1) % kRecentLooks;
  recent_count_ = std::min(recent_count_ + 1, kRecentLooks);
}

std::uint64_t TransientMemory::recent_bytes() const {
  if (recent_count_ == 0) return 0;
  const auto seen = std::span(recent_).first(recent_count_);
  return peak_bytes() - *std::ranges::min_element(seen);
}

Relief relief(std::span<const HostMemory::Room> rooms, std::uint64_t transient_bytes) {
  Relief most;
  for (const HostMemory::Room& room : rooms) {
    const std::uint64_t margin = room.margin_bytes();
    most.bytes = std::max(most.bytes, missing(transient_bytes + margin, room.left_bytes));
    most.urgent_bytes =
        std::max(most.urgent_bytes, missing(transient_bytes + margin / 2, room.left_bytes));
  }
  return most;
}

std::chrono::nanoseconds next_look_in(std::span<const HostMemory::Room> rooms,
                                      std::uint64_t transient_bytes) {
  std::chrono::milliseconds soonest = kLatestLook;
  for (const HostMemory::Room& room : rooms) {
    const std::uint64_t spare = room.spare_bytes(transient_bytes);
    const auto filled_in =
        std::min<std::uint64_t>(spare / kBytesPerMillisecond, kLatestLook.count());
    soonest = std::min(soonest, std::chrono::milliseconds(filled_in));
  }
  return std::max(soonest, kSoonestLook);
}

}  // namespace kvelastic
