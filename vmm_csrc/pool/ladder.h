// How a pool releases memory, cheapest first: to meet its limit, and on request of other instances.
//
// clang-format off
//   1. unmap parked pages
//   2. drop reserved blocks
//   3. empty cached pages, cheapest first: move their blocks into holes of other pages, or evict them
//   4. stop allocating blocks of the emptiest pages until the engine has freed them (it preempts)
// clang-format on
//
// The caller is in a session and holds the pool's lock. PoolPages releases both while it works, so
// the state may have changed after each of its calls.
#pragma once

#include <cstdint>

#include "ledger/reclaim.h"
#include "pool/accounting.h"
#include "pool/figures.h"
#include "pool/keeper_calls.h"
#include "pool/pool_pages.h"

namespace kvelastic {

class Ladder {
 public:
  using Lock = PoolPages::Lock;

  Ladder(Accounting& accounting, PoolPages& pages, Figures& figures, KeeperCalls& calls,
         bool movable)
      : accounting_(accounting),
        pages_(pages),
        figures_(figures),
        calls_(calls),
        movable_(movable) {}

  /// Releases pages until the limit holds or only blocks in use are left. Fails as Backing::unmap.
  Status enforce(Lock& lock);
  /// Releases pages over the limit whose release loses nothing: parked pages, and pages with clean
  /// blocks only. Fails as enforce().
  Status give_clean(Lock& lock);
  /// Unmaps up to `pages` pages for other instances, at most to `depth`, keeping `min_pages` and at
  /// least one. Returns how many. At Depth::kInUse a shortfall puts the pool under memory pressure.
  Result<std::uint64_t> give_up(Lock& lock, std::uint64_t pages, Depth depth,
                                std::uint64_t min_pages);
  /// Moves the cached blocks of one page into holes of others and returns how many. 0: no such
  /// page, or the pool is not movable.
  Result<std::uint64_t> compact(Lock& lock);

 private:
  Status go_down(Lock& lock);
  bool empty_a_page(Lock& lock);
  void before_moves(Lock& lock);
  Result<std::uint64_t> move_a_page(Lock& lock);

  Accounting& accounting_;
  PoolPages& pages_;
  Figures& figures_;
  KeeperCalls& calls_;
  const bool movable_;
};

}  // namespace kvelastic
