// The set of free slots: a hierarchy of bitmaps, so that the lowest free slot is found in a few
// steps.
//
// Always taking the lowest slot fills a store's files from the start. If the capacity is later
// reduced, few objects lie beyond the new end.
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

  /// Makes room for slots 0 .. slots-1. New slots are not free; existing ones keep their state.
  /// Fails with kOutOfMemory. Pre: slots <= kMostSlots.
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

  /// Idempotent.
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

  /// Idempotent.
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

  /// Removes and returns the lowest free slot; empty if the set is empty.
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
