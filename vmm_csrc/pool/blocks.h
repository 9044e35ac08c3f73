// Which block ids are free, used or cached, and what that makes of their pages. Pure accounting: it
// maps nothing and locks nothing; its owner (Pool) does both.
//
//   page:   unmapped -> in transit -> mapped -> in transit -> unmapped
//   block:  free -> used -> free
//                   used <-> cached -> free
//
// A used or cached block may be *pinned* (pins.h): what happens to it then waits for its last pin,
// and to its page it is a used block all that time.
//
// A block that is used or cached may have a key (block_key.h). With one it is *clean* while a tier
// has a copy of it, and *dirty* else; clean ones are evicted first, for nothing is lost with them.
// A dirty one that is cached is *leaving* as long as its copy is being made:
//
//   dirty -- begin_leaving --> leaving -- end_leaving, copied --> clean
//                                 '-- used by another alloc, or renamed: the copy is of no use
//
// A leaving block stays what it was to alloc, touch and free. Only its page is kept: while blocks
// of it are being read it is neither parked nor evictable.
//
// A mapped page without a used or cached block is *parked*: the next alloc takes it with no driver
// call. Page 0 holds block 0, the null block, which counts as neither used nor cached and is never
// handed out, so page 0 is never parked once it is mapped.
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
#include "pool/block_key.h"
#include "pool/block_list.h"
#include "pool/buckets.h"
#include "pool/pins.h"

namespace kvelastic {

/// A block whose contents are gone from here.
struct EvictedBlock {
  BlockId id;
  bool has_copy;  ///< it was clean: a tier has it
  bool operator==(const EvictedBlock&) const = default;
};

/// Blocks that are leaving together.
struct Leaving {
  std::uint32_t ticket = 0;
  std::vector<BlockId> ids;
  std::vector<BlockKey> keys;
};

class Blocks {
 public:
  static constexpr BlockId kNullBlock = 0;

  static Result<std::unique_ptr<Blocks>> create(const Geometry& geometry);

  // --- pages ---------------------------------------------------------------------------------

  /// A page to map next, the lowest first; in transit until add_page or put_back. None: no more.
  std::optional<PageIndex> take_unmapped();
  /// The page in transit has been mapped: it is parked (page 0: it holds the null block).
  void add_page(PageIndex page);
  /// The page in transit is not mapped (any more).
  void put_back(PageIndex page);
  /// These pages, to map next; in transit until add_page or put_back. Pre: they are unmapped.
  void take_unmapped(std::span<const PageIndex> pages);
  /// The first of `count` pages side by side that are unmapped, the lowest such; never page 0.
  /// None: there is no such run. Looks at every page.
  std::optional<PageIndex> find_unmapped_run(std::uint64_t count) const;
  /// The same for parked pages that are not closed.
  std::optional<PageIndex> find_parked_run(std::uint64_t count) const;
  /// A parked page to unmap, a closed one first; in transit until put_back or add_page.
  std::optional<PageIndex> take_parked();

  /// Page 0, to unmap, where the null block is all that it holds; in transit until put_back or
  /// add_page. Pre: nothing is used until it is mapped again, for the null block is gone.
  std::optional<PageIndex> take_null_page();
  /// Whether take_null_page() would give it.
  bool null_page_is_bare() const;

  /// Closes `count` mapped pages, those with the fewest used blocks, and opens all others: no block
  /// of a closed page is handed out any more, so it is parked once its blocks are given back. Page
  /// 0 is never closed. Looks at every page.
  void close_pages(std::uint64_t count);
  /// How many of them have not been unmapped yet.
  std::uint64_t closed_pages() const { return closed_count_; }
  /// Of each mapped page but the null block's, its blocks in use, pinned ones included.
  std::vector<std::pair<PageIndex, std::uint32_t>> used_by_page() const;
  /// Whether the block lies on one of them; false for an id that is not of a mapped page.
  bool is_closed(BlockId id) const;

  // --- blocks --------------------------------------------------------------------------------

  /// How alloc chooses among partly filled pages.
  enum class Fit : std::uint8_t {
    kBest,     ///< the fullest page that can hold all, else the emptiest: few pages touched
    kFullest,  ///< the fullest: emptier pages drain, which is what a shrinking pool wants
  };

  /// Appends `count` ids to `out`; they are used now. Pre: count <= free_blocks().
  void alloc(std::size_t count, Fit fit, std::vector<BlockId>& out);

  /// Appends every id of `count` pages from `first` on; they are used now. Pre: they are parked.
  void alloc_run(PageIndex first, std::uint64_t count, std::vector<BlockId>& out);

  /// used or cached -> free. All or nothing; fails with kUnknownBlock, kNullBlock or kDoubleFree
  /// (also for an id named twice), and nothing has changed then.
  Status free(std::span<const BlockId> ids);
  /// used -> cached; the later in `ids`, the later evicted. All or nothing, failures as free.
  Status cache(std::span<const BlockId> ids);
  /// cached -> used. All or nothing, failures as free.
  Status touch(std::span<const BlockId> ids);

  /// Frees every cached block of the page that costs the fewest of them, among pages that hold no
  /// used block: of those that are clean all over, or else the one with the fewest dirty blocks.
  /// The page is parked then. False: there is no such page.
  bool evict_cheapest_page(std::vector<EvictedBlock>& evicted);
  /// Frees the block that was cached first among the clean ones, else among those without a key,
  /// else among the copyable ones. False: none is cached.
  bool evict_oldest_block(std::vector<EvictedBlock>& evicted);
  /// Sets the time, in milliseconds modulo 2^32. A block that becomes cached is stamped with it.
  void set_now(std::uint32_t now_ms) { now_ms_ = now_ms; }
  /// Frees blocks that have been cached for `idle_ms`; copyable ones after `copyable_idle_ms`. A
  /// block that became clean after a younger one waits for that one.
  void evict_idle(std::uint32_t idle_ms, std::uint32_t copyable_idle_ms,
                  std::vector<EvictedBlock>& evicted);
  /// How long the next block that evict_idle() would free has been cached; none: there is none.
  std::optional<std::uint32_t> oldest_not_copyable_ms() const {
    return std::max(age_ms(kClean), age_ms(kKeyless));
  }
  std::optional<std::uint32_t> oldest_copyable_ms() const { return age_ms(kCopyable); }
  /// Cached blocks of the page that evict_cheapest_page() would take; none: there is none.
  std::optional<std::uint32_t> cheapest_page_cost() const;

  // --- keys and copies -----------------------------------------------------------------------

  /// Gives used or cached blocks their keys; one with another key than before is dirty. All or
  /// nothing; fails with kUnknownBlock (a free block, too) or kNullBlock. Pre: as many keys as ids.
  Status name(std::span<const BlockId> ids, std::span<const BlockKey> keys);
  /// Those that are used or cached and have these very keys are clean; answers how many. Others are
  /// passed over. Pre: as many keys as ids.
  std::uint64_t mark_clean(std::span<const BlockId> ids, std::span<const BlockKey> keys);
  /// Every clean block is dirty again; answers how many. Looks at every block.
  std::uint64_t forget_copies();

  /// Which dirty blocks leave first.
  enum class LeaveFirst : std::uint8_t {
    kOldest,     ///< those cached first
    kOfOnePage,  ///< those of the page that is the cheapest to empty, then of the next; then oldest
  };
  /// Begins to copy at most `most` dirty cached blocks that have keys and are not leaving.
  Leaving begin_leaving(std::uint64_t most, LeaveFirst first);
  /// Blocks that left together; 0: it has ended.
  std::uint64_t leaving_of(std::uint32_t ticket) const {
    const auto found = leaving_.find(ticket);
    return found == leaving_.end() ? 0 : found->second.size();
  }
  /// A flag for each of them: whether it still holds what it held then. What has been read before
  /// this call is whole where it says so. Empty: it has ended.
  std::vector<std::uint8_t> still_leaving(std::uint32_t ticket) const;
  /// Ends that. Blocks of which a copy was made (a flag each) are clean, unless they were used by
  /// another alloc or renamed since; answers how many. Pre: as many flags as blocks. 0: it has
  /// ended before.
  std::uint64_t end_leaving(std::uint32_t ticket, std::span<const std::uint8_t> copied);

  // --- pins (pins.h) -------------------------------------------------------------------------

  /// Pins used and cached blocks, and those that are given back and still pinned. A block named
  /// twice is pinned twice. All or nothing; fails with kUnknownBlock (a free block, too) or
  /// kNullBlock.
  Result<PinTicket> pin(std::span<const BlockId> ids, PinKind kind);
  /// Ends a pin. False: it has ended before, and nothing changes.
  bool unpin(PinTicket ticket);
  /// Blocks that are given back and still pinned: to their pages they are used.
  std::uint64_t waiting_blocks() const { return pins_.waiting(); }
  /// Those of them that reuse() can take: not pinned strictly, on open pages.
  std::uint64_t reusable_blocks() const;
  /// Appends `count` of these to `out`; they are used now, and what was to be cached is lost:
  /// appends those ids to `evicted`. Pre: count <= reusable_blocks().
  void reuse(std::uint64_t count, std::vector<BlockId>& out, std::vector<EvictedBlock>& evicted);
  /// Those that wait to be cached will be free instead; appends their ids.
  void evict_waiting(std::vector<EvictedBlock>& evicted);
  /// Ids of those that wait.
  std::vector<BlockId> waiting_ids() const;
  /// Ends every pin; appends the ids of those that waited to be cached.
  void drop_pins(std::vector<EvictedBlock>& evicted);

  // --- compaction ----------------------------------------------------------------------------

  /// Whether a page whose blocks are all cached could be emptied into holes of other pages.
  bool can_compact() const { return compactable_page().has_value(); }
  /// Chooses the page with the fewest cached blocks (and no used one) and a hole for each of them
  /// in the fullest other pages. The holes are used until finish_move(). False: there is no such
  /// page, or too few holes.
  bool take_compaction(std::vector<BlockMove>& moves);
  /// The contents have been copied: the new block is cached, as old as the former one, which is
  /// free. Where they have not, or the former was freed meanwhile, the new one is free; answers
  /// whether the block has moved.
  bool finish_move(const BlockMove& move, bool copied);

  /// Every block is free, pinned ones as soon as their pins end; appends the ids that were cached.
  /// The mapped pages stay mapped.
  void clear(std::vector<EvictedBlock>& evicted);

  // --- figures -------------------------------------------------------------------------------

  const Geometry& geometry() const { return geometry_; }
  std::uint64_t mapped_pages() const { return mapped_pages_; }
  std::uint64_t parked_pages() const { return parked_.size() + drained_.size(); }
  std::uint64_t used_blocks() const { return used_blocks_; }
  std::uint64_t cached_blocks() const { return cached_blocks_; }
  /// Pages with cached and no used blocks: eviction makes memory of these.
  std::uint64_t evictable_pages() const { return evictable_pages_; }
  /// Those of them that eviction would lose nothing of, and that nobody reads.
  std::uint64_t clean_pages() const { return clean_page_count_; }
  /// Cached blocks of which a tier has a copy.
  std::uint64_t clean_blocks() const { return clean_blocks_; }
  /// Dirty cached blocks: some may have no key, and some are leaving.
  std::uint64_t dirty_blocks() const { return cached_blocks_ - clean_blocks_; }
  /// Dirty cached blocks with keys, which a tier can copy; some are leaving.
  std::uint64_t copyable_blocks() const { return lists_[kCopyable].size(); }
  std::uint64_t leaving_blocks() const { return leaving_blocks_; }
  /// Cached blocks of which eviction makes free ones: not those of closed pages.
  std::uint64_t evictable_blocks() const { return cached_blocks_ - closed_cached_; }
  /// Blocks that alloc can give without another page.
  std::uint64_t free_blocks() const { return free_blocks_; }
  /// Used and cached blocks of a page; none if it is not mapped.
  std::optional<std::uint32_t> occupancy(PageIndex page) const;

  /// Recounts everything from the bitmaps. Fails with kIntegrity, naming what disagrees.
  Status check_integrity() const;

 private:
  enum class PageState : std::uint8_t { kUnmapped = 0, kInTransit = 1, kMapped = 2 };
  struct Page {
    PageState state;
    std::uint32_t used;  // page 0: with the null block
    std::uint32_t cached;
    std::uint32_t clean;      // of the cached ones
    std::uint32_t reading;    // blocks of it that are being copied
    std::uint32_t parked_at;  // its place in parked_ or drained_, while it is parked
    bool closed;
  };
  /// The lists of cached blocks, in the order in which they are evicted.
  enum Cached : std::uint8_t {
    kClean,     ///< a tier has a copy
    kKeyless,   ///< dirty and without a key: no tier can copy it
    kCopyable,  ///< dirty, with a key
  };
  struct Place {
    PageIndex page;
    std::uint32_t slot;  // 0 <= slot < blocks_per_page
  };
  /// What a block is below the engine, from the alloc that gave it on.
  struct Identity {
    BlockKey key;
    std::uint32_t leaving;  // the ticket; 0: it is not
    bool clean;
  };
  explicit Blocks(const Geometry& geometry);

  Result<Place> find(BlockId id) const;
  std::uint64_t& taken_word(Place at) { return taken_[word_of(at)]; }
  std::uint64_t& cached_word(Place at) { return cached_[word_of(at)]; }
  bool is_taken(Place at) const { return (taken_[word_of(at)] >> (at.slot % 64) & 1) != 0; }
  bool is_cached(Place at) const { return (cached_[word_of(at)] >> (at.slot % 64) & 1) != 0; }
  std::size_t word_of(Place at) const { return at.page * words_per_page_ + at.slot / 64; }
  std::uint32_t dense(Place at) const {
    return static_cast<std::uint32_t>(at.page * blocks_per_page_ + at.slot);
  }
  Place place(std::uint32_t dense) const {
    return {static_cast<PageIndex>(dense / blocks_per_page_),
            static_cast<std::uint32_t>(dense % blocks_per_page_)};
  }
  BlockId id_of(Place at) const { return geometry_.first_id(at.page) + at.slot; }
  bool is_pinned(Place at) const { return pins_.is_pinned(dense(at)); }
  bool is_waiting(Place at, Pins::Then then) const {
    return is_pinned(at) && pins_.then(dense(at)) == then;
  }

  /// Runs `step` on every id and leaves their places in `places_`; when an id is unknown, or `step`
  /// says false (the block is not `wanted`), runs `undo` on those done, in reverse.
  template <typename Step, typename Undo>
  Status for_all(std::span<const BlockId> ids, const char* wanted, Step step, Undo undo);
  Error wrong_state(BlockId id, const char* wanted) const;

  /// Takes a page out of the lists it is in, or puts it where its counts say; every change of
  /// counts stands between the two.
  void unlist(PageIndex index);
  void enlist(PageIndex index);
  std::uint32_t free_in(const Page& page) const {
    return static_cast<std::uint32_t>(blocks_per_page_) - page.used - page.cached;
  }
  void alloc_in_page(PageIndex index, std::size_t count, std::vector<BlockId>& out);
  template <typename Fits>
  std::optional<PageIndex> find_run(std::uint64_t count, Fits fits) const;
  std::optional<PageIndex> compactable_page() const;
  /// Counts and lists a cached block, or takes it out. Pre: the page is unlisted.
  void add_cached(Place at);
  void remove_cached(Place at);
  void forget(Place at) {
    if (has_identities_) identities_[dense(at)] = {};
  }
  bool is_clean(Place at) const { return has_identities_ && identities_[dense(at)].clean; }
  void set_clean(Place at, bool clean);
  /// Which list a cached block is in.
  Cached cached_as(Place at) const;
  BlockList& list_of(Place at) { return lists_[cached_as(at)]; }
  std::optional<PageIndex> cheapest_page() const;
  std::optional<std::uint32_t> age_ms(Cached as) const {
    const std::uint32_t oldest = lists_[as].oldest();
    if (oldest == 0) return std::nullopt;
    return now_ms_ - cached_at_ms_[oldest - 1];  // modulo 2^32
  }
  void evict_oldest_of(const BlockList& list, std::vector<EvictedBlock>& evicted);
  bool can_leave(Place at) const;
  void leave(Place at, Leaving& leaving);
  void leave_by_pages(std::uint64_t most, Leaving& leaving);
  Status check_copies() const;
  void make_free(Place at);
  void make_cached(Place at);
  void make_used(Place at);

  const Geometry geometry_;
  const std::uint64_t blocks_per_page_;
  const std::uint64_t words_per_page_;
  const std::uint64_t ids_per_page_;  // where an extent is whole blocks; 0 otherwise
  LazyArray<Page> pages_;
  LazyArray<std::uint64_t> taken_;   // a bit a block: used or cached
  LazyArray<std::uint64_t> cached_;  // a bit a block
  BlockLinks links_;                 // by dense index
  std::array<BlockList, 3> lists_{BlockList{links_}, BlockList{links_}, BlockList{links_}};
  LazyArray<std::uint32_t> cached_at_ms_;  // by dense index, of cached blocks
  std::uint32_t now_ms_ = 0;
  LazyArray<Identity> identities_;  // by dense index
  bool has_identities_ = false;     // no block has had a key yet: nothing of them is touched
  Pins pins_{links_};               // a pinned block is used, so it is in no other list
  Buckets partial_;  // mapped pages with free blocks that are not parked, by free blocks
  // Pages with cached and no used blocks that nobody reads:
  Buckets evictable_;    // with dirty blocks, by their number
  Buckets clean_pages_;  // all clean, by cached blocks
  std::uint64_t evictable_pages_ = 0;
  std::uint64_t clean_page_count_ = 0;
  std::unordered_map<std::uint32_t, std::vector<std::uint32_t>> leaving_;  // ticket: dense indices
  std::uint32_t newest_leaving_ = 0;
  std::vector<PageIndex> parked_;
  std::vector<PageIndex> drained_;  // parked and closed: to be unmapped, not to be used
  std::vector<PageIndex> closed_;   // pages that were closed; some may be unmapped since
  std::set<PageIndex> returned_;    // unmapped, and below fresh_
  PageIndex fresh_ = 0;             // pages from here on were never taken
  std::uint64_t mapped_pages_ = 0;
  std::uint64_t used_blocks_ = 0;
  std::uint64_t cached_blocks_ = 0;
  std::uint64_t clean_blocks_ = 0;
  std::uint64_t leaving_blocks_ = 0;  // named by tickets that have not ended
  // Kept by enlist() and unlist():
  std::uint64_t free_blocks_ = 0;    // of open pages
  std::uint64_t closed_cached_ = 0;  // of closed pages
  std::uint64_t closed_count_ = 0;
  std::vector<Place> places_;  // scratch of one call, kept to spare the allocation
};

}  // namespace kvelastic
