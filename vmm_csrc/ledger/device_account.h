// The accounting rules of a device's memory: arithmetic on the sums over all members of its ledger.
//
// clang-format off
//   a GPU     [            capacity             ]        total_bytes is 0
//             [ grants ][ free ][ others ][ reserved ]
//
//   the host  [       capacity      ][  outside  ]       total_bytes is the machine's memory
//             [ grants ][ free  ][ reserved, others ]
// clang-format on
//
// Reserves and the memory of other processes ("others") first fill the memory outside the capacity.
// The rest reduces the capacity. On a GPU there is no memory outside the capacity.
//
// Rules, over the members that are awake:
//   grants + reserved  <=  capacity + outside, and grants <= capacity
//   guarantees         <=  capacity - (reserved - outside)
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"

namespace kvelastic {

/// a - b, or 0 on underflow.
constexpr std::uint64_t saturating_sub(std::uint64_t value, std::uint64_t what) {
  return value > what ? value - what : 0;
}
/// a + b, or the largest value on overflow.
constexpr std::uint64_t saturating_add(std::uint64_t value, std::uint64_t what) {
  return value + what < value ? ~std::uint64_t{0} : value + what;
}

/// The memory of a device.
struct DeviceMemorySize {
  std::uint64_t capacity_bytes = 0;  ///< the limit for the KV caches together
  std::uint64_t total_bytes = 0;  ///< all memory, if larger than the capacity; 0: only the capacity

  constexpr std::uint64_t outside_bytes() const {
    return saturating_sub(total_bytes, capacity_bytes);
  }
  /// The part of the capacity left for caches if `beside_bytes` are reserved or used by others.
  constexpr std::uint64_t left_for_caches(std::uint64_t beside_bytes) const {
    return saturating_sub(capacity_bytes, saturating_sub(beside_bytes, outside_bytes()));
  }
  constexpr bool has_room_for(std::uint64_t guaranteed_bytes, std::uint64_t reserved_bytes) const {
    return saturating_sub(reserved_bytes, outside_bytes()) <= capacity_bytes &&
           guaranteed_bytes <= left_for_caches(reserved_bytes);
  }
};

/// Fails with kIntegrity if the sums break one of the rules above.
Status check_account(const DeviceMemorySize& size, std::uint64_t granted_bytes,
                     std::uint64_t guaranteed_bytes, std::uint64_t reserved_bytes);

}  // namespace kvelastic
