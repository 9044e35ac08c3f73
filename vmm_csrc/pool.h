// The blocks of one layout over one range: ids that an engine allocs and frees, and the pages that
// come and go under them.
//
// Where a block comes from, in this order: free blocks of mapped pages (best fit), parked pages,
// a new page while the limit lasts, the cached block that was cached first.
// Where memory goes, over the limit: parked pages are unmapped, then reservations are dropped, then
// cached pages are evicted, the cheapest first, then no block is handed out until the engine has
// freed enough (it preempts).
//
// Threads. Every call may be made from any thread. Locks, in the order they are taken:
//   session_  held by enter()..exit(), and by whoever takes pages or cached blocks away; free() and
//             cache() only try for it, so they never wait: what they leave is left to the keeper
//   mutex_    the accounting; never held across a call to the backing
//   the backing's own, the ledger member's own
//
// Where there is a ledger, every page is granted by it before it is created, and given back to it
// after it is destroyed. What others ask of this pool the keeper gives (give_up); what this pool
// cannot get it asks of others, in the alloc that needs it (for reclaim_wait) and then through the
// keeper (pursue).
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "backing.h"
#include "blocks.h"
#include "futex.h"
#include "ledger.h"
#include "own_process.h"
#include "record.h"
#include "session.h"

namespace kvelastic {

struct PoolOptions {
  std::uint64_t max_blocks = 0;   ///< ids that may be in use at once, the null block counted in
  std::uint64_t limit_bytes = 0;  ///< at start; at least one page is always held (null block)
  /// Of the device, where no ledger says it; no limit goes beyond it.
  std::uint64_t capacity_bytes = 0;
  std::uint64_t min_reserved_pages = 5;   ///< kept parked ahead of demand while there is any
  std::uint64_t max_reserved_pages = 10;  ///< never more than these are created ahead of demand
  std::int64_t max_cached_blocks = -1;    ///< -1: no bound
  bool preallocate = true;                ///< false: no page is created before an alloc needs it
  /// Cached blocks may move to other ids to empty pages; the engine must take_changes() then.
  bool movable = false;
  /// How many of each page the device holds: one a worker that maps pages there.
  std::uint64_t page_copies = 1;
  /// How long an alloc waits for memory that others have to give up; in a session it never does.
  /// After it has waited in vain the next ones do not for kFruitlessWaits times as long.
  std::chrono::nanoseconds reclaim_wait = std::chrono::milliseconds(50);
};

/// What set_limit() has come to.
struct LimitState {
  std::uint64_t limit_bytes = 0;      ///< as it was asked for
  std::uint64_t effective_bytes = 0;  ///< what is kept: whole pages, within range and device
  std::uint64_t mapped_bytes = 0;
  std::uint64_t over_bytes = 0;  ///< still to be given back; 0 = applied
};

struct PoolStats {
  std::uint64_t page_bytes = 0, pages_total = 0, pages_limit = 0;
  std::uint64_t pages_mapped = 0, pages_parked = 0;
  std::uint64_t blocks_total = 0, blocks_used = 0, blocks_cached = 0, blocks_reserved = 0;
  std::uint64_t blocks_available = 0;
  std::uint64_t allocs = 0, frees = 0, alloc_failures = 0, blocks_evicted = 0;
  std::uint64_t blocks_moved = 0;
  std::uint64_t pages_mapped_ever = 0, pages_unmapped_ever = 0, provision_runs = 0;
};

class Pool {
 public:
  static Result<std::unique_ptr<Pool>> create(const Geometry& geometry,
                                              std::shared_ptr<Backing> backing,
                                              const PoolOptions& options,
                                              std::shared_ptr<LedgerMember> member = nullptr);
  /// Gives nothing back: the range or the worker's end does that with the memory itself.
  ~Pool() = default;
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  /// The process whose calls this pool takes. In a forked child only a destructor may run: pages
  /// are the parent's, and a lock may be held by a thread that is not there. The binding refuses.
  const OwnProcess& made_by() const { return made_by_; }

  // --- blocks --------------------------------------------------------------------------------

  /// `count` ids, or none when that many cannot be had now; then nothing has changed. May map
  /// pages (blocks) and may evict cached blocks (see take_evicted). Fails only where no later try
  /// can succeed: kPoolFailed, kChannelClosed, kChannelTimeout; every later alloc and ensure fails
  /// then, for nobody knows what is mapped.
  Result<std::optional<std::vector<BlockId>>> alloc(std::uint64_t count);
  /// The same for a caller that must not block: answers false where a page might be had, which
  /// takes time, and nothing has changed then; true with `out` filled or none.
  bool try_alloc(std::uint64_t count, std::optional<std::vector<BlockId>>& out);

  /// Used or cached blocks are free again. All or nothing; fails with kUnknownBlock, kNullBlock,
  /// kDoubleFree. Over the limit it gives the emptied pages back before it returns (blocks), unless
  /// another thread is in a session: the keeper does it then, after that.
  Status free(std::span<const BlockId> ids);
  /// Used blocks whose contents are worth keeping; evicted first named first. As free. Past
  /// max_cached_blocks it evicts at once.
  Status cache(std::span<const BlockId> ids);
  /// Cached blocks are used again. All or nothing, fails as free. Cached blocks may have been
  /// evicted meanwhile: take_evicted() first, and be in a session.
  Status touch(std::span<const BlockId> ids);

  /// Ids evicted since the last call; the engine must forget what they held before it looks for
  /// cached contents again. Empty most of the time: ask has_evicted() first, one load.
  std::vector<BlockId> take_evicted();

  /// What has become of a cached block: it is at `to` now, or evicted (kEvicted).
  struct Change {
    static constexpr BlockId kEvicted = -1;
    BlockId id, to;
  };
  /// As take_evicted, for a movable pool: every move and eviction since the last call, in order.
  std::vector<Change> take_changes();
  bool has_evicted() const { return has_evicted_.load(std::memory_order_acquire); }

  /// Frees every block and forgets every reservation; ids handed out before are void.
  void clear();

  /// For good: no block is handed out any more (kPoolFailed), what is free, cached or reserved is
  /// given back with its pages, the null block's too, and pages on their way in are waited for.
  /// `discard`: blocks in use as well; else their pages stay until they are freed. Answers the
  /// pages that are still held. Waits for the session; blocks. Repeatable. Fails as unmap of the
  /// backing does.
  Result<std::uint64_t> close(bool discard);

  // --- what could be had ---------------------------------------------------------------------

  /// Blocks that alloc could give now, mapping and evicting as it must, and taking from others what
  /// they have to give. Lock-free.
  std::uint64_t available() const;
  /// The same without mapping a page. Lock-free.
  std::uint64_t available_mapped() const {
    return available_mapped_.load(std::memory_order_relaxed);
  }
  /// Maps pages until `count` blocks are free without evicting any, as far as the limit allows;
  /// never evicts. Does nothing where even eviction could not make `count` available. Answers
  /// available_mapped(). Blocks. Fails as alloc.
  Result<std::uint64_t> ensure(std::uint64_t count);
  /// The same for a caller that must not block: answers false, with nothing done, where a page
  /// might be had; true with `mapped` set.
  bool try_ensure(std::uint64_t count, std::uint64_t& mapped);

  /// Goes up whenever blocks can be had that could not be had before: a page came in, blocks were
  /// given back, the limit rose. Read it before a try that may fail: while it stands still, the
  /// same try would fail again. Lock-free.
  std::uint32_t arrivals() const { return arrivals_.load(std::memory_order_acquire); }
  /// Waits until arrivals() is another than `seen`, `timeout` at most; answers it. As long as
  /// somebody waits here, the keeper goes on asking others for what allocs could not get. Blocks.
  std::uint32_t wait_for_arrival(std::uint32_t seen, std::chrono::nanoseconds timeout);

  /// Sets `count` blocks aside for the allocs to come, which take them first. False: there are not
  /// as many, or the pool is over its limit. A lower limit, sleep, and others who need the memory
  /// drop all of it, before anything cached; allocs then take what there is. Blocks.
  Result<bool> try_to_reserve(std::uint64_t count);
  void free_reserved();

  /// Inside a session only the calls of its own thread make cached blocks vanish or capacity
  /// shrink: what available() said can be taken. Recursive. Waits while the pool shrinks.
  void enter() { session_.lock(); }
  bool try_enter() { return session_.try_lock(); }
  /// Pre: is_entered().
  void exit() { session_.unlock(); }
  /// Whether this very thread is in a session.
  bool is_entered() const { return session_.is_mine(); }

  // --- memory --------------------------------------------------------------------------------

  /// Carries out what others ask: unmaps pages down to `depth`, never below `min_bytes` or one
  /// page; answers how many. At Depth::kInUse what cannot be had now keeps the pool over a squeezed
  /// limit, until the engine has freed it or nobody has asked for kSqueezeLease. Waits for the
  /// session; blocks.
  Result<std::uint64_t> give_up(std::uint64_t pages, Depth depth, std::uint64_t min_bytes);
  /// Gets what allocs could not get lately, as parked pages, and asks for it. False: nothing is
  /// missing any more; true: call again soon, and when the member's bell rings. Blocks.
  bool pursue();
  /// Tells the ledger what others hold of a GPU. False: the device has none who could.
  bool see_device();
  /// Goes by the capacity of the device where that has changed: limits beyond it are cut to it.
  /// Gives nothing back itself. True: it has changed. Waits for the session then.
  bool see_capacity();
  /// Lifts a squeeze that nobody has asked for any more. True: there is still one.
  bool expire_squeeze();
  const std::shared_ptr<LedgerMember>& member() const { return member_; }

  /// Sets the limit without giving anything back yet. Waits for the session.
  LimitState set_limit(std::uint64_t limit_bytes);
  /// Goes down the ladder until the limit holds or only used blocks are left. Waits for the
  /// session; blocks. Fails as unmap of the backing does.
  Result<LimitState> enforce_limit();
  /// Asleep a pool hands out nothing and holds nothing: enforce_limit() evicts everything cached
  /// and gives every page back, the null block's too, as soon as no block is in use. Awake again,
  /// the next alloc or ensure maps what it needs. Gives nothing back itself; waits for the session.
  void set_asleep(bool asleep);
  bool is_asleep() const;
  LimitState limit_state() const;
  /// Whether more is held than the limit allows: free() and cache() may block then. Lock-free.
  bool is_over_limit() const { return over_limit_.load(std::memory_order_relaxed); }
  /// Of `ids`, all used, those that an engine may use anew before it gives them back: all of them,
  /// or over the limit those on pages that stay, as many as the limit has room for beside the
  /// blocks in use that are not named. Those of pages that are to drain are not among them.
  std::vector<BlockId> reusable(std::span<const BlockId> ids) const;
  /// Whether the backing has failed for good: no block is handed out any more. Lock-free.
  bool failed() const { return failed_.load(std::memory_order_relaxed); }
  /// What alloc fails with since then; none: it has not.
  std::optional<Error> failure() const;

  /// Unmaps at most `most` parked pages; answers how many. Waits for the session; blocks.
  Result<std::uint64_t> trim(std::uint64_t most = ~std::uint64_t{0});
  /// Maps parked pages ahead of demand up to the mark, if allocs have called for that since the
  /// last time; answers how many. Blocks.
  Result<std::uint64_t> provision();
  /// Moves cached blocks off the page that has the fewest, if other pages have holes for all of
  /// them; answers how many have moved. Nothing is lost. Only a movable pool does. Waits for the
  /// session; blocks. Fails as a copy of the backing does.
  Result<std::uint64_t> compact();
  /// Parked pages that no alloc has needed since the last call: what a decay timer may trim.
  std::uint64_t take_idle_parked();

  std::uint64_t mapped_bytes() const;
  std::optional<std::uint32_t> occupancy(PageIndex page) const;
  const Geometry& geometry() const { return geometry_; }
  /// What one page costs the device, all its copies together.
  std::uint64_t page_cost_bytes() const { return geometry_.page_bytes() * options_.page_copies; }
  PoolStats stats() const;
  Usage usage() const;
  /// Goes up with every call that allocs or frees: a pool whose count stands still is idle.
  std::uint64_t activity() const { return activity_.load(std::memory_order_relaxed); }

  /// Where usage and counters are published from now on, at every change; null: nowhere.
  void publish_to(std::shared_ptr<RecordOwner> record);
  /// Called when the keeper has something to do (provision, decay, a changed answer), from the
  /// thread that noticed, with the pool locked: must not block nor call back. Null: nobody.
  void on_wanted(std::function<void()> wake);
  /// True while parked pages stand by; from then until it answers false the pool does not call
  /// for decay again.
  bool arm_decay();

  /// Fails with kIntegrity, naming what disagrees.
  Status check_integrity() const;

 private:
  Pool(const Geometry& geometry, std::shared_ptr<Backing> backing, const PoolOptions& options,
       std::unique_ptr<Blocks> blocks, std::shared_ptr<LedgerMember> member);

  using Clock = std::chrono::steady_clock;
  /// What count_available() counts on: mapped pages only, or every page within the limit.
  enum class Reach : std::uint8_t { kMapped, kLimit };

  // All below: mutex_ is held. Those that take the lock let go of it while they call the backing.
  using Lock = std::unique_lock<std::mutex>;
  std::uint64_t at_hand() const { return reserved_.size() + blocks_->free_blocks(); }
  bool blocks_at_hand(std::uint64_t count, std::vector<BlockId>& out);
  bool take_mapped(std::uint64_t count, std::vector<BlockId>& out);
  bool pages_may_come(std::uint32_t own_entries) const;
  bool pages_are_coming() const;
  Result<std::uint64_t> grow(Lock& lock, std::uint64_t pages);
  Result<std::uint64_t> grow_by_batch(Lock& lock, std::uint64_t pages);
  std::uint64_t batch_pages() const;
  Status shrink(Lock& lock, std::uint64_t pages);
  Status unmap(Lock& lock, const std::vector<PageIndex>& batch);
  void evict_everything();
  void discard_everything();
  bool drop_reserved();
  /// How long a call may wait for others, and whether the session is its own to let go meanwhile.
  struct Wait {
    Clock::time_point until;
    bool holds_session;
  };
  Wait may_wait(std::uint32_t own_entries) const;
  Result<bool> get_pages(Lock& lock, std::uint64_t blocks, const Wait& wait);
  bool wait_for_grant(Lock& lock, std::uint64_t pages, const Wait& wait);
  void note_satisfied();
  Result<std::uint64_t> compact_page(Lock& lock);
  bool empty_a_page(Lock& lock);
  Status enforce(Lock& lock);
  Status go_down_the_ladder(Lock& lock);
  bool enforcing_due() const;
  void given_back(Lock& lock);
  Status refuse_reserved(std::span<const BlockId> ids) const;
  void note_if_final(const Status& answered);
  void evict_over_bound();
  void note_evicted(std::size_t before);
  std::uint64_t mappable_pages() const {
    return held_pages_ < pages_limit() ? pages_limit() - held_pages_ : 0;
  }
  std::uint64_t over_pages() const {
    return held_pages_ > pages_limit() ? held_pages_ - pages_limit() : 0;
  }
  std::uint64_t squeeze_floor() const;
  /// The operator's limit, or less while others have asked for blocks in use; nothing in sleep.
  std::uint64_t pages_limit() const { return asleep_ ? 0 : std::min(pages_limit_, squeezed_to_); }
  std::uint64_t pages_for(std::uint64_t blocks) const {
    return (blocks + geometry_.blocks_per_page - 1) / geometry_.blocks_per_page;
  }
  std::uint64_t in_use() const { return blocks_->used_blocks() - reserved_.size(); }
  std::uint64_t usable_blocks() const;
  std::uint64_t count_available(Reach reach) const;
  std::uint64_t capacity_bytes() const {
    return member_ ? member_->capacity_bytes() : options_.capacity_bytes;
  }
  std::uint64_t whole_pages(std::uint64_t limit_bytes) const;
  void tell_limit();
  bool provisioning_due() const;
  bool something_to_decay() const;
  void note_arrival();
  void note_failed_alloc();
  void note_activity() { activity_.fetch_add(1, std::memory_order_relaxed); }
  LimitState limit_state_locked() const;
  Usage usage_locked(std::uint64_t available) const;
  void changed();

  const OwnProcess made_by_;
  const Geometry geometry_;
  const PoolOptions options_;
  const std::shared_ptr<Backing> backing_;
  const std::shared_ptr<LedgerMember> member_;  // null: nobody shares the device

  Session session_;
  mutable std::mutex mutex_;
  std::unique_ptr<Blocks> blocks_;
  std::vector<BlockId> reserved_;  // sorted; used in blocks_, set aside for the next allocs
  std::vector<BlockId> evicted_;
  std::vector<Change> history_;        // moves, and the evictions before the last of them
  std::uint64_t seen_capacity_bytes_;  // pages_limit_ goes by this one, or by a newer one
  std::uint64_t limit_bytes_;
  std::uint64_t pages_limit_;
  std::uint64_t held_pages_ = 0;      // mapped, or on the way in or out
  std::condition_variable settled_;   // a batch of pages has come in or gone out
  std::uint64_t parked_low_ = 0;      // fewest parked pages since take_idle_parked()
  std::uint64_t demand_pages_ = 0;    // parked pages that allocs took since the last provision()
  std::uint64_t announced_over_ = 0;  // over_pages() when the keeper was last called for it
  bool enforcing_ = false;            // a thread is in enforce(); it holds the session
  bool shrink_called_ = false;        // the keeper was called to enforce, and it still is due
  bool provision_called_ = false;     // the keeper was called to provision and has not yet
  bool failure_announced_ = false;    // the keeper was called for it
  bool decay_armed_ = false;          // the keeper's decay timer runs
  bool asleep_ = false;
  std::uint64_t squeezed_to_ = ~std::uint64_t{0};  // pages, while others ask for blocks in use
  Clock::time_point squeezed_until_{};
  std::uint64_t met_squeeze_to_ = 0;  // of the last one that was met, until when it counts
  Clock::time_point met_squeeze_until_{};
  std::uint64_t starved_pages_ = 0;       // what the last allocs could not be granted
  Clock::time_point starved_at_{};        // when that was
  Clock::time_point wanted_at_{};         // when somebody last wanted or awaited them
  bool pursuit_called_ = false;           // the keeper was called for it
  Clock::time_point no_wait_before_{};    // a wait was in vain: allocs until then do not wait
  std::uint64_t published_activity_ = 0;  // activity_ when the ledger was last told
  PoolStats counts_;                      // the counters of stats()
  std::optional<Error> final_error_;  // what alloc fails with since the backing has failed for good
  std::shared_ptr<RecordOwner> record_;
  std::function<void()> wake_;

  std::atomic<std::uint64_t> available_limit_{0}, available_mapped_{0}, activity_{0};
  std::atomic<std::int64_t> available_held_{0};  // with what is on its way; -1 for a null block
  std::atomic<bool> has_evicted_{false}, over_limit_{false}, failed_{false};
  FutexWord arrivals_{0};       // changes with mutex_ held
  std::uint32_t awaiting_ = 0;  // threads in wait_for_arrival(): nobody else costs a system call
};

}  // namespace kvelastic
