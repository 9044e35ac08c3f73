// The tiers' calls on a pool: keys, copies of cached blocks before they are evicted (writeback),
// and the contents of blocks.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "pool/pool_state.h"
#include "pool/reclaim.h"

namespace kvelastic {

class Writeback {
 public:
  Writeback(PoolState& pool, Reclaimer& reclaimer) : pool_(pool), reclaimer_(reclaimer) {}

  /// From now on evictions count as demoted or dropped, and a shrinking pool waits for copies while
  /// a thread serves next_demotion().
  void use_tiers(const DemotionWaits& waits);

  /// Sets the keys of used or cached blocks. Fails as Blocks::name. (Allocator::cache sets those of
  /// blocks that become cached.)
  Status name(std::span<const BlockId> ids, std::span<const BlockKey> keys);
  /// As Blocks::mark_clean and forget_copies.
  std::uint64_t mark_clean(std::span<const BlockId> ids, std::span<const BlockKey> keys);
  std::uint64_t forget_copies();
  /// The age of the oldest cached block that a tier can copy; 0 without one.
  std::chrono::milliseconds oldest_copyable();

  /// Blocks to copy before they are evicted.
  struct Demotion {
    DemotionReason reason;
    std::uint64_t blocks;  ///< dirty cached ones
    std::chrono::nanoseconds left;
  };
  /// Blocks until the pool shrinks and has blocks to copy, at most for `timeout`, or until
  /// stop_demotions().
  std::optional<Demotion> next_demotion(std::chrono::nanoseconds timeout);
  /// Has every cached block with a key copied, before the caller discards the cache. Blocks until
  /// that is done, at most for `timeout`, or until no further block can be copied. Returns how many
  /// dirty blocks are left. Clean blocks stay cached; no memory is released.
  std::uint64_t clean(std::chrono::nanoseconds timeout);
  /// next_demotion() is no longer served: no call waits for copies.
  void stop_demotions();
  /// Starts writeback: while the pool shrinks, of the blocks that would be evicted first, otherwise
  /// of the oldest. Until end() their pages stay and their contents can be read; end() returns
  /// whether a block was unchanged.
  WritebackBatch begin(std::uint64_t most);
  /// Blocks::still_unchanged. Call it after the copy and before storing it under its key: the block
  /// may have been allocated again while it was read.
  std::vector<std::uint8_t> still_unchanged(std::uint32_t ticket) const;
  /// Blocks::end_writeback; fails with kInvalidArgument for a wrong number of flags.
  Result<std::uint64_t> end(std::uint32_t ticket, std::span<const std::uint8_t> copied);

  /// Copies every rank's part of whole blocks into slots of `staging` (CopyTo::kHost) or back
  /// (kDevice). Waits for the work submitted to the devices; blocks. The caller keeps the blocks
  /// used, pinned or under writeback. Fails as Backing::copy_records, and with kInvalidArgument if
  /// the object size differs from a block with every rank's part.
  Status copy_records(std::span<const BlockSlot> blocks, const std::shared_ptr<Staging>& staging,
                      CopyTo to);
  /// Bytes of one block in all buffers and all ranks.
  std::uint64_t record_bytes() const {
    return pool_.backing->ranks() * pool_.geometry.record_bytes();
  }

 private:
  using Change = PoolState::Change;

  PoolState& pool_;
  Reclaimer& reclaimer_;
};

}  // namespace kvelastic
