// One rank's part of each object in a staging: copies blocks to and from it.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "pages/range.h"
#include "pages/staging.h"

namespace kvelastic {

/// A block, and the staging slot for its contents.
struct BlockSlot {
  BlockId id;
  std::uint64_t slot;
};

/// Keeps the last used staging pinned for the range's device. Thread-safe; takes the range's locks
/// under its own only while pinning.
class StagingWindow {
 public:
  StagingWindow(std::shared_ptr<Range> range, std::uint64_t rank)
      : range_(std::move(range)), rank_(rank) {}
  ~StagingWindow() {
    if (range_->made_by().is_this()) look_at(nullptr);
  }
  StagingWindow(const StagingWindow&) = delete;
  StagingWindow& operator=(const StagingWindow&) = delete;

  /// Copies blocks as Range::copy_records does. Also fails with kInvalidArgument if a slot does not
  /// exist or an object has no room for this rank.
  Status copy(std::span<const BlockSlot> blocks, const std::shared_ptr<Staging>& staging,
              CopyTo to) {
    look_at(staging);
    const std::uint64_t part_bytes = range_->geometry().record_bytes();
    if (staging->record_bytes() < (rank_ + 1) * part_bytes) {
      return Error{Errc::kInvalidArgument,
                   "a record of " + std::to_string(staging->record_bytes()) +
                       " bytes has no room for rank " + std::to_string(rank_) + ", whose part is " +
                       std::to_string(part_bytes) + " bytes"};
    }
    std::vector<BlockRecord> records;
    records.reserve(blocks.size());
    for (const BlockSlot& block : blocks) {
      if (block.slot >= staging->slots()) {
        return Error{Errc::kInvalidArgument, "slot " + std::to_string(block.slot) +
                                                 " is not one of the staging's " +
                                                 std::to_string(staging->slots())};
      }
      records.push_back({block.id, staging->record(block.slot).data() + rank_ * part_bytes});
    }
    return range_->copy_records(records, to);
  }

 private:
  /// Switches to `staging`. A failure to pin is ignored: copies from unpinned memory are only
  /// slower.
  void look_at(std::shared_ptr<Staging> staging) {
    const std::lock_guard lock(mutex_);
    if (staging == staging_) return;
    if (staging_ && pinned_) range_->unpin_host(staging_->memory());
    staging_ = std::move(staging);
    pinned_ = staging_ && range_->pin_host(staging_->memory());
  }

  const std::shared_ptr<Range> range_;
  const std::uint64_t rank_;
  std::mutex mutex_;
  std::shared_ptr<Staging> staging_;
  bool pinned_ = false;
};

}  // namespace kvelastic
