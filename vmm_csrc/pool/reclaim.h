// How a pool releases memory, cheapest first: to meet its limit, and on request of other instances.
//
// clang-format off
//   1. unmap parked pages
//   2. drop reserved blocks
//   3. empty cached pages, cheapest first: move their blocks into holes of other pages, or evict them
//   4. stop allocating blocks of the emptiest pages until the engine has freed them (it preempts)
// clang-format on
//
// The caller is in a session. The calls release the pool's lock while they unmap or copy, so the
// state may have changed when they return. Pages being unmapped are held, but no longer mapped.
//
// On a GPU, pages are unmapped once the kernels queued before are done with them. A call that waits
// for this also releases the session if it is the only holder, so that other threads can map pages.
// The pages have been chosen by then, so a session that begins in the meantime loses nothing.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "ledger/reclaim.h"
#include "pool/pool_state.h"

namespace kvelastic {

class Reclaimer {
 public:
  using Change = PoolState::Change;

  explicit Reclaimer(PoolState& pool) : pool_(pool) {}

  /// Releases pages until the limit holds or only blocks in use are left. Fails as Backing::unmap.
  Status enforce(Change& change);
  /// Unmaps up to `pages` pages for other instances, at most to `depth`, keeping `min_pages` and at
  /// least one. Returns how many. At Depth::kInUse a shortfall puts the pool under memory pressure.
  Result<std::uint64_t> give_up(Change& change, std::uint64_t pages, Depth depth,
                                std::uint64_t min_pages);
  /// Moves the cached blocks of one page into holes of others and returns how many. 0: no such
  /// page, or the pool is not movable.
  Result<std::uint64_t> compact(Change& change);
  /// Unmaps up to `pages` parked pages and returns how many. All or none on the host. On a GPU they
  /// wait together and are unmapped in batches, so that others get the first early. After a failure
  /// the rest stays parked; it is returned only if no page was unmapped.
  Result<std::uint64_t> unmap_parked(Change& change, std::uint64_t pages);

  /// Evicts cached blocks beyond max_cached_blocks. Does nothing in another thread's session; the
  /// next cache() makes up for it.
  void evict_over_bound(State& state);

  // These take the lock themselves. Without a thread that copies blocks they do nothing:

  /// Waits until the pages over the limit can be released without losing blocks that have no copy,
  /// and releases clean pages in the meantime, until `interrupted` returns true.
  void write_back_for_limit(const std::function<bool()>& interrupted);
  /// Waits likewise, for a short time, before `pages` pages are released for other instances.
  void write_back_for_others(std::uint64_t pages);

 private:
  Status release_in_order(Change& change);
  Status release_clean(Change& change);
  bool empty_a_page(Change& change);
  void drain_before_moves(Change& change);
  Result<std::uint64_t> move_a_page(Change& change);
  Status unmap_null_page(Change& change);
  enum class InSession : bool { kStay, kMayLetGo };
  Result<std::uint64_t> unmap(Change& change, const std::vector<PageIndex>& pages,
                              InSession session);
  Status unmap_now(std::span<const PageIndex> batch);
  void end_unmap(State& state, std::span<const PageIndex> batch, const Status& unmapped);

  PoolState& pool_;
};

}  // namespace kvelastic
