// How a pool gives memory back, the cheapest first: over its limit, and for others who ask.
//
//   parked pages are unmapped
//   what is set aside for allocs to come is dropped
//   cached pages are emptied, the cheapest first: moved into holes of others, or evicted
//   then no block of the emptiest pages is handed out, until the engine has freed them (it
//   preempts)
//
// Every call is made in a session and with the pool's lock held. PoolPages lets go of both for a
// while: after each of its calls the figures may be others.
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

  /// Goes down until the limit holds or only blocks in use are left. Fails as unmap of the backing
  /// does.
  Status enforce(Lock& lock);
  /// Gives back what is over the limit and costs nothing: parked pages, and those whose cached
  /// blocks all have copies. Fails as enforce().
  Status give_clean(Lock& lock);
  /// Unmaps `pages` pages for others, none of more worth than `depth`, and keeps `min_pages`, one
  /// at least; answers how many. At Depth::kInUse what cannot be had now squeezes the pool.
  Result<std::uint64_t> give_up(Lock& lock, std::uint64_t pages, Depth depth,
                                std::uint64_t min_pages);
  /// Moves the cached blocks of one page into holes of others; answers how many. 0: there is no
  /// such page, or blocks may not move here.
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
