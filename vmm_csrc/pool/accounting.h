// What a pool has handed out, what it holds and what it may hold: blocks, those set aside, those
// evicted that the engine has not been told of, pages, and their limit. Pure accounting: it calls
// no backing, no ledger and no keeper, and its owner holds the pool's lock.
//
//   used in Blocks = in use by the engine + given back and still pinned + reserved
//   held pages     = mapped + on their way in + leaving (on their way out)
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

/// What has become of a cached block: it is at `to` now, evicted and gone (kEvicted), or evicted
/// with a copy in a tier (kDemoted).
struct BlockChange {
  static constexpr BlockId kEvicted = -1;
  static constexpr BlockId kDemoted = -2;
  BlockId id, to;
};

class Accounting {
 public:
  /// What count_available() counts on: mapped pages only, or every page within the limit.
  enum class Reach : std::uint8_t { kMapped, kLimit };

  /// `page_bytes` is what a page costs the device, all its copies together; `max_blocks` the ids
  /// that may be in use at once, the null block counted in.
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
  /// Pages are to be unmapped from now on; then they are gone, or have to stay.
  void leave(std::uint64_t pages) { leaving_pages_ += pages; }
  void left(std::uint64_t pages) {
    leaving_pages_ -= pages;
    held_pages_ -= pages;
  }
  void stay(std::uint64_t pages) { leaving_pages_ -= pages; }
  /// Held pages that nobody has begun to unmap.
  std::uint64_t staying_pages() const { return held_pages_ - leaving_pages_; }
  /// Whether somebody unmaps pages just now.
  bool is_leaving() const { return leaving_pages_ > 0; }
  std::uint64_t moving_pages() const { return held_pages_ - blocks_->mapped_pages(); }
  /// What the limit has room for.
  std::uint64_t mappable_pages() const {
    return held_pages_ < limit.pages() ? limit.pages() - held_pages_ : 0;
  }
  std::uint64_t over_pages() const {
    return held_pages_ > limit.pages() ? held_pages_ - limit.pages() : 0;
  }
  /// Those of them that still have to be found and unmapped.
  std::uint64_t excess_pages() const {
    return staying_pages() > limit.pages() ? staying_pages() - limit.pages() : 0;
  }
  std::uint64_t pages_for(std::uint64_t blocks) const {
    return (blocks + geometry().blocks_per_page - 1) / geometry().blocks_per_page;
  }
  /// Closes the pages that are over the limit, and opens the others; after each change of it.
  void close_pages_over_limit() { blocks_->close_pages(excess_pages()); }
  /// Whether going down the ladder would find something to give.
  bool can_give() const;

  // --- blocks --------------------------------------------------------------------------------

  /// Blocks that can be taken at once, without evicting any.
  std::uint64_t at_hand() const { return reserved_.size() + blocks_->free_blocks(); }
  /// By the engine, or by who has pinned what it has given back.
  std::uint64_t in_use() const { return blocks_->used_blocks() - reserved_.size(); }
  /// Blocks that may be had, by evicting cached ones, too, as far as the limit goes.
  std::uint64_t count_available(Reach reach) const {
    const std::uint64_t usable = usable_blocks();
    if (failure_ || in_use() >= usable) return 0;
    const std::uint64_t there = at_hand() + blocks_->evictable_blocks();
    // Pages on their way in or out count as ones to come: an alloc that needs them waits for them.
    const std::uint64_t mapped = blocks_->mapped_pages();
    const std::uint64_t pages =
        reach == Reach::kLimit && mapped < limit.pages() ? limit.pages() - mapped : 0;
    // The first page ever mapped is page 0, whose null block is nobody's.
    const std::uint64_t null_block = pages > 0 && !blocks_->occupancy(0) ? 1 : 0;
    return std::min(usable - in_use(), there + pages * geometry().blocks_per_page - null_block);
  }
  std::uint64_t max_blocks() const { return max_blocks_; }
  /// Appends `count` ids; reserved ones first. Pre: count <= at_hand().
  void take(std::uint64_t count, std::vector<BlockId>& out);

  // --- pinned blocks ---------------------------------------------------------------------------

  /// As Blocks::pin; a reserved block is refused with kDoubleFree.
  Result<PinTicket> pin(std::span<const BlockId> ids, PinKind kind);
  /// Given back, still pinned, and not strictly: reuse() may take so many. Over the limit only
  /// those on pages that stay, as many as it has room for.
  std::uint64_t reusable_blocks() const {
    const std::uint64_t waiting = blocks_->waiting_blocks();
    return waiting == 0 ? 0 : count_reusable();
  }
  /// Appends `count` of them; what they held and was to be cached is evicted.
  void reuse(std::uint64_t count, std::vector<BlockId>& out);

  // --- blocks set aside for allocs to come -----------------------------------------------------

  std::uint64_t reserved_blocks() const { return reserved_.size(); }
  /// `ids` have just been taken.
  void reserve(std::vector<BlockId> ids);
  /// They have no contents, and make way before anything cached does. False: there are none.
  bool drop_reserved();
  /// Fails with kDoubleFree where one of `ids` is reserved: it was never handed out, which only
  /// this list can tell.
  Status refuse_reserved(std::span<const BlockId> ids) const;

  // --- evictions and moves, which the engine has to be told of ---------------------------------

  /// Frees the blocks that were cached first. Pre: as many are cached.
  void evict_oldest(std::uint64_t count);
  /// Parks the page whose cached blocks are the fewest. False: there is none to park.
  bool evict_cheapest_page();
  /// Everything cached, and what is pinned and waits to be.
  void evict_all();
  /// Until `bound` cached blocks are left: whole pages where that costs no more blocks than the
  /// bound asks for, since only a whole page is memory given back; the oldest blocks for the rest.
  void evict_down_to(std::uint64_t bound);
  /// Until `bound` cached blocks or only copyable ones are left.
  void evict_not_copyable_down_to(std::uint64_t bound);
  /// As Blocks::evict_idle.
  void evict_idle(std::uint32_t idle_ms, std::uint32_t copyable_idle_ms);
  /// The blocks have been copied, or have not been: as Blocks::finish_move. Answers how many moved.
  std::uint64_t finish_moves(std::span<const BlockMove> moves, bool copied);
  /// Frees every block and every reservation; what was cached is evicted. Pinned blocks are free
  /// when their pins end.
  void discard_all();
  /// Ends every pin.
  void drop_pins();
  /// Every move and eviction since the last call, in order.
  std::vector<BlockChange> take_changes();
  /// Whether take_changes() would answer any. Lock-free.
  bool has_changes() const { return has_changes_.load(std::memory_order_acquire); }

  /// From now on what is evicted counts as demoted or as dropped.
  void use_tiers() { has_tiers_ = true; }

  // --- for good --------------------------------------------------------------------------------

  /// What alloc fails with from now on: nobody knows what is mapped, or the pool is closed.
  void fail(Error error);
  const std::optional<Error>& failure() const { return failure_; }
  /// Lock-free.
  bool has_failed() const { return has_failed_.load(std::memory_order_relaxed); }

  /// Fails with kIntegrity, naming what disagrees.
  Status check_integrity() const;

  PageLimit limit;

 private:
  /// Ids that may be handed out at once: as asked for at start, or what the limit has room for.
  std::uint64_t usable_blocks() const {
    if (limit.is_asleep()) return 0;
    return std::min(max_blocks_, limit.pages() * geometry().blocks_per_page) - 1;
  }
  std::uint64_t count_reusable() const;
  /// Whether what was evicted without a copy was lost, or given up by who had it cached.
  enum class Loss : std::uint8_t { kDropped, kDiscarded };
  void note_evicted(std::size_t before, Loss loss = Loss::kDropped);
  void note_evictions_as_changes();

  const std::uint64_t page_bytes_;
  const std::uint64_t max_blocks_;
  Counters& counters_;
  std::unique_ptr<Blocks> blocks_;
  std::uint64_t held_pages_ = 0;
  std::uint64_t leaving_pages_ = 0;
  std::vector<BlockId> reserved_;      // sorted
  std::vector<EvictedBlock> evicted_;  // since the last of changes_
  bool has_tiers_ = false;
  std::vector<BlockChange> changes_;
  std::optional<Error> failure_;
  std::atomic<bool> has_changes_{false}, has_failed_{false};
};

}  // namespace kvelastic
