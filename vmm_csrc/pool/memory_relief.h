// How much memory stays free for what an instance's processes allocate besides pages, and how much
// is released if less is left. Plain values in, plain values out.
//
// clang-format off
//   |<------------------ left ------------------>|
//   |  spare: for pages  |  transient  |  margin |
//                                                ^ the kernel kills here
// clang-format on
//
//   transient   memory that the processes have held besides pages and do not hold now: the next
//               step needs it again for activations
//   margin      for unknown needs (HostMemory::Room::margin_bytes)
//
//   left < transient + margin       no page is created; parked and cached pages are released
//   left < transient + margin / 2   memory of requests is released as well, before the kernel kills
//
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>

#include "driver/host_memory.h"

namespace kvelastic {

/// The memory of an instance's processes besides pages, sampled. One thread.
class TransientMemory {
 public:
  /// A peak expires if as many samples of a working instance have not reached it again, at the
  /// latest after twice as many: ten minutes of work when memory is short.
  static constexpr std::uint64_t kWindowLooks = 3000;

  /// `at_work`: blocks were allocated or freed since the last sample. Idle time expires nothing.
  void see(std::uint64_t held_bytes, bool at_work);

  /// The peak minus the last sample.
  std::uint64_t now_bytes() const { return peak_bytes() - held_bytes_; }
  /// The largest now_bytes() of the last samples. Pages are created between steps, when the
  /// processes hold the least.
  std::uint64_t recent_bytes() const;

 private:
  std::uint64_t peak_bytes() const { return std::max(peak_bytes_, former_peak_bytes_); }

  static constexpr std::size_t kRecentLooks = 16;
  std::uint64_t held_bytes_ = 0;
  std::uint64_t peak_bytes_ = 0, former_peak_bytes_ = 0;  // of this window and the one before
  std::uint64_t looks_ = 0;                               // in this window
  std::array<std::uint64_t, kRecentLooks> recent_{};      // held bytes, unordered
  std::size_t recent_count_ = 0, recent_next_ = 0;
};

struct Relief {
  /// To be released from pages that no request uses.
  std::uint64_t bytes = 0;
  /// The part that must be released, from requests if necessary.
  std::uint64_t urgent_bytes = 0;
};

/// For the room that lacks the most; zero if no room lacks memory.
Relief relief(std::span<const HostMemory::Room> rooms, std::uint64_t transient_bytes);

/// When to sample again: sooner if less is left. 200 ms to 2 s.
std::chrono::nanoseconds next_look_in(std::span<const HostMemory::Room> rooms,
                                      std::uint64_t transient_bytes);

}  // namespace kvelastic
