// Which slots are free: a bitmap with bitmaps above it, so that the lowest is found in a few steps.
//
// The lowest goes first: a store's files fill from their beginning, and a smaller capacity finds
// few records above it.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <optional>

#include "base/lazy_array.h"

namespace kvelastic {

class FreeSlots {
 public:
  static constexpr std::uint64_t kMostSlots = std::uint64_t{1} << 28;

  /// Room for slots 0 .. slots-1; new ones are not free. Keeps what is there. Pre: <= kMostSlots.
  Status grow(std::uint64_t slots) {
    std::uint64_t words = slots;
    for (LazyArray<std::uint64_t>& level : levels_) {
      words = (words + 63) / 64;
      if (Status grown = level.grow(words); !grown) return grown;
    }
    return ok();
  }

  std::uint64_t size() const { return size_; }
  bool contains(std::uint64_t slot) const {
    return (levels_[0][slot / 64] >> (slot % 64) & 1) != 0;
  }

  /// Repeatable.
  void add(std::uint64_t slot) {
    if (contains(slot)) return;
    ++size_;
    for (LazyArray<std::uint64_t>& level : levels_) {
      std::uint64_t& word = level[slot / 64];
      const bool was_empty = word == 0;
      word |= std::uint64_t{1} << (slot % 64);
      if (!was_empty) return;
      slot /= 64;
    }
  }

  /// Repeatable.
  void remove(std::uint64_t slot) {
    if (!contains(slot)) return;
    --size_;
    for (LazyArray<std::uint64_t>& level : levels_) {
      std::uint64_t& word = level[slot / 64];
      word &= ~(std::uint64_t{1} << (slot % 64));
      if (word != 0) return;
      slot /= 64;
    }
  }

  /// The lowest one, which is not free any more.
  std::optional<std::uint32_t> take_lowest() {
    if (size_ == 0) return std::nullopt;
    std::uint64_t at = 0;
    for (std::size_t level = kLevels; level-- > 0;) {
      at = at * 64 + static_cast<std::uint64_t>(std::countr_zero(levels_[level][at]));
    }
    remove(at);
    return static_cast<std::uint32_t>(at);
  }

 private:
  static constexpr std::size_t kLevels = 5;  // 64^5 = 2^30
  std::array<LazyArray<std::uint64_t>, kLevels> levels_;
  std::uint64_t size_ = 0;
};

}  // namespace kvelastic
