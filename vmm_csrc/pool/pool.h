// A pool: the blocks of one layout over one range. The engine allocates and frees block ids; the
// pool maps and unmaps the pages under them.
//
// An alloc takes blocks in this order: free blocks of mapped pages (best fit), parked pages, a new
// page within the limit, the oldest cached block.
// Over the limit the pool releases memory in this order: parked pages, reserved blocks, cached
// pages (cheapest first). Then it allocates no block until the engine has freed enough (it
// preempts).
//
// Threads. Any thread may make any call. docs/ARCHITECTURE.md has the lock order. A pool
// has two, taken in this order:
//   session_  held from enter() to exit(), and by every call that takes pages or cached blocks
//   away.
//             free() and cache() only try to take it, so they never wait for it; the maintenance
//             thread does the rest. A call that waits for a GPU to finish with pages releases it.
//   mutex_    guards all state of the parts below; never held during a call to the backing.
//
// With shared devices, their ledgers grant every page before it is created, and get it back after
// it is destroyed. The maintenance thread (keeper) serves memory requests of other instances
// (give_up). It requests missing memory from others, first by the alloc that needs it (for
// reclaim_wait) and then by the maintenance thread (pursue).
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
  /// Unmaps nothing: the range or the worker's end releases the memory.
  ~Pool() = default;
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  /// The process that may call this pool. In a forked child only the destructor may run: pages
  /// belong to the parent, and a lock may be held by a thread that does not exist there. The
  /// binding refuses such calls.
  const OwnProcess& made_by() const { return made_by_; }

  // --- blocks --------------------------------------------------------------------------------

  /// Returns `count` ids, or none if too few blocks are available; then nothing has changed. May
  /// map pages (blocks) and evict cached blocks (see take_changes). Fails only if no retry can
  /// succeed: kPoolFailed, kChannelClosed, kChannelTimeout. Every later alloc and ensure then
  /// fails, because the mappings are unknown. With `reuse`, an alloc that would need a new page
  /// uses freed blocks that are still pinned, but not strictly; see reusable().
  Result<std::optional<std::vector<BlockId>>> alloc(std::uint64_t count, bool reuse = false);
  /// Allocates all blocks of `pages` consecutive pages. free() takes them page by page or together.
  /// For pools that hand out whole pages. Otherwise as alloc(); blocks.
  Result<std::optional<std::vector<BlockId>>> alloc_run(std::uint64_t pages);
  /// alloc() for a caller that must not block. Returns false, with nothing changed, if getting a
  /// page could take time; otherwise true, with `out` set to the result.
  bool try_alloc(std::uint64_t count, std::optional<std::vector<BlockId>>& out, bool reuse = false);

  /// used or cached -> free. All or nothing; fails with kUnknownBlock, kNullBlock, kDoubleFree.
  /// Over the limit it unmaps the emptied pages before it returns (blocks). The maintenance thread
  /// does that instead, if another thread is in a session, or if a GPU's kernels would have to be
  /// waited for.
  Status free(std::span<const BlockId> ids);
  /// used -> cached; earlier `ids` are evicted earlier. Fails as free(). Evicts at once beyond
  /// max_cached_blocks.
  Status cache(std::span<const BlockId> ids);
  /// cached -> used. All or nothing, fails as free(). The blocks may have been evicted: enter a
  /// session and call take_changes() first.
  Status touch(std::span<const BlockId> ids);

  /// Pins used or cached blocks for a reader. Until unpin() they are not evicted, moved or
  /// unmapped, and not allocated by an alloc without `reuse`, even if they are freed or cached, the
  /// pool sleeps, or its limit is lowered. A freed block counts as free only after its last pin.
  /// Pins are counted, and a freed block that is still pinned can be pinned again. All or nothing;
  /// fails with kUnknownBlock (also for a free block), kNullBlock, kDoubleFree (a reserved block).
  /// A cached block may have been evicted: enter a session and call take_changes() first.
  Result<PinTicket> pin(std::span<const BlockId> ids, PinKind kind);
  /// Ends a pin; blocks that were freed or cached in between are free or cached now. Over the limit
  /// it unmaps emptied pages as free() does (blocks). False: the pin has already ended, by unpin or
  /// by close(discard), and nothing changes.
  bool unpin(PinTicket ticket);
  /// Ids of freed blocks that are still pinned.
  std::vector<BlockId> pinned() const;
  /// How many of them alloc(reuse) could take; over the limit only those on pages that stay, as
  /// many as fit. Lock-free.
  std::uint64_t reusable() const { return figures_.reusable(); }

  /// Returns every eviction and move of a cached block since the last call, in order. The engine
  /// must forget the contents of evicted blocks before its next cache lookup. Usually empty: check
  /// has_evicted() first, one load.
  std::vector<BlockChange> take_changes();
  bool has_evicted() const { return accounting_.has_changes(); }

  /// Frees every block and drops all reservations; ids allocated before are invalid. Pinned blocks
  /// become free when their pins end.
  void clear();

  /// Closes the pool permanently: alloc fails with kPoolFailed, and free, cached and reserved
  /// blocks are released with their pages, including the null block's. Waits for pages that are
  /// being mapped, and for the session. With `discard`, used and pinned blocks are released as
  /// well; otherwise their pages stay until they are freed and unpinned. Returns the number of
  /// pages still held. Blocks. Idempotent. Fails as Backing::unmap.
  Result<std::uint64_t> close(bool discard);

  // --- bytes of blocks (tiers, transfer) -------------------------------------------------------

  /// From now on evictions count as demoted or dropped, and a shrinking pool waits for copies while
  /// a thread serves next_demotion().
  void use_tiers(const DemotionWaits& waits);
  /// Sets the keys of blocks: name() for used or cached blocks, this cache() for blocks that become
  /// cached. Fails as Blocks::name.
  Status cache(std::span<const BlockId> ids, std::span<const BlockKey> keys);
  Status name(std::span<const BlockId> ids, std::span<const BlockKey> keys);
  /// As Blocks::mark_clean and forget_copies.
  std::uint64_t mark_clean(std::span<const BlockId> ids, std::span<const BlockKey> keys);
  std::uint64_t forget_copies();

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
  /// of the oldest. Until end_leaving() their pages stay and their contents can be read;
  /// end_leaving() returns whether a block was unchanged.
  Leaving begin_leaving(std::uint64_t most);
  /// Blocks::still_leaving. Call it after the copy and before storing it under its key: the block
  /// may have been allocated again while it was read.
  std::vector<std::uint8_t> still_leaving(std::uint32_t ticket) const;
  /// Blocks::end_leaving; fails with kInvalidArgument for a wrong number of flags.
  Result<std::uint64_t> end_leaving(std::uint32_t ticket, std::span<const std::uint8_t> copied);

  /// Copies every rank's part of whole blocks into slots of `staging` (CopyTo::kHost) or back
  /// (kDevice). Waits for the work submitted to the devices; blocks. The caller keeps the blocks
  /// used, pinned or under writeback. Fails as Backing::copy_records, and with kInvalidArgument if
  /// the object size differs from a block with every rank's part.
  Status copy_records(std::span<const BlockSlot> blocks, const std::shared_ptr<Staging>& staging,
                      CopyTo to);
  /// Bytes of one block in all buffers and all ranks.
  std::uint64_t record_bytes() const { return pages_.ranks() * geometry().record_bytes(); }

  // --- available blocks ----------------------------------------------------------------------

  /// Blocks that alloc could return now, including mapping, eviction, and memory that others would
  /// have to release. Lock-free.
  std::uint64_t available() const { return figures_.available(); }
  /// Blocks that alloc could return without mapping a page. Lock-free.
  std::uint64_t available_mapped() const { return figures_.available_mapped(); }
  /// Maps pages within the limit until `count` blocks are free without an eviction; never evicts.
  /// Does nothing if `count` could not be available even with evictions. Returns
  /// available_mapped(). Blocks. In the caller's session it waits for others only while fewer than
  /// `needed` blocks are available, evictions included. Fails as alloc().
  Result<std::uint64_t> ensure(std::uint64_t count, std::uint64_t needed = 0);
  /// ensure() for a caller that must not block. Returns false, with nothing done, if a page might
  /// be available; otherwise true with `mapped` set.
  bool try_ensure(std::uint64_t count, std::uint64_t needed, std::uint64_t& mapped);

  /// The availability epoch: incremented whenever more blocks become available, because a page was
  /// mapped, blocks were freed, or the limit rose. Read it before an attempt: while it is
  /// unchanged, the same attempt would fail again. Lock-free.
  std::uint32_t arrivals() const { return figures_.arrivals.count(); }
  /// The part of the epoch that free() and cache() caused, of which their caller knows. Lock-free.
  std::uint32_t given_back_arrivals() const {
    return given_back_arrivals_.load(std::memory_order_relaxed);
  }
  /// Blocks until arrivals() differs from `seen`, at most for `timeout`, and returns it. While a
  /// thread waits here, the maintenance thread keeps requesting missing memory from others.
  std::uint32_t wait_for_arrival(std::uint32_t seen, std::chrono::nanoseconds timeout);

  /// Reserves `count` blocks for later allocs, which take them first. False: too few are available,
  /// or the pool is over its limit. A lower limit, sleep, or memory requests of others drop the
  /// whole reservation before any cached block is evicted. Blocks.
  Result<bool> try_to_reserve(std::uint64_t count);
  void free_reserved();

  /// Enters a session: only the calling thread can make cached blocks disappear or the capacity
  /// shrink, so the result of available() can be relied on. Recursive. Waits while the pool
  /// shrinks.
  void enter() { session_.lock(); }
  bool try_enter() { return session_.try_lock(); }
  /// Pre: is_entered().
  void exit() { session_.unlock(); }
  /// True if the calling thread is in a session.
  bool is_entered() const { return session_.is_mine(); }

  // --- memory --------------------------------------------------------------------------------

  /// Releases memory for other instances: unmaps pages down to `depth`, but keeps `min_pages` and
  /// at least one. Returns how many. At Depth::kInUse a shortfall puts the pool under memory
  /// pressure: its limit is lowered until the engine has freed the blocks or the requests stop for
  /// Squeeze::kLease. Waits for the session; blocks.
  Result<std::uint64_t> give_up(std::uint64_t pages, Depth depth, std::uint64_t min_pages);
  /// Gets pages that allocs lacked recently, as parked pages, and requests the rest. False: no page
  /// is missing. True: call again soon, and when a ledger's bell rings. Blocks.
  bool pursue();
  /// Records other processes' GPU memory in the ledgers. Waits for drivers.
  Sight see_devices();
  /// True once after a large move of GPU memory: the device must be measured.
  bool take_large_move();
  /// Adopts a changed device capacity: limits beyond it are reduced to it. Releases nothing itself.
  /// True: it has changed; only then the session was waited for.
  bool see_capacity();
  /// Ends memory pressure that is no longer requested. True: the pool is still under pressure.
  bool expire_squeeze();
  /// The ledgers' members; null: the device is not shared.
  const std::shared_ptr<Places>& places() const { return places_; }

  void keep_free(std::uint64_t bytes) { pages_.keep_free(bytes); }
  std::vector<pid_t> other_processes() const { return pages_.other_processes(); }
  /// True if a page could be released when memory runs short. Until it has returned false, the pool
  /// does not wake the maintenance thread for such checks again.
  bool arm_memory_watch();
  /// Memory for a page is available again: wakes waiting threads if a page was refused before.
  void note_memory();
  Refusals refusals() const;

  /// Sets the limit without releasing memory yet. Waits for the session.
  LimitState set_limit(std::uint64_t limit_bytes);
  /// Releases memory until the limit holds or only used blocks are left. Waits for the session;
  /// blocks. Fails as Backing::unmap. With tiers it waits for copies first and releases clean pages
  /// in the meantime, until `interrupted` (called every few milliseconds) returns true.
  Result<LimitState> enforce_limit(const std::function<bool()>& interrupted = {});
  /// enforce_limit() that also waits for pages being unmapped by others, so that the held memory it
  /// returns is in use. For a caller that reports the pool's memory as free in sleep.
  Result<LimitState> settle_limit();
  /// Asleep, a pool allocates no block and holds no memory: enforce_limit() evicts every cached
  /// block and unmaps every page, including the null block's, once no block is in use. Awake again,
  /// the next alloc or ensure maps pages. Releases nothing itself; waits for the session. Its
  /// ledger members fall asleep with it. They must be awake before the pool can wake (see
  /// waking.h).
  void set_asleep(bool asleep);
  bool is_asleep() const;
  LimitState limit_state() const;
  /// Why the pool is over its limit.
  struct Excess {
    std::uint64_t pages = 0;  ///< to be emptied until the limit holds
    /// Each candidate page with its blocks in use, pinned ones included.
    std::vector<std::pair<PageIndex, std::uint32_t>> used{};
  };
  Excess excess() const;
  /// True if more is held than the limit allows: free() and cache() may block then. Lock-free.
  bool is_over_limit() const { return figures_.is_over_limit(); }
  /// True if the backing has failed permanently: no block is allocated. Lock-free.
  bool failed() const { return accounting_.has_failed(); }
  /// The error of alloc since then; empty without a failure.
  std::optional<Error> failure() const;

  /// Unmaps at most `most` parked pages and returns how many. Waits for the session; blocks.
  Result<std::uint64_t> trim(std::uint64_t most = ~std::uint64_t{0});
  /// Maps parked pages ahead of demand, if allocs have required that since the last call, and
  /// returns how many. Postponed while blocks are loaded. Blocks.
  Result<std::uint64_t> provision();
  /// True if provision() was postponed: call it again soon.
  bool is_provision_due() const;
  /// Moves the cached blocks of the page with the fewest into holes of other pages, if there are
  /// enough, and returns how many moved. Loses nothing. For movable pools only. Waits for the
  /// session; blocks. Fails as Backing::copy.
  Result<std::uint64_t> compact();
  /// Evicts cached blocks unused for PoolOptions::cache_idle and returns when to call it again.
  /// Empty: when the pool requests it (KeeperWork::cache_idle). Waits for the session if there are
  /// blocks to evict.
  std::optional<std::chrono::milliseconds> evict_idle();
  /// The age of the oldest cached block that a tier can copy; 0 without one.
  std::chrono::milliseconds oldest_copyable();
  /// The use of parked pages since the last call, for the decay of unneeded ones.
  ParkedUse take_parked_use();

  std::uint64_t mapped_bytes() const;
  std::optional<std::uint32_t> occupancy(PageIndex page) const;
  const Geometry& geometry() const { return accounting_.geometry(); }
  std::chrono::milliseconds cache_idle() const { return options_.cache_idle; }
  /// The maximum of cached blocks; negative: no bound.
  std::int64_t max_cached_blocks() const { return options_.max_cached_blocks; }
  /// The size of a page with all copies on all devices.
  std::uint64_t page_cost_bytes() const { return accounting_.page_bytes(); }
  PoolStats stats() const;
  Usage usage() const;
  /// Incremented by every call that allocates or frees; unchanged while the pool is idle.
  std::uint64_t activity() const { return figures_.activity(); }

  /// Reports to the ledgers whether the engine has unfinished requests (LedgerMember::report_busy).
  /// Lock-free.
  void report_busy(bool busy);
  /// Publishes how many requests wait for memory. Takes the pool's lock.
  WaitingBytes report_waiting(const Waiting& waiting);

  /// Publishes usage and counters to `record` at every change; null stops publishing.
  void publish_to(std::shared_ptr<RecordOwner> record);
  /// Sets the function that wakes the maintenance thread when work is due. It is called from the
  /// thread that noticed the work, with the pool locked, so it must neither block nor call back.
  /// Null: no maintenance thread.
  void on_wanted(std::function<void()> wake);
  /// True while pages are parked. Until it has returned false, the pool does not wake the
  /// maintenance thread for decay again.
  bool arm_decay();

  /// Fails with kIntegrity, naming the inconsistency.
  Status check_integrity() const;

 private:
  using Lock = PoolPages::Lock;
  using Reach = Accounting::Reach;

  Pool(const Geometry& geometry, std::shared_ptr<Backing> backing, const PoolOptions& options,
       std::unique_ptr<Blocks> blocks, std::shared_ptr<Places> places);

  // mutex_ is held. Functions with a lock parameter release it while they call the backing.
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
  const std::shared_ptr<Places> places_;  // null: the device is not shared

  Session session_;
  mutable std::mutex mutex_;
  std::atomic<std::uint32_t> given_back_arrivals_{0};
  // Each owns its state and uses the ones above it.
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
