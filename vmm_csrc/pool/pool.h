// The blocks of one layout over one range: ids that an engine allocs and frees, and the pages that
// come and go under them.
//
// Where a block comes from, in this order: free blocks of mapped pages (best fit), parked pages,
// a new page while the limit lasts, the cached block that was cached first.
// Where memory goes, over the limit: parked pages are unmapped, then reservations are dropped, then
// cached pages are evicted, the cheapest first, then no block is handed out until the engine has
// freed enough (it preempts).
//
// Threads. Every call may be made from any thread. docs/ARCHITECTURE.md has the order of all locks;
// a pool's own two, the first taken first:
//   session_  held by enter()..exit(), and by whoever takes pages or cached blocks away; free() and
//             cache() only try for it, so they never wait: what they leave is left to the keeper.
//             Who waits for a GPU to be done with pages that it has taken lets go of it meanwhile
//   mutex_    all state of the parts below; never held across a call to the backing
//
// Where devices are shared, every page is granted by their ledgers before it is created, and given
// back to them after it is destroyed. What others ask of this pool the keeper gives (give_up); what
// this pool cannot get it asks of others, in the alloc that needs it (for reclaim_wait) and then
// through the keeper (pursue).
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "base/own_process.h"
#include "base/session.h"
#include "ledger/places.h"
#include "pages/backing.h"
#include "pool/accounting.h"
#include "pool/counters.h"
#include "pool/demotions.h"
#include "pool/figures.h"
#include "pool/keeper_calls.h"
#include "pool/ladder.h"
#include "pool/page_supply.h"
#include "pool/pool_options.h"
#include "pool/pool_pages.h"
#include "pool/provisioning.h"
#include "pool/starvation.h"
#include "segment/record.h"

namespace kvelastic {

class Pool {
 public:
  static Result<std::unique_ptr<Pool>> create(const Geometry& geometry,
                                              std::shared_ptr<Backing> backing,
                                              const PoolOptions& options,
                                              std::shared_ptr<Places> places = nullptr);
  /// Gives nothing back: the range or the worker's end does that with the memory itself.
  ~Pool() = default;
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  /// The process whose calls this pool takes. In a forked child only a destructor may run: pages
  /// are the parent's, and a lock may be held by a thread that is not there. The binding refuses.
  const OwnProcess& made_by() const { return made_by_; }

  // --- blocks --------------------------------------------------------------------------------

  /// `count` ids, or none when that many cannot be had now; then nothing has changed. May map
  /// pages (blocks) and may evict cached blocks (see take_changes). Fails only where no later try
  /// can succeed: kPoolFailed, kChannelClosed, kChannelTimeout; every later alloc and ensure fails
  /// then, for nobody knows what is mapped.
  /// `reuse`: where no block is free without a new page, blocks that were given back and are still
  /// pinned, but not strictly; see reusable().
  Result<std::optional<std::vector<BlockId>>> alloc(std::uint64_t count, bool reuse = false);
  /// All blocks of `pages` pages that lie side by side, as one run of addresses; they are freed by
  /// free(), page by page or together. Else as alloc. For pools whose pages are given out whole.
  /// Blocks.
  Result<std::optional<std::vector<BlockId>>> alloc_run(std::uint64_t pages);
  /// The same as alloc for a caller that must not block: answers false where a page might be had,
  /// which takes time, and nothing has changed then; true with `out` filled or none.
  bool try_alloc(std::uint64_t count, std::optional<std::vector<BlockId>>& out, bool reuse = false);

  /// Used or cached blocks are free again. All or nothing; fails with kUnknownBlock, kNullBlock,
  /// kDoubleFree. Over the limit it gives the emptied pages back before it returns (blocks), unless
  /// another thread is in a session, or the pages are a GPU's, whose kernels would have to be
  /// waited for: the keeper does it then, where there is one.
  Status free(std::span<const BlockId> ids);
  /// Used blocks whose contents are worth keeping; evicted first named first. As free. Past
  /// max_cached_blocks it evicts at once.
  Status cache(std::span<const BlockId> ids);
  /// Cached blocks are used again. All or nothing, fails as free. Cached blocks may have been
  /// evicted meanwhile: take_changes() first, and be in a session.
  Status touch(std::span<const BlockId> ids);

  /// Keeps these blocks, used or cached, where they are for somebody who reads them: until unpin()
  /// they are not evicted, moved or unmapped, and not handed out by an alloc without `reuse`,
  /// whoever frees or caches them meanwhile, also in sleep and over a lower limit. What is given
  /// back meanwhile is no free block, and neither counted as one nor taken for others, before its
  /// last pin ends. Pins are counted; a block that is given back and still pinned can be pinned
  /// again. All or nothing; fails with kUnknownBlock (a free block, too), kNullBlock, kDoubleFree
  /// (a reserved one). A cached block may have been evicted: be in a session, and take_changes().
  Result<PinTicket> pin(std::span<const BlockId> ids, PinKind kind);
  /// Ends a pin: what was given back meanwhile is free or cached now. As free, it gives emptied
  /// pages back over the limit (blocks). False: it has ended before, by unpin or by close(discard),
  /// and nothing changes.
  bool unpin(PinTicket ticket);
  /// Ids of blocks that were given back and are still pinned.
  std::vector<BlockId> pinned() const;
  /// How many blocks alloc(reuse) could take of those: over the limit only those on pages that
  /// stay, as many as it has room for. Lock-free.
  std::uint64_t reusable() const { return figures_.reusable(); }

  /// Every eviction and move of a cached block since the last call, in order; the engine must
  /// forget what evicted ones held before it looks for cached contents again. Empty most of the
  /// time: ask has_evicted() first, one load.
  std::vector<BlockChange> take_changes();
  bool has_evicted() const { return accounting_.has_changes(); }

  /// Frees every block and forgets every reservation; ids handed out before are void. Pinned
  /// blocks are free when their pins end.
  void clear();

  /// For good: no block is handed out any more (kPoolFailed), what is free, cached or reserved is
  /// given back with its pages, the null block's too, and pages on their way in are waited for.
  /// `discard`: blocks in use and pinned ones as well; else their pages stay until they are freed
  /// and their pins have ended. Answers the
  /// pages that are still held. Waits for the session; blocks. Repeatable. Fails as unmap of the
  /// backing does.
  Result<std::uint64_t> close(bool discard);

  // --- bytes of blocks (tiers, transfer) -------------------------------------------------------

  /// From now on evictions count as demoted or dropped, and who shrinks the pool waits for copies
  /// while a thread serves next_demotion().
  void use_tiers(const DemotionWaits& waits);
  /// Blocks get their keys: as cache(), and of blocks in use. Fails as Blocks::name.
  Status cache(std::span<const BlockId> ids, std::span<const BlockKey> keys);
  Status name(std::span<const BlockId> ids, std::span<const BlockKey> keys);
  /// As Blocks::mark_clean and forget_copies.
  std::uint64_t mark_clean(std::span<const BlockId> ids, std::span<const BlockKey> keys);
  std::uint64_t forget_copies();

  /// What is to be copied before it is evicted.
  struct Demotion {
    DemotionReason reason;
    std::uint64_t blocks;  ///< dirty cached ones
    std::chrono::nanoseconds left;
  };
  /// Blocks until somebody shrinks the pool and there are blocks to copy, `timeout` at most, or
  /// until stop_demotions().
  std::optional<Demotion> next_demotion(std::chrono::nanoseconds timeout);
  /// Has everything cached copied that has a key, for who is about to give it up: blocks until it
  /// is, `timeout` at most, or until no more can be. Answers how many dirty blocks are left. What
  /// is clean stays cached, and nothing is given back.
  std::uint64_t clean(std::chrono::nanoseconds timeout);
  /// Who called next_demotion() does so no more: nobody waits for copies.
  void stop_demotions();
  /// As Blocks::begin_leaving: while somebody shrinks the pool, the blocks that would go first,
  /// else the oldest. Their contents can be read, their pages stay, until end_leaving(); whether a
  /// block was still the same then is what end_leaving() answers.
  Leaving begin_leaving(std::uint64_t most);
  /// As Blocks::still_leaving: to be asked after the copy and before it is kept under its key, for
  /// an alloc may have given the block to another use while it was read.
  std::vector<std::uint8_t> still_leaving(std::uint32_t ticket) const;
  /// As Blocks::end_leaving; fails with kInvalidArgument for another number of flags.
  Result<std::uint64_t> end_leaving(std::uint32_t ticket, std::span<const std::uint8_t> copied);

  /// Copies whole blocks, every rank's part, into slots of `staging` (CopyTo::kHost) or back
  /// (kDevice). Waits for what the devices have in hand; blocks. The caller keeps the blocks where
  /// they are: they are in use by it, pinned, or leaving. Fails as Backing::copy_records, and with
  /// kInvalidArgument for a record that is not as large as a block of all ranks.
  Status copy_records(std::span<const BlockSlot> blocks, const std::shared_ptr<Staging>& staging,
                      CopyTo to);
  /// Bytes of one block in all buffers and all ranks.
  std::uint64_t record_bytes() const { return pages_.ranks() * geometry().record_bytes(); }

  // --- what could be had ---------------------------------------------------------------------

  /// Blocks that alloc could give now, mapping and evicting as it must, and taking from others what
  /// they have to give. Lock-free.
  std::uint64_t available() const { return figures_.available(); }
  /// The same without mapping a page. Lock-free.
  std::uint64_t available_mapped() const { return figures_.available_mapped(); }
  /// Maps pages until `count` blocks are free without evicting any, as far as the limit allows;
  /// never evicts. Does nothing where even eviction could not make `count` available. Answers
  /// available_mapped(). Blocks; in a session of the caller's it waits for others only while fewer
  /// than `needed` could be had, also by eviction. Fails as alloc.
  Result<std::uint64_t> ensure(std::uint64_t count, std::uint64_t needed = 0);
  /// The same for a caller that must not block: answers false, with nothing done, where a page
  /// might be had; true with `mapped` set.
  bool try_ensure(std::uint64_t count, std::uint64_t needed, std::uint64_t& mapped);

  /// Goes up whenever blocks can be had that could not be had before: a page came in, blocks were
  /// given back, the limit rose. Read it before a try that may fail: while it stands still, the
  /// same try would fail again. Lock-free.
  std::uint32_t arrivals() const { return figures_.arrivals.count(); }
  /// How many of them came of free() and cache(): who calls these knows of them. Lock-free.
  std::uint32_t given_back_arrivals() const {
    return given_back_arrivals_.load(std::memory_order_relaxed);
  }
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

  /// Carries out what others ask: unmaps pages down to `depth`, never below `min_pages` or one;
  /// answers how many. At Depth::kInUse what cannot be had now keeps the pool over a squeezed
  /// limit, until the engine has freed it or nobody has asked for kSqueezeLease. Waits for the
  /// session; blocks.
  Result<std::uint64_t> give_up(std::uint64_t pages, Depth depth, std::uint64_t min_pages);
  /// Gets what allocs could not get lately, as parked pages, and asks for it. False: nothing is
  /// missing any more; true: call again soon, and when the bell of a ledger rings. Blocks.
  bool pursue();
  /// Tells the ledgers what others hold of GPUs. Waits for drivers.
  Sight see_devices();
  /// Whether so much has come or gone on a GPU since this was last asked that it is to be looked
  /// at.
  bool take_large_move();
  /// Goes by the capacity of the device where that has changed: limits beyond it are cut to it.
  /// Gives nothing back itself. True: it has changed. Waits for the session then.
  bool see_capacity();
  /// Lifts a squeeze that nobody has asked for any more. True: there is still one.
  bool expire_squeeze();
  /// Where its pages are granted; null: nobody shares its device.
  const std::shared_ptr<Places>& places() const { return places_; }

  /// As Backing::keep_free.
  void keep_free(std::uint64_t bytes) { pages_.keep_free(bytes); }
  /// As Backing::other_processes.
  std::vector<pid_t> other_processes() const { return pages_.other_processes(); }
  /// Whether there is a page that could be given back where memory runs short: from then until this
  /// answers false the pool does not call for the keeper's looks again.
  bool arm_memory_watch();
  /// There is memory for another page. Whoever waits hears of it, where a page was refused before.
  void note_memory();
  Refusals refusals() const;

  /// Sets the limit without giving anything back yet. Waits for the session.
  LimitState set_limit(std::uint64_t limit_bytes);
  /// Goes down the ladder until the limit holds or only used blocks are left. Waits for the
  /// session; blocks. Fails as unmap of the backing does.
  /// Where tiers are in use it waits for copies first, and gives back what is clean meanwhile,
  /// until `interrupted` says that something else is to be done (asked every few milliseconds).
  Result<LimitState> enforce_limit(const std::function<bool()>& interrupted = {});
  /// The same, and waits for pages over the limit that others have begun to unmap: what it answers
  /// as held is in use. For who puts the pool to sleep, and says then that its memory is free.
  Result<LimitState> settle_limit();
  /// Asleep a pool hands out nothing and holds nothing: enforce_limit() evicts everything cached
  /// and gives every page back, the null block's too, as soon as no block is in use. Awake again,
  /// the next alloc or ensure maps what it needs. Gives nothing back itself; waits for the session.
  /// Its members of ledgers fall asleep with it, and have to be awake first (see waking.h): as long
  /// as they are not, nor is this pool.
  void set_asleep(bool asleep);
  bool is_asleep() const;
  LimitState limit_state() const;
  /// What keeps the pool over its limit.
  struct Excess {
    std::uint64_t pages = 0;  ///< to be emptied until the limit holds
    /// Every page that could be, with its blocks in use, pinned ones included.
    std::vector<std::pair<PageIndex, std::uint32_t>> used{};
  };
  Excess excess() const;
  /// Whether more is held than the limit allows: free() and cache() may block then. Lock-free.
  bool is_over_limit() const { return figures_.is_over_limit(); }
  /// Whether the backing has failed for good: no block is handed out any more. Lock-free.
  bool failed() const { return accounting_.has_failed(); }
  /// What alloc fails with since then; none: it has not.
  std::optional<Error> failure() const;

  /// Unmaps at most `most` parked pages; answers how many. Waits for the session; blocks.
  Result<std::uint64_t> trim(std::uint64_t most = ~std::uint64_t{0});
  /// Maps parked pages ahead of demand up to the mark, if allocs have called for that since the
  /// last time; answers how many. While blocks are loaded it leaves that for later. Blocks.
  Result<std::uint64_t> provision();
  /// Whether it has left something for later: call it again soon.
  bool is_provision_due() const;
  /// Moves cached blocks off the page that has the fewest, if other pages have holes for all of
  /// them; answers how many have moved. Nothing is lost. Only a movable pool does. Waits for the
  /// session; blocks. Fails as a copy of the backing does.
  Result<std::uint64_t> compact();
  /// Evicts cached blocks that nothing has used for PoolOptions::cache_idle; returns when to call
  /// it again. None: not before the pool calls for it (KeeperWork::cache_idle). Waits for the
  /// session if there is something to evict.
  std::optional<std::chrono::milliseconds> evict_idle();
  /// For how long the oldest block that a tier can copy has been cached; 0 without one.
  std::chrono::milliseconds oldest_copyable();
  /// What became of parked pages since the last call, for the decay of those that are not needed.
  ParkedUse take_parked_use();

  std::uint64_t mapped_bytes() const;
  std::optional<std::uint32_t> occupancy(PageIndex page) const;
  const Geometry& geometry() const { return accounting_.geometry(); }
  std::chrono::milliseconds cache_idle() const { return options_.cache_idle; }
  /// How many blocks cache() keeps; negative: no bound.
  std::int64_t max_cached_blocks() const { return options_.max_cached_blocks; }
  /// What one page costs, all its copies on all devices together.
  std::uint64_t page_cost_bytes() const { return accounting_.page_bytes(); }
  PoolStats stats() const;
  Usage usage() const;
  /// Goes up with every call that allocs or frees: a pool whose count stands still is idle.
  std::uint64_t activity() const { return figures_.activity(); }

  /// Reports to the ledgers whether the engine has unfinished requests (LedgerMember::report_busy).
  /// Takes no lock.
  void report_busy(bool busy);
  /// Publishes how many requests wait for memory. Takes the pool's lock.
  WaitingBytes report_waiting(const Waiting& waiting);

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
  using Lock = PoolPages::Lock;
  using Reach = Accounting::Reach;

  Pool(const Geometry& geometry, std::shared_ptr<Backing> backing, const PoolOptions& options,
       std::unique_ptr<Blocks> blocks, std::shared_ptr<Places> places);

  // mutex_ is held. Those that take the lock let go of it while they call the backing.
  /// An alloc's blocks: `fresh` ones, and `reused` ones that are still pinned.
  struct Parts {
    std::uint64_t fresh, reused;
  };
  Parts parts_of(std::uint64_t count, bool reuse) const;
  bool take_at_hand(Parts parts, std::vector<BlockId>& out);
  bool take_mapped(Parts parts, std::vector<BlockId>& out);
  void given_back(Lock& lock);
  void evict_over_bound();
  struct IdleTimes {
    std::int64_t idle_ms, copyable_ms;
  };
  IdleTimes idle_times() const;
  std::optional<std::chrono::milliseconds> until_idle_eviction();
  Result<LimitState> enforce_now();
  bool would_drop(std::uint64_t pages) const;
  void demote_for_limit(const std::function<bool()>& interrupted);
  void demote_for_others(std::uint64_t pages);
  void tell_limit();

  const OwnProcess made_by_;
  const PoolOptions options_;
  const std::shared_ptr<Places> places_;  // null: nobody shares the device

  Session session_;
  mutable std::mutex mutex_;
  std::atomic<std::uint32_t> given_back_arrivals_{0};
  // Each owns its state, and uses those above it.
  Counters counters_;
  Accounting accounting_;
  Starvation starvation_;
  Provisioning provisioning_;
  LoadsFirst loads_;
  KeeperCalls calls_;
  Figures figures_;
  PoolPages pages_;
  PageSupply supply_;
  Ladder ladder_;
  Demotions demotions_;
};

}  // namespace kvelastic
