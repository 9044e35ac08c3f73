// A pool's counters since its creation, for stats() and for its segment.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "segment/record.h"

namespace kvelastic {

/// The owner holds the lock.
class Counters {
 public:
  void add(Counter counter, std::uint64_t amount = 1) {
    counts_[static_cast<std::size_t>(counter)] += amount;
    if (record_) record_->add(counter, amount);
  }
  std::uint64_t operator[](Counter counter) const {
    return counts_[static_cast<std::size_t>(counter)];
  }

  /// Publishes the counters, including earlier counts, to `record`; null stops publishing.
  void publish_to(std::shared_ptr<RecordOwner> record) {
    if (record == record_) return;
    record_ = std::move(record);
    if (!record_) return;
    for (std::size_t i = 0; i < counts_.size(); ++i) {
      record_->add(static_cast<Counter>(i), counts_[i]);
    }
  }
  RecordOwner* record() const { return record_.get(); }

 private:
  std::array<std::uint64_t, static_cast<std::size_t>(Counter::kCount)> counts_{};
  std::shared_ptr<RecordOwner> record_;
};

}  // namespace kvelastic
