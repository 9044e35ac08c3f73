// What a pool has done since it was made, for stats(), and since it has a record, in that.
#pragma once

#include <array>
#include <memory>
#include <utility>

#include "record.h"

namespace kvelastic {

/// Whoever owns it holds the lock.
class Counters {
 public:
  void add(Counter counter, std::uint64_t amount = 1) {
    counts_[static_cast<std::size_t>(counter)] += amount;
    if (record_) record_->add(counter, amount);
  }
  std::uint64_t operator[](Counter counter) const {
    return counts_[static_cast<std::size_t>(counter)];
  }

  /// Where they are published from now on; null: nowhere.
  void publish_to(std::shared_ptr<RecordOwner> record) { record_ = std::move(record); }
  RecordOwner* record() const { return record_.get(); }

 private:
  std::array<std::uint64_t, static_cast<std::size_t>(Counter::kCount)> counts_{};
  std::shared_ptr<RecordOwner> record_;
};

}  // namespace kvelastic
