// Publishes a pool's state after each change: lock-free statistics, its segment, its slot in the
// ledger, and its pending maintenance work.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "base/arrivals.h"
#include "ledger/places.h"
#include "pool/accounting.h"
#include "pool/counters.h"
#include "pool/keeper_calls.h"
#include "pool/pool_options.h"
#include "pool/provisioning.h"
#include "pool/starvation.h"
#include "segment/record.h"

namespace kvelastic {

/// The effect of set_limit().
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
                blocks_leaving = 0;  ///< cached with a copy in a tier; under writeback
  std::uint64_t blocks_demoted = 0, blocks_dropped = 0;
  std::uint64_t pages_mapped_ever = 0, pages_unmapped_ever = 0, provision_runs = 0;
};

/// The device is measured again when this many bytes of pages were mapped or unmapped.
inline constexpr std::uint64_t kLargeMoveBytes = std::uint64_t{256} << 20;

class Figures {
 public:
  Figures(const Accounting& accounting, const Starvation& starvation, Provisioning& provisioning,
          KeeperCalls& calls, Counters& counters, const PoolOptions& options,
          std::shared_ptr<Places> places)
      : accounting_(accounting),
        starvation_(starvation),
        provisioning_(provisioning),
        calls_(calls),
        counters_(counters),
        movable_(options.movable),
        ages_(options.cache_idle.count() >= 0),
        capacity_bytes_(options.capacity_bytes),
        places_(std::move(places)) {}

  // The pool's lock is held:

  /// Call after every change of the accounting, before the lock is released.
  void update();
  Usage usage() const { return usage(accounting_.count_available(Accounting::Reach::kLimit)); }
  PoolStats stats() const;
  LimitState limit_state() const;
  /// The device capacity available to one instance.
  std::uint64_t capacity_bytes() const {
    return places_ ? places_->capacity_bytes() : capacity_bytes_;
  }
  bool has_something_to_decay() const {
    const Blocks& blocks = accounting_.blocks();
    return blocks.parked_pages() > 0 || (movable_ && blocks.can_compact());
  }
  bool has_cached_to_age() const { return ages_ && accounting_.blocks().cached_blocks() > 0; }
  /// True if a page besides page 0 is held, which could be released when memory runs short.
  bool has_page_to_watch() const { return accounting_.held_pages() > 1; }
  /// Sets the engine's report of waiting requests. False: unchanged.
  bool set_waiting(const Waiting& waiting) { return std::exchange(waiting_, waiting) != waiting; }
  WaitingBytes waiting_bytes() const;
  /// Counts pages mapped or unmapped on a GPU.
  void note_moved(std::uint64_t pages) { moved_bytes_ += pages * accounting_.page_bytes(); }
  /// A GPU refused a granted page: measure the device as after a large move.
  void note_refused() { moved_bytes_ = kLargeMoveBytes; }
  /// True once after a large move: the device must be measured.
  bool take_large_move();

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
  /// Incremented by every call that allocates or frees.
  std::uint64_t activity() const { return activity_.load(std::memory_order_relaxed); }
  void note_activity() { activity_.fetch_add(1, std::memory_order_relaxed); }

  Arrivals arrivals;

 private:
  Usage usage(std::uint64_t available) const;
  void tell_ledgers(const Usage& usage);

  const Accounting& accounting_;
  const Starvation& starvation_;
  Provisioning& provisioning_;
  KeeperCalls& calls_;
  Counters& counters_;
  const bool movable_;
  const bool ages_;                     // idle cached blocks are evicted
  const std::uint64_t capacity_bytes_;  // used without a ledger
  const std::shared_ptr<Places> places_;
  std::uint64_t told_activity_ = 0;  // activity() at the last report to the ledger
  std::uint64_t moved_bytes_ = 0;
  std::optional<Waiting> waiting_;  // empty: the engine reports nothing
  std::atomic<std::uint64_t> available_limit_{0}, available_mapped_{0}, reusable_{0}, activity_{0};
  std::atomic<std::int64_t> available_held_{0};  // includes pages in transit; -1 for the null block
  std::atomic<bool> over_limit_{false};
};

}  // namespace kvelastic
