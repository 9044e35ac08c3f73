// The identity of a block's contents: 128 bits for all tokens up to its end and the namespace
// (kvelastic/tiers/namespace.py).
#pragma once

#include <cstdint>

namespace kvelastic {

struct BlockKey {
  std::uint64_t low = 0, high = 0;

  /// Zero is not a valid key.
  bool is_none() const { return (low | high) == 0; }
  bool operator==(const BlockKey&) const = default;
};
static_assert(sizeof(BlockKey) == 16);

}  // namespace kvelastic
