// The account of a device's memory: pure arithmetic over the sums of all members of its ledger.
//
//   a GPU    [            capacity             ]        total_bytes is 0
//            [ grants ][ free ][ others ][ reserved ]
//
//   the host [       capacity      ][  outside  ]       total_bytes is all of the machine's memory
//            [ grants ][ free  ][ reserved, others ]
//
// Reserves and what strangers hold fill the memory outside the capacity first; what does not fit
// there comes out of the capacity. On a GPU there is nothing outside.
//
// The rules, over the members that are awake:
//   grants + reserved  <=  capacity + outside, and grants <= capacity
//   guarantees         <=  capacity - (reserved - outside)
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"

namespace kvelastic {

/// a - b, or 0 where that is less than nothing.
constexpr std::uint64_t less(std::uint64_t value, std::uint64_t what) {
  return value > what ? value - what : 0;
}
/// a + b, or the largest value where that is more.
constexpr std::uint64_t more(std::uint64_t value, std::uint64_t what) {
  return value + what < value ? ~std::uint64_t{0} : value + what;
}

/// The memory of a device.
struct DeviceMemorySize {
  std::uint64_t capacity_bytes = 0;  ///< what KV caches together may hold
  std::uint64_t total_bytes = 0;     ///< all there is, where that is more; 0: only the capacity

  constexpr std::uint64_t outside_bytes() const { return less(total_bytes, capacity_bytes); }
  /// What of the capacity is left when `beside_bytes` are reserved, or held by strangers.
  constexpr std::uint64_t left_for_caches(std::uint64_t beside_bytes) const {
    return less(capacity_bytes, less(beside_bytes, outside_bytes()));
  }
  constexpr bool has_room_for(std::uint64_t guaranteed_bytes, std::uint64_t reserved_bytes) const {
    return less(reserved_bytes, outside_bytes()) <= capacity_bytes &&
           guaranteed_bytes <= left_for_caches(reserved_bytes);
  }
};

/// Fails with kIntegrity where the sums break one of the rules above.
Status check_account(const DeviceMemorySize& size, std::uint64_t granted_bytes,
                     std::uint64_t guaranteed_bytes, std::uint64_t reserved_bytes);

}  // namespace kvelastic
