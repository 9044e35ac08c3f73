// The state of a pool, behind its lock. PoolState::Change is the only way to write it, and
// publishes it whenever the lock is released: to lock-free readers, the segment, the ledgers, and
// the maintenance thread. PoolState::Look is the only way to read it. So no change stays
// unpublished.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <utility>

#include "base/availability.h"
#include "base/session.h"
#include "ledger/device_set.h"
#include "pages/backing.h"
#include "pool/accounting.h"
#include "pool/counters.h"
#include "pool/demotions.h"
#include "pool/memory_wait.h"
#include "pool/pending_work.h"
#include "pool/provisioning.h"
#include "segment/control_block.h"

namespace kvelastic {

/// Options of a pool at its creation.
struct PoolOptions {
  std::uint64_t max_blocks = 0;   ///< maximum of ids in use at once, including the null block
  std::uint64_t limit_bytes = 0;  ///< at start; at least one page is always held (null block)
  /// Of the device, used without a ledger; bounds every limit.
  std::uint64_t capacity_bytes = 0;
  std::uint64_t min_reserved_pages = 5;   ///< minimum of pages parked ahead of demand
  std::uint64_t max_reserved_pages = 10;  ///< maximum of pages created ahead of demand
  std::int64_t max_cached_blocks = -1;    ///< -1: no bound
  /// The maintenance thread evicts cached blocks unused for this long; negative: never.
  std::chrono::milliseconds cache_idle{-1};
  bool preallocate = true;  ///< false: pages are created only when an alloc needs them
  /// Cached blocks may move to other ids to empty pages; the engine must call take_changes().
  bool movable = false;
  /// How long an alloc waits for memory that others must release. In a session only ensure() waits,
  /// if the engine would preempt otherwise. After a fruitless wait no alloc waits for
  /// kFruitlessWaits times as long.
  std::chrono::nanoseconds reclaim_wait = std::chrono::milliseconds(50);
};

/// The effect of Limits::set().
struct LimitState {
  std::uint64_t limit_bytes = 0;      ///< as requested
  std::uint64_t effective_bytes = 0;  ///< in effect: whole pages, within range and device
  std::uint64_t mapped_bytes = 0;
  std::uint64_t over_bytes = 0;  ///< still to be released; 0: the limit holds
};

/// Requests of the engine that wait for memory, in blocks of this pool.
struct Waiting {
  std::uint64_t requests = 0;
  std::uint64_t first_blocks = 0;      ///< total need of the first of them; 0: unknown
  std::uint64_t first_may_blocks = 0;  ///< its need if its output has the maximum length
  bool operator==(const Waiting&) const = default;
};

/// The least limits with which the first request could run, and the current bound of limit and
/// device.
struct WaitingBytes {
  std::uint64_t first_needs = 0, first_may_need = 0;
  std::uint64_t allowed = 0;  ///< without memory pressure; 0 while asleep
};

struct PoolStats {
  std::uint64_t page_bytes = 0, pages_total = 0, pages_limit = 0;
  std::uint64_t pages_mapped = 0, pages_parked = 0;
  std::uint64_t blocks_total = 0, blocks_used = 0, blocks_cached = 0, blocks_reserved = 0;
  std::uint64_t blocks_pinned = 0;  ///< freed but still pinned
  std::uint64_t blocks_available = 0;
  std::uint64_t allocs = 0, frees = 0, alloc_failures = 0, blocks_evicted = 0;
  std::uint64_t blocks_moved = 0;
  std::uint64_t blocks_clean = 0,
                blocks_under_writeback = 0;  ///< cached with a copy in a tier; under writeback
  std::uint64_t blocks_demoted = 0, blocks_dropped = 0;
  std::uint64_t pages_mapped_ever = 0, pages_unmapped_ever = 0, provision_runs = 0;
};

/// The device is measured again when this many bytes of pages were mapped or unmapped.
inline constexpr std::uint64_t kLargeMoveBytes = std::uint64_t{256} << 20;

/// Pages are mapped and unmapped in batches, so that a waiting thread can use the first early. Each
/// batch is twice the last, from one page (or this size) to the largest.
inline constexpr std::uint64_t kFirstBatchBytes = std::uint64_t{8} << 20;
inline constexpr std::uint64_t kLargestBatchBytes = std::uint64_t{32} << 20;
/// A GPU zeroes fast, and its cost is per call and handle: one call covers a run of pages.
inline constexpr std::uint64_t kLargestGpuBatchBytes = std::uint64_t{512} << 20;
/// A call blocks all other calls to its device, and its time grows with the handles: an H100 took
/// 13 ms for 256.
inline constexpr std::uint64_t kMostGpuBatchHandles = 16;
inline constexpr int kMostRefusals = 10;

/// Granted pages that were refused for lack of memory.
struct Refusals {
  bool is_pending = false;  ///< since memory was last known to be available
  int in_a_row = 0;         ///< since the last successful map, at most kMostRefusals
};

/// Returns the result of `call`, or kOutOfMemory if it runs out of memory for its lists, so that
/// the caller can complete the accounting in both cases.
template <typename F>
Status guarded(F call) {
  try {
    return call();
  } catch (const std::bad_alloc&) {
    return Error{Errc::kOutOfMemory, "out of memory"};
  }
}

/// True for a failure that a retry cannot fix, which the caller must report. Any other failure
/// means "no blocks now", which an engine's scheduler handles.
bool is_final(const Error& error);

/// What the lock guards.
struct State {
  State(const PoolOptions& with, std::unique_ptr<Blocks> blocks, std::shared_ptr<DeviceSet> shared,
        const Geometry& geometry);

  /// The device capacity available to one instance.
  std::uint64_t capacity_bytes() const {
    return device_set ? device_set->capacity_bytes() : options.capacity_bytes;
  }
  Usage usage() const { return usage(accounting.count_available(Accounting::Reach::kLimit)); }
  /// `available`: count_available() within the limit.
  Usage usage(std::uint64_t available) const;
  PoolStats stats() const;
  LimitState limit_state() const;
  WaitingBytes waiting_bytes() const;
  bool has_something_to_decay() const {
    return accounting.blocks().parked_pages() > 0 ||
           (options.movable && accounting.blocks().can_compact());
  }
  bool has_cached_to_age() const {
    return options.cache_idle.count() >= 0 && accounting.blocks().cached_blocks() > 0;
  }
  /// True if the machine's free memory matters: a page besides page 0 is held, which could be
  /// released when memory runs short, or a page was refused, which may be available again.
  bool depends_on_free_memory() const { return accounting.held_pages() > 1 || refusals.is_pending; }

  /// Sets the time with which blocks are stamped when they become cached.
  void set_now();
  /// Records a failure after which the mappings are unknown. Handing out a page that is not mapped
  /// would crash the engine later.
  void fail_if_final(const Status& status);

  const PoolOptions& options;
  const std::shared_ptr<DeviceSet> device_set;
  Counters counters;
  Accounting accounting;
  MemoryWait memory_wait;
  Provisioning provisioning;
  LoadsFirst loads;
  PendingWork work;
  Demotions demotions;
  std::optional<Waiting> waiting;  ///< empty: the engine reports nothing
  Refusals refusals;
  std::uint64_t moved_bytes = 0;  ///< of a GPU's pages, since the device was measured

  AvailabilityEpoch epoch;
  /// The next publication increments the epoch, even if it shows no more blocks than the last.
  bool more_available = false;
  /// The next publication counts its increment for free() and cache(), of which their caller knows.
  bool given_back = false;
};

class PoolState {
 public:
  /// Takes the session as well, before the lock.
  struct InSession {};

  /// The state, to read it. Give it a name: a temporary holds the lock to the end of its statement.
  class Look {
   public:
    explicit Look(const PoolState& pool) : state_(pool.state_), lock_(pool.mutex_) {}
    Look(const Look&) = delete;
    Look& operator=(const Look&) = delete;
    const State* operator->() const { return &state_; }
    const State& operator*() const { return state_; }

   private:
    const State& state_;
    const std::lock_guard<std::mutex> lock_;
  };

  /// The state, to change it. Publishes it before every release of the lock.
  class Change {
   public:
    class Unlocked;

    explicit Change(PoolState& pool) : pool_(pool), lock_(pool.mutex_) {}
    Change(PoolState& pool, InSession) : pool_(pool), session_(pool.session), lock_(pool.mutex_) {}
    Change(const Change&) = delete;
    Change& operator=(const Change&) = delete;
    ~Change() { pool_.publish(); }

    State* operator->() const { return &pool_.state_; }
    State& operator*() const { return pool_.state_; }
    /// For a wait that releases the lock, and for nothing else.
    std::unique_lock<std::mutex>& for_wait() {
      pool_.publish();
      return lock_;
    }

   private:
    PoolState& pool_;
    std::unique_lock<Session> session_;
    std::unique_lock<std::mutex> lock_;
  };

  PoolState(const PoolOptions& with, std::shared_ptr<Backing> memory,
            std::unique_ptr<Blocks> blocks, std::shared_ptr<DeviceSet> shared);

  const PoolOptions options;
  const std::shared_ptr<Backing> backing;
  const std::shared_ptr<DeviceSet> device_set;  ///< null: the device is not shared
  const Geometry geometry;
  /// The size of a page with all copies on all devices.
  std::uint64_t page_bytes() const { return state_.accounting.page_bytes(); }
  /// Pages were mapped or unmapped. Schedules a measurement of other processes' memory on a GPU:
  /// they may have taken the released memory, or be visible only now.
  void note_moved(State& state, std::uint64_t pages) const {
    if (device_set && backing->works_behind()) state.moved_bytes += pages * page_bytes();
  }
  /// Other processes, or a dead one, hold memory that the ledger has granted: measure a GPU now.
  void note_refused(State& state) const;
  /// Pages of the first and of the largest batch, at least one.
  std::uint64_t first_batch_pages() const;
  std::uint64_t largest_batch_pages() const;

  Session session;
  /// Notified when a batch has been mapped or unmapped.
  std::condition_variable settled;

  // These take the lock:

  LimitState limit_state() const { return Look(*this)->limit_state(); }
  PoolStats stats() const { return Look(*this)->stats(); }
  /// Why every alloc fails; empty if none does for good.
  std::optional<Error> failure() const { return Look(*this)->accounting.failure(); }
  bool is_asleep() const { return Look(*this)->accounting.limit.is_asleep(); }

  // Lock-free:

  /// Blocks that alloc could return now, including mapping, eviction, and memory that others would
  /// have to release.
  std::uint64_t available() const;
  /// Blocks that alloc could return without mapping a page.
  std::uint64_t available_mapped() const {
    return available_mapped_.load(std::memory_order_relaxed);
  }
  /// Freed but pinned blocks that an alloc may reuse.
  std::uint64_t reusable() const { return reusable_.load(std::memory_order_relaxed); }
  bool is_over_limit() const { return over_limit_.load(std::memory_order_relaxed); }
  bool has_failed() const { return state_.accounting.has_failed(); }
  bool has_changes() const { return state_.accounting.has_changes(); }
  std::uint32_t epoch() const { return state_.epoch.count(); }
  std::uint32_t given_back_epoch() const {
    return given_back_epoch_.load(std::memory_order_relaxed);
  }
  /// Incremented by every call that allocates or frees.
  std::uint64_t activity() const { return activity_.load(std::memory_order_relaxed); }
  void note_activity() { activity_.fetch_add(1, std::memory_order_relaxed); }

 private:
  void publish();
  void publish_to_ledgers(const Usage& usage);
  void call_maintenance(std::uint64_t over_pages);

  mutable std::mutex mutex_;  // after the session; never held during a call to the backing
  State state_;
  std::uint64_t published_activity_ = 0;  // activity() at the last report to the ledgers
  std::atomic<std::uint64_t> available_limit_{0}, available_mapped_{0}, reusable_{0}, activity_{0};
  std::atomic<std::int64_t> available_held_{0};  // includes pages in transit; -1 for the null block
  std::atomic<std::uint32_t> given_back_epoch_{0};
  std::atomic<bool> over_limit_{false};
};

/// Releases the lock for its lifetime, for a driver call or another wait; with `lets_go` also the
/// session, if no outer call relies on it.
class PoolState::Change::Unlocked {
 public:
  explicit Unlocked(Change& change, bool lets_go = false)
      : change_(change),
        lets_go_(lets_go && change.pool_.session.is_mine() && change.pool_.session.depth() == 1) {
    std::unique_lock<std::mutex>& lock = change_.for_wait();
    epoch_ = change_->epoch.count();
    lock.unlock();
    if (lets_go_) change_.pool_.session.unlock();
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;
  ~Unlocked() {
    if (lets_go_) change_.pool_.session.lock();
    change_.lock_.lock();
  }

  /// The epoch when the lock was released.
  std::uint32_t epoch() const { return epoch_; }

 private:
  Change& change_;
  const bool lets_go_;
  std::uint32_t epoch_ = 0;
};

}  // namespace kvelastic
