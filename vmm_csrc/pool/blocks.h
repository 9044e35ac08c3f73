// The states of blocks (free, used, cached) and of their pages. Pure accounting: maps nothing and
// takes no lock; the owner (Pool) does both.
//
//   page:   unmapped -> in transit -> mapped -> in transit -> unmapped
//   block:  free -> used -> free
//                   used <-> cached -> free
//
// A used or cached block may be *pinned* (pins.h): a change of its state then waits for its last
// pin, and until then its page counts it as used.
//
// A used or cached block may have a key (BlockKey). Such a block is *clean* if a tier has a copy
// of it, otherwise *dirty*. Clean blocks are evicted first, because that loses nothing. While a
// tier copies a dirty cached block, the block is *under writeback*:
//
//   dirty -- begin_writeback --> writeback -- end_writeback, copied --> clean
//                                 '-- allocated again or renamed: the copy is discarded
//
// Writeback does not change the state for alloc, touch and free. It only holds the page: a page
// with a block under writeback is neither parked nor evictable.
//
// A mapped page without used and cached blocks is *parked*: the next alloc uses it without a driver
// call. Page 0 holds block 0, the null block, which is neither used nor cached and never allocated,
// so a mapped page 0 is never parked.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/lazy_array.h"
#include "pages/geometry.h"
#include "pool/block_keys.h"
#include "pool/block_list.h"
#include "pool/buckets.h"
#include "pool/pins.h"

namespace kvelastic {

/// An evicted block.
struct EvictedBlock {
  BlockId id;
  bool has_copy;  ///< it was clean: a tier has a copy
  bool operator==(const EvictedBlock&) const = default;
};

/// Blocks under writeback with one ticket.
struct WritebackBatch {
  std::uint32_t ticket = 0;
  std::vector<BlockId> ids;
  std::vector<BlockKey> keys;
};

class Blocks {
 public:
  static constexpr BlockId kNullBlock = 0;

  static Result<std::unique_ptr<Blocks>> create(const Geometry& geometry);

  // --- pages ---------------------------------------------------------------------------------

  /// The lowest unmapped page, in transit until add_page or put_back. Empty: all pages are mapped.
  std::optional<PageIndex> take_unmapped();
  /// A page in transit has been mapped: it is parked, or, for page 0, holds the null block.
  void add_page(PageIndex page);
  /// A page in transit stays or became unmapped.
  void put_back(PageIndex page);
  /// Puts these pages in transit until add_page or put_back. Pre: they are unmapped.
  void take_unmapped(std::span<const PageIndex> pages);
  /// The first of `count` consecutive unmapped pages; the lowest such run, never with page 0. Empty
  /// if there is no such run. Scans every page.
  std::optional<PageIndex> find_unmapped_run(std::uint64_t count) const;
  /// As find_unmapped_run, for parked pages that are not closed.
  std::optional<PageIndex> find_parked_run(std::uint64_t count) const;
  /// A parked page to unmap, a closed one first; in transit until put_back or add_page.
  std::optional<PageIndex> take_parked();

  /// Page 0, if it holds only the null block; in transit until put_back or add_page. Pre: no block
  /// is allocated before page 0 is mapped again.
  std::optional<PageIndex> take_null_page();
  /// True if take_null_page() would return the page.
  bool null_page_is_bare() const;

  /// Closes the `count` mapped pages with the fewest used blocks and opens all others. No block of
  /// a closed page is allocated, so it is parked once its blocks are freed. Page 0 is never closed.
  /// Scans every page.
  void close_pages(std::uint64_t count);
  /// Closed pages that are still mapped.
  std::uint64_t closed_pages() const { return closed_count_; }
  /// Each mapped page except page 0, with its used blocks, pinned ones included.
  std::vector<std::pair<PageIndex, std::uint32_t>> used_by_page() const;
  /// True if the block lies on a closed page; false for an id without a mapped page.
  bool is_closed(BlockId id) const;

  // --- blocks --------------------------------------------------------------------------------

  /// How alloc chooses among partly filled pages.
  enum class Fit : std::uint8_t {
    kBest,     ///< the fullest page that fits all blocks, else the emptiest: touches few pages
    kFullest,  ///< the fullest page: emptier pages drain, as a shrinking pool needs
  };

  /// Appends `count` ids to `out` and marks them used. Pre: count <= free_blocks().
  void alloc(std::size_t count, Fit fit, std::vector<BlockId>& out);

  /// Appends every id of `count` pages from `first` on and marks them used. Pre: they are parked.
  void alloc_run(PageIndex first, std::uint64_t count, std::vector<BlockId>& out);

  /// used or cached -> free. All or nothing. Fails with kUnknownBlock, kNullBlock or kDoubleFree
  /// (also for a duplicate id); then the state is unchanged.
  Status free(std::span<const BlockId> ids);
  /// used -> cached; earlier `ids` are evicted earlier. All or nothing, fails as free.
  Status cache(std::span<const BlockId> ids);
  /// cached -> used. All or nothing, fails as free.
  Status touch(std::span<const BlockId> ids);

  /// Evicts the cached blocks of one page without used blocks, and parks it: a page with clean
  /// blocks only, else the one with the fewest dirty blocks. False: there is no such page.
  bool evict_cheapest_page(std::vector<EvictedBlock>& evicted);
  /// Evicts the oldest clean block, else the oldest without a key, else the oldest copyable one.
  /// False: no block is cached.
  bool evict_oldest_block(std::vector<EvictedBlock>& evicted);
  /// Sets the time, in ms modulo 2^32. Blocks are stamped with it when they become cached.
  void set_now(std::uint32_t now_ms) { now_ms_ = now_ms; }
  /// Evicts blocks that have been cached for `idle_ms`, copyable ones for `copyable_idle_ms`. A
  /// block that became clean after a younger one waits for that one.
  void evict_idle(std::uint32_t idle_ms, std::uint32_t copyable_idle_ms,
                  std::vector<EvictedBlock>& evicted);
  /// The age of the next block that evict_idle() would evict; empty without one.
  std::optional<std::uint32_t> oldest_not_copyable_ms() const {
    return std::max(age_ms(kClean), age_ms(kKeyless));
  }
  std::optional<std::uint32_t> oldest_copyable_ms() const { return age_ms(kCopyable); }
  /// The cached blocks of the page that evict_cheapest_page() would take; empty without a page.
  std::optional<std::uint32_t> cheapest_page_cost() const;

  // --- keys and copies -----------------------------------------------------------------------

  /// Gives used or cached blocks their keys; a block whose key changes becomes dirty. All or
  /// nothing. Fails with kUnknownBlock (also for a free block) or kNullBlock. Pre: as many keys as
  /// ids.
  Status name(std::span<const BlockId> ids, std::span<const BlockKey> keys);
  /// Marks the used or cached blocks with these keys clean and returns how many; skips others. Pre:
  /// as many keys as ids.
  std::uint64_t mark_clean(std::span<const BlockId> ids, std::span<const BlockKey> keys);
  /// Marks every clean block dirty and returns how many. Scans every block.
  std::uint64_t forget_copies();

  /// The order of writeback.
  enum class WriteFirst : std::uint8_t {
    kOldest,     ///< the oldest cached blocks
    kOfOnePage,  ///< the blocks of the page that is cheapest to empty, page by page, then the
                 ///< oldest
  };
  /// Starts writeback of at most `most` dirty cached blocks that have keys.
  WritebackBatch begin_writeback(std::uint64_t most, WriteFirst first);
  /// The number of blocks of a ticket; 0: it has ended.
  std::uint64_t blocks_of_ticket(std::uint32_t ticket) const {
    const auto found = writeback_.find(ticket);
    return found == writeback_.end() ? 0 : found->second.size();
  }
  /// One flag per block of the ticket: the block still has its contents, so a copy read before this
  /// call is valid. Empty: the ticket has ended.
  std::vector<std::uint8_t> still_unchanged(std::uint32_t ticket) const;
  /// Ends a ticket. Copied blocks (one flag each) become clean, unless they were allocated again or
  /// renamed since. Returns how many; 0 if the ticket has ended. Pre: as many flags as blocks.
  std::uint64_t end_writeback(std::uint32_t ticket, std::span<const std::uint8_t> copied);

  // --- pins (pins.h) -------------------------------------------------------------------------

  /// Pins used or cached blocks, and freed blocks that are still pinned. A duplicate id is pinned
  /// twice. All or nothing. Fails with kUnknownBlock (also for a free block) or kNullBlock.
  Result<PinTicket> pin(std::span<const BlockId> ids, PinKind kind);
  /// Ends a pin. False: it has already ended, and nothing changes.
  bool unpin(PinTicket ticket);
  /// Freed blocks that are still pinned; their pages count them as used.
  std::uint64_t waiting_blocks() const { return pins_.waiting(); }
  /// The waiting blocks that reuse() can take: not pinned strictly, on open pages.
  std::uint64_t reusable_blocks() const;
  /// Appends `count` such blocks to `out` and marks them used. Blocks that would have become cached
  /// are appended to `evicted`. Pre: count <= reusable_blocks().
  void reuse(std::uint64_t count, std::vector<BlockId>& out, std::vector<EvictedBlock>& evicted);
  /// Waiting blocks that would become cached will be free instead; appends their ids.
  void evict_waiting(std::vector<EvictedBlock>& evicted);
  /// Ids of the waiting blocks; without `strict`, not of those with a strict pin.
  std::vector<BlockId> waiting_ids(bool strict = true) const;
  /// Ends every pin; appends the ids of blocks that would have become cached.
  void drop_pins(std::vector<EvictedBlock>& evicted);

  // --- compaction ----------------------------------------------------------------------------

  /// True if a page with only cached blocks could be emptied into holes of other pages.
  bool can_compact() const { return compactable_page().has_value(); }
  /// Chooses the page with the fewest cached and no used blocks, and a hole in the fullest other
  /// pages for each of its blocks. The holes are used until finish_move(). False: no such page, or
  /// too few holes.
  bool take_compaction(std::vector<BlockMove>& moves);
  /// Finishes a move. If the block was copied, the new block is cached with the old one's age, and
  /// the old one is free. If it was not copied, or the old one was freed in between, the new one is
  /// free. Returns whether the block moved.
  bool finish_move(const BlockMove& move, bool copied);

  /// Frees every block, pinned ones when their pins end; appends the ids that were cached. Pages
  /// stay mapped.
  void clear(std::vector<EvictedBlock>& evicted);

  // --- statistics -------------------------------------------------------------------------------

  const Geometry& geometry() const { return geometry_; }
  std::uint64_t mapped_pages() const { return mapped_pages_; }
  std::uint64_t parked_pages() const { return parked_.size() + drained_.size(); }
  std::uint64_t used_blocks() const { return used_blocks_; }
  std::uint64_t cached_blocks() const { return cached_blocks_; }
  /// Pages with cached and no used blocks: evicting them releases memory.
  std::uint64_t evictable_pages() const { return evictable_pages_; }
  /// Evictable pages with clean blocks only and without writeback.
  std::uint64_t clean_pages() const { return clean_page_count_; }
  /// Cached blocks with a copy in a tier.
  std::uint64_t clean_blocks() const { return clean_blocks_; }
  /// Dirty cached blocks, including blocks without a key and under writeback.
  std::uint64_t dirty_blocks() const { return cached_blocks_ - clean_blocks_; }
  /// Dirty cached blocks with keys, which a tier can copy; includes blocks under writeback.
  std::uint64_t copyable_blocks() const { return lists_[kCopyable].size(); }
  std::uint64_t writeback_blocks() const { return writeback_blocks_; }
  /// Cached blocks whose eviction makes them allocatable: not those of closed pages.
  std::uint64_t evictable_blocks() const { return cached_blocks_ - closed_cached_; }
  /// Blocks that alloc can return without another page.
  std::uint64_t free_blocks() const { return free_blocks_; }
  /// Used and cached blocks of a page; empty if it is not mapped.
  std::optional<std::uint32_t> occupancy(PageIndex page) const;

  /// Recounts everything from the bitmaps. Fails with kIntegrity, naming the inconsistency.
  Status check_integrity() const;

 private:
  enum class PageState : std::uint8_t { kUnmapped = 0, kInTransit = 1, kMapped = 2 };
  struct Page {
    PageState state;
    std::uint32_t used;  // page 0: including the null block
    std::uint32_t cached;
    std::uint32_t clean;      // of the cached ones
    std::uint32_t reading;    // blocks under writeback
    std::uint32_t parked_at;  // its index in parked_ or drained_ while it is parked
    bool closed;
  };
  /// The lists of cached blocks, in eviction order.
  enum Cached : std::uint8_t {
    kClean,     ///< a tier has a copy
    kKeyless,   ///< dirty and without a key: no tier can copy it
    kCopyable,  ///< dirty, with a key
  };
  struct BlockPosition {
    PageIndex page;
    std::uint32_t slot;  // 0 <= slot < blocks_per_page
  };
  /// The contents of a block, since it was allocated.
  struct Identity {
    BlockKey key;
    std::uint32_t ticket;  // of its writeback; 0: none
    bool clean;
  };
  explicit Blocks(const Geometry& geometry);

  Result<BlockPosition> find(BlockId id) const;
  std::uint64_t& taken_word(BlockPosition at) { return taken_[word_of(at)]; }
  std::uint64_t& cached_word(BlockPosition at) { return cached_[word_of(at)]; }
  bool is_taken(BlockPosition at) const { return (taken_[word_of(at)] >> (at.slot % 64) & 1) != 0; }
  bool is_cached(BlockPosition at) const {
    return (cached_[word_of(at)] >> (at.slot % 64) & 1) != 0;
  }
  std::size_t word_of(BlockPosition at) const { return at.page * words_per_page_ + at.slot / 64; }
  std::uint32_t dense(BlockPosition at) const {
    return static_cast<std::uint32_t>(at.page * blocks_per_page_ + at.slot);
  }
  BlockPosition position_of(std::uint32_t dense) const {
    return {static_cast<PageIndex>(dense / blocks_per_page_),
            static_cast<std::uint32_t>(dense % blocks_per_page_)};
  }
  BlockId id_of(BlockPosition at) const { return geometry_.first_id(at.page) + at.slot; }
  bool is_pinned(BlockPosition at) const { return pins_.is_pinned(dense(at)); }
  bool is_waiting(BlockPosition at, Pins::Then then) const {
    return is_pinned(at) && pins_.then(dense(at)) == then;
  }

  /// Runs `step` on every id and leaves the locations in `positions_`. If an id is unknown, or
  /// `step` returns false (the block is not `wanted`), runs `undo` on the completed ones in
  /// reverse.
  template <typename Step, typename Undo>
  Status for_all(std::span<const BlockId> ids, const char* wanted, Step step, Undo undo);
  Error wrong_state(BlockId id, const char* wanted) const;

  /// Removes a page from its lists, or inserts it by its counts. Counts change only between the
  /// two.
  void unlist(PageIndex index);
  void enlist(PageIndex index);
  std::uint32_t free_in(const Page& page) const {
    return static_cast<std::uint32_t>(blocks_per_page_) - page.used - page.cached;
  }
  void alloc_in_page(PageIndex index, std::size_t count, std::vector<BlockId>& out);
  template <typename Fits>
  std::optional<PageIndex> find_run(std::uint64_t count, Fits fits) const;
  std::optional<PageIndex> compactable_page() const;
  /// Counts and lists a cached block, or removes it. Pre: the page is unlisted.
  void add_cached(BlockPosition at);
  void remove_cached(BlockPosition at);
  void forget(BlockPosition at) {
    if (has_identities_) identities_[dense(at)] = {};
  }
  bool is_clean(BlockPosition at) const { return has_identities_ && identities_[dense(at)].clean; }
  void set_clean(BlockPosition at, bool clean);
  /// The list of a cached block.
  Cached cached_as(BlockPosition at) const;
  BlockList& list_of(BlockPosition at) { return lists_[cached_as(at)]; }
  std::optional<PageIndex> cheapest_page() const;
  std::optional<std::uint32_t> age_ms(Cached as) const {
    const std::uint32_t oldest = lists_[as].oldest();
    if (oldest == 0) return std::nullopt;
    return now_ms_ - cached_at_ms_[oldest - 1];  // modulo 2^32
  }
  void evict_oldest_of(const BlockList& list, std::vector<EvictedBlock>& evicted);
  bool can_write_back(BlockPosition at) const;
  void write_back(BlockPosition at, WritebackBatch& batch);
  void write_back_by_pages(std::uint64_t most, WritebackBatch& batch);
  Status check_copies() const;
  void make_free(BlockPosition at);
  void make_cached(BlockPosition at);
  void make_used(BlockPosition at);

  const Geometry geometry_;
  const std::uint64_t blocks_per_page_;
  const std::uint64_t words_per_page_;
  const std::uint64_t ids_per_page_;  // if an extent is whole blocks; otherwise 0
  LazyArray<Page> pages_;
  LazyArray<std::uint64_t> taken_;   // one bit per block: used or cached
  LazyArray<std::uint64_t> cached_;  // one bit per block
  BlockLinks links_;                 // by dense index
  std::array<BlockList, 3> lists_{BlockList{links_}, BlockList{links_}, BlockList{links_}};
  LazyArray<std::uint32_t> cached_at_ms_;  // by dense index, of cached blocks
  std::uint32_t now_ms_ = 0;
  LazyArray<Identity> identities_;  // by dense index
  bool has_identities_ = false;     // false: no block has had a key, and identities_ is untouched
  Pins pins_{links_};               // a pinned block is used, so it is in no other list
  Buckets partial_;  // mapped pages with free blocks that are not parked, by free blocks
  // Pages with cached and no used blocks, and without writeback:
  Buckets evictable_;    // with dirty blocks, by their number
  Buckets clean_pages_;  // only clean blocks, by their number
  std::uint64_t evictable_pages_ = 0;
  std::uint64_t clean_page_count_ = 0;
  std::unordered_map<std::uint32_t, std::vector<std::uint32_t>>
      writeback_;  // ticket: dense indices
  std::uint32_t newest_ticket_ = 0;
  std::vector<PageIndex> parked_;
  std::vector<PageIndex> drained_;  // parked and closed: to unmap, not to use
  std::vector<PageIndex> closed_;   // pages that were closed; some may be unmapped by now
  std::set<PageIndex> returned_;    // unmapped, and below fresh_
  PageIndex fresh_ = 0;             // pages from here on were never taken
  std::uint64_t mapped_pages_ = 0;
  std::uint64_t used_blocks_ = 0;
  std::uint64_t cached_blocks_ = 0;
  std::uint64_t clean_blocks_ = 0;
  std::uint64_t writeback_blocks_ = 0;  // named by tickets that have not ended
  // Kept by enlist() and unlist():
  std::uint64_t free_blocks_ = 0;    // of open pages
  std::uint64_t closed_cached_ = 0;  // of closed pages
  std::uint64_t closed_count_ = 0;
  std::vector<BlockPosition> positions_;  // scratch memory, kept to save the allocation
};

}  // namespace kvelastic
