// What a block is below the engine: 128 bits that stand for all the tokens up to its end, and for
// the namespace (kvelastic/tiers/namespace.py).
#pragma once

#include <cstdint>

namespace kvelastic {

struct BlockKey {
  std::uint64_t low = 0, high = 0;

  /// Zero is the key of no block.
  bool is_none() const { return (low | high) == 0; }
  bool operator==(const BlockKey&) const = default;
};
static_assert(sizeof(BlockKey) == 16);

}  // namespace kvelastic
