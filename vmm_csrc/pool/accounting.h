// A pool's accounts: the blocks it has allocated and reserved, evictions that the engine has not
// seen yet, pages, and their limit. Pure accounting: calls no backing, ledger or maintenance
// thread. The owner holds the pool's lock.
//
//   used in Blocks = in use by the engine + freed but still pinned + reserved
//   held pages     = mapped + being mapped + being unmapped
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/status.h"
#include "pool/blocks.h"
#include "pool/counters.h"
#include "pool/page_limit.h"

namespace kvelastic {

/// A change of a cached block: moved to `to`, evicted (kEvicted), or evicted with a copy in a tier
/// (kDemoted).
struct BlockChange {
  static constexpr BlockId kEvicted = -1;
  static constexpr BlockId kDemoted = -2;
  BlockId id, to;
};

class Accounting {
 public:
  /// The pages that count_available() includes: mapped ones only, or every page within the limit.
  enum class Reach : std::uint8_t { kMapped, kLimit };

  /// `page_bytes` is the size of a page with all its copies. `max_blocks` is the maximum of blocks
  /// in use, including the null block.
  Accounting(std::unique_ptr<Blocks> blocks, const PageLimit& page_limit, std::uint64_t page_bytes,
             std::uint64_t max_blocks, Counters& counters)
      : limit(page_limit),
        page_bytes_(page_bytes),
        max_blocks_(max_blocks),
        counters_(counters),
        blocks_(std::move(blocks)) {}

  Blocks& blocks() { return *blocks_; }
  const Blocks& blocks() const { return *blocks_; }
  const Geometry& geometry() const { return blocks_->geometry(); }

  // --- pages ---------------------------------------------------------------------------------

  std::uint64_t page_bytes() const { return page_bytes_; }
  std::uint64_t held_pages() const { return held_pages_; }
  void hold(std::uint64_t pages) { held_pages_ += pages; }
  void let_go(std::uint64_t pages) { held_pages_ -= pages; }
  /// Pages are being unmapped; later end_unmap() or cancel_unmap() reports the result.
  void begin_unmap(std::uint64_t pages) { unmapping_pages_ += pages; }
  void end_unmap(std::uint64_t pages) {
    unmapping_pages_ -= pages;
    held_pages_ -= pages;
  }
  void cancel_unmap(std::uint64_t pages) { unmapping_pages_ -= pages; }
  /// Held pages that are not being unmapped.
  std::uint64_t staying_pages() const { return held_pages_ - unmapping_pages_; }
  /// True while pages are being unmapped.
  bool is_unmapping() const { return unmapping_pages_ > 0; }
  std::uint64_t moving_pages() const { return held_pages_ - blocks_->mapped_pages(); }
  /// True while the page of the null block is on its way. No other page is mapped meanwhile: its
  /// blocks would be in use without the null block if that map failed.
  bool is_null_block_moving() const { return moving_pages() > 0 && !blocks_->occupancy(0); }
  /// Pages that can be mapped now within the limit.
  std::uint64_t mappable_pages() const {
    if (held_pages_ >= limit.pages() || is_null_block_moving()) return 0;
    return limit.pages() - held_pages_;
  }
  std::uint64_t over_pages() const {
    return held_pages_ > limit.pages() ? held_pages_ - limit.pages() : 0;
  }
  /// Pages over the limit that are not being unmapped yet.
  std::uint64_t excess_pages() const {
    return staying_pages() > limit.pages() ? staying_pages() - limit.pages() : 0;
  }
  std::uint64_t pages_for(std::uint64_t blocks) const {
    return (blocks + geometry().blocks_per_page - 1) / geometry().blocks_per_page;
  }
  /// Closes the pages over the limit and opens the others. Call it after each change of the limit.
  void close_pages_over_limit() { blocks_->close_pages(excess_pages()); }
  /// True if reclaim would find pages to release.
  bool can_give() const;

  // --- blocks --------------------------------------------------------------------------------

  /// Blocks that can be allocated at once, without an eviction.
  std::uint64_t at_hand() const { return reserved_.size() + blocks_->free_blocks(); }
  /// Blocks in use by the engine, or freed but still pinned.
  std::uint64_t in_use() const { return blocks_->used_blocks() - reserved_.size(); }
  /// Blocks that can be allocated within the limit, including evictions.
  std::uint64_t count_available(Reach reach) const {
    const std::uint64_t usable = usable_blocks();
    if (failure_ || in_use() >= usable) return 0;
    const std::uint64_t there = at_hand() + blocks_->evictable_blocks();
    // Pages being mapped or unmapped count as available: an alloc that needs them waits for them.
    const std::uint64_t mapped = blocks_->mapped_pages();
    const std::uint64_t pages =
        reach == Reach::kLimit && mapped < limit.pages() ? limit.pages() - mapped : 0;
    // The first mapped page is page 0, whose null block is never allocated.
    const std::uint64_t null_block = pages > 0 && !blocks_->occupancy(0) ? 1 : 0;
    return std::min(usable - in_use(), there + pages * geometry().blocks_per_page - null_block);
  }
  std::uint64_t max_blocks() const { return max_blocks_; }
  /// Appends `count` ids, reserved ones first. Pre: count <= at_hand().
  void take(std::uint64_t count, std::vector<BlockId>& out);

  // --- pinned blocks ---------------------------------------------------------------------------

  /// Blocks::pin; fails with kDoubleFree for a reserved block.
  Result<PinTicket> pin(std::span<const BlockId> ids, PinKind kind);
  /// Blocks that reuse() may take: freed, still pinned, but not strictly. Over the limit only those
  /// on pages that stay, as many as fit.
  std::uint64_t reusable_blocks() const {
    const std::uint64_t waiting = blocks_->waiting_blocks();
    return waiting == 0 ? 0 : count_reusable();
  }
  /// Appends `count` of them. If they were to be cached, that is recorded as an eviction.
  void reuse(std::uint64_t count, std::vector<BlockId>& out);

  // --- blocks set aside for allocs to come -----------------------------------------------------

  std::uint64_t reserved_blocks() const { return reserved_.size(); }
  /// Reserves `ids`, which have just been allocated.
  void reserve(std::vector<BlockId> ids);
  /// Frees the reserved blocks, which hold nothing, before any cached block is evicted. False:
  /// there were no reserved blocks.
  bool drop_reserved();
  /// Fails with kDoubleFree if one of `ids` is reserved, so that it was never allocated. Only this
  /// list shows that.
  Status refuse_reserved(std::span<const BlockId> ids) const;

  // --- evictions and moves, to be reported to the engine ----------------------------------------

  /// Evicts the oldest cached blocks. Pre: at least `count` are cached.
  void evict_oldest(std::uint64_t count);
  /// Evicts the page with the fewest cached blocks and parks it. False: there is no such page.
  bool evict_cheapest_page();
  /// Evicts every cached block, including pinned ones that would become cached.
  void evict_all();
  /// Evicts until `bound` cached blocks are left: whole pages while they fit, because only whole
  /// pages release memory, then the oldest blocks.
  void evict_down_to(std::uint64_t bound);
  /// Evicts until `bound` cached blocks, or only copyable ones, are left.
  void evict_not_copyable_down_to(std::uint64_t bound);
  void evict_idle(std::uint32_t idle_ms, std::uint32_t copyable_idle_ms);
  /// Finishes moves, copied or not, as Blocks::finish_move. Returns how many blocks moved.
  std::uint64_t finish_moves(std::span<const BlockMove> moves, bool copied);
  /// Frees all blocks and reservations and evicts cached blocks. Pinned blocks become free when
  /// their pins end.
  void discard_all();
  /// Ends every pin.
  void drop_pins();
  /// Returns every move and eviction since the last call, in order.
  std::vector<BlockChange> take_changes();
  /// True if take_changes() would return changes. Lock-free.
  bool has_changes() const { return has_changes_.load(std::memory_order_acquire); }

  /// From now on evictions count as demoted or dropped.
  void use_tiers() { has_tiers_ = true; }

  // --- final failure ----------------------------------------------------------------------------

  /// From now on alloc fails with `error`: the mappings are unknown, or the pool is closed.
  void fail(Error error);
  const std::optional<Error>& failure() const { return failure_; }
  /// Lock-free.
  bool has_failed() const { return has_failed_.load(std::memory_order_relaxed); }

  /// Fails with kIntegrity, naming the inconsistency.
  Status check_integrity() const;

  PageLimit limit;

 private:
  /// Ids that may be in use at once: max_blocks, or fewer if the limit has fewer pages.
  std::uint64_t usable_blocks() const {
    if (limit.is_asleep()) return 0;
    return std::min(max_blocks_, limit.pages() * geometry().blocks_per_page) - 1;
  }
  std::uint64_t count_reusable() const;
  /// How an eviction without a copy counts: lost, or discarded by its owner.
  enum class Loss : std::uint8_t { kDropped, kDiscarded };
  void note_evicted(std::size_t before, Loss loss = Loss::kDropped);
  void note_evictions_as_changes();

  const std::uint64_t page_bytes_;
  const std::uint64_t max_blocks_;
  Counters& counters_;
  std::unique_ptr<Blocks> blocks_;
  std::uint64_t held_pages_ = 0;
  std::uint64_t unmapping_pages_ = 0;
  std::vector<BlockId> reserved_;      // sorted
  std::vector<EvictedBlock> evicted_;  // since the last entry of changes_
  bool has_tiers_ = false;
  std::vector<BlockChange> changes_;
  std::optional<Error> failure_;
  std::atomic<bool> has_changes_{false}, has_failed_{false};
};

}  // namespace kvelastic
