// Options of a pool at creation.
#pragma once

#include <chrono>
#include <cstdint>

namespace kvelastic {

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

}  // namespace kvelastic
