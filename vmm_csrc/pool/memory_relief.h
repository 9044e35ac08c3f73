// How much memory stays free for what an instance's processes allocate besides pages, and what is
// given back where less is left. Plain values in, plain values out.
//
//   |<------------------ left ------------------>|
//   |  spare: for pages  |  transient  |  margin |
//                                                ^ here the kernel kills
//
//   transient   what the processes have held besides pages and do not hold now: the activations of
//               the next step come again
//   margin      for what nobody has seen yet (HostMemory::Room::margin_bytes)
//
//   left < transient + margin       no page is created; parked and cached pages are given back
//   left < transient + margin / 2   requests make way as well: the alternative is the kernel's
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>

#include "driver/host_memory.h"

namespace kvelastic {

/// What the processes of an instance hold besides pages, look by look. One thread.
class TransientMemory {
 public:
  /// A peak is forgotten when as many looks at an instance at work have not seen it again, and at
  /// the latest after twice as many: ten minutes of work where memory is short.
  static constexpr std::uint64_t kWindowLooks = 3000;

  /// `at_work`: something was allocated or freed since the last look. Time in which nobody works
  /// makes nothing forgotten.
  void see(std::uint64_t held_bytes, bool at_work);

  /// How much more than at the last look they have held.
  std::uint64_t now_bytes() const { return peak_bytes() - held_bytes_; }
  /// The most that now_bytes() came to in the last few looks. Pages are created between steps, when
  /// the processes hold least.
  std::uint64_t recent_bytes() const;

 private:
  std::uint64_t peak_bytes() const { return std::max(peak_bytes_, former_peak_bytes_); }

  static constexpr std::size_t kRecentLooks = 16;
  std::uint64_t held_bytes_ = 0;
  std::uint64_t peak_bytes_ = 0, former_peak_bytes_ = 0;  // of this window and of the one before
  std::uint64_t looks_ = 0;                               // of this window
  std::array<std::uint64_t, kRecentLooks> recent_{};      // what was held, in no order that matters
  std::size_t recent_count_ = 0, recent_next_ = 0;
};

struct Relief {
  /// To be given back by pages that no request uses.
  std::uint64_t bytes = 0;
  /// What has to come of it, from requests where it must.
  std::uint64_t urgent_bytes = 0;
};

/// Of the room where the most is missing; nothing where none has too little.
Relief relief(std::span<const HostMemory::Room> rooms, std::uint64_t transient_bytes);

/// When to look again: the sooner, the less is left. 200 ms to 2 s.
std::chrono::nanoseconds next_look_in(std::span<const HostMemory::Room> rooms,
                                      std::uint64_t transient_bytes);

}  // namespace kvelastic
