// A pool's counters since its creation, for stats() and for its segment.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "segment/control_block.h"

namespace kvelastic {

/// The owner holds the lock.
class Counters {
 public:
  void add(Counter counter, std::uint64_t amount = 1) {
    counts_[static_cast<std::size_t>(counter)] += amount;
    if (control_block_) control_block_->add(counter, amount);
  }
  std::uint64_t operator[](Counter counter) const {
    return counts_[static_cast<std::size_t>(counter)];
  }

  /// Publishes the counters, including earlier counts, to `control_block`; null stops publishing.
  void publish_to(std::shared_ptr<ControlBlockOwner> control_block) {
    if (control_block == control_block_) return;
    control_block_ = std::move(control_block);
    if (!control_block_) return;
    for (std::size_t i = 0; i < counts_.size(); ++i) {
      control_block_->add(static_cast<Counter>(i), counts_[i]);
    }
  }
  ControlBlockOwner* control_block() const { return control_block_.get(); }

 private:
  std::array<std::uint64_t, static_cast<std::size_t>(Counter::kCount)> counts_{};
  std::shared_ptr<ControlBlockOwner> control_block_;
};

}  // namespace kvelastic
