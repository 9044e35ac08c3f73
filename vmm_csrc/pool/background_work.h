// What a pool does outside of the engine's calls, called by the maintenance thread: memory requests
// of other instances, pages ahead of demand, unneeded pages, and idle cached blocks.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>

#include "pool/grow.h"
#include "pool/pool_state.h"
#include "pool/reclaim.h"

namespace kvelastic {

class BackgroundWork {
 public:
  BackgroundWork(PoolState& pool, Grower& grower, Reclaimer& reclaimer)
      : pool_(pool), grower_(grower), reclaimer_(reclaimer) {}

  /// Sets the function that wakes the maintenance thread when work is due. It is called from the
  /// thread that noticed the work, with the pool locked, so it must neither block nor call back.
  /// Null: no maintenance thread.
  void on_work(std::function<void()> wake);

  // --- memory of other instances ---------------------------------------------------------------

  /// Releases memory for other instances: unmaps pages down to `depth`, but keeps `min_pages` and
  /// at least one. Returns how many. At Depth::kInUse a shortfall puts the pool under memory
  /// pressure: its limit is lowered until the engine has freed the blocks or the requests stop for
  /// Pressure::kExpiry. Waits for the session; blocks.
  Result<std::uint64_t> give_up(std::uint64_t pages, Depth depth, std::uint64_t min_pages);
  /// Gets pages that allocs lacked recently, as parked pages, and requests the rest. False: no page
  /// is missing. True: call again soon, and when a ledger's bell rings. Blocks.
  bool pursue();
  /// Records other processes' GPU memory in the ledgers. Waits for drivers. Pre: the pool has a
  /// device set.
  Sight see_devices();
  /// True once after a large move of GPU memory: the device must be measured.
  bool take_large_move();
  /// True if a page could be released when memory runs short. Until it has returned false, the pool
  /// does not wake the maintenance thread for such checks again.
  bool arm_memory_watch();
  /// Memory for a page is available again: wakes waiting threads if a page was refused before.
  void note_memory();

  // --- ahead of demand, and when idle ----------------------------------------------------------

  /// Maps parked pages ahead of demand, if allocs have required that since the last call, and
  /// returns how many. Postponed while blocks are loaded. Blocks.
  Result<std::uint64_t> provision();
  /// True if provision() was postponed: call it again soon.
  bool is_provision_due() const { return PoolState::Look(pool_)->work.is_provision_pending(); }
  /// Unmaps at most `most` parked pages and returns how many. Cancels a pending provision(). Waits
  /// for the session; blocks.
  Result<std::uint64_t> trim(std::uint64_t most = ~std::uint64_t{0});
  /// Moves the cached blocks of the page with the fewest into holes of other pages, if there are
  /// enough, and returns how many moved. Loses nothing. For movable pools only. Waits for the
  /// session; blocks. Fails as Backing::copy.
  Result<std::uint64_t> compact();
  /// Evicts cached blocks unused for PoolOptions::cache_idle and returns when to call it again.
  /// Empty: when the pool requests it (DueWork::cache_idle). Waits for the session if there are
  /// blocks to evict.
  std::optional<std::chrono::milliseconds> evict_idle();
  /// The use of parked pages since the last call, for the decay of unneeded ones.
  ParkedUse take_parked_use();
  /// True while pages are parked. Until it has returned false, the pool does not wake the
  /// maintenance thread for decay again.
  bool arm_decay();

 private:
  using Change = PoolState::Change;

  std::optional<std::chrono::milliseconds> until_idle_eviction();

  PoolState& pool_;
  Grower& grower_;
  Reclaimer& reclaimer_;
};

}  // namespace kvelastic
