// What a pool is told when it is made.
#pragma once

#include <chrono>
#include <cstdint>

namespace kvelastic {

struct PoolOptions {
  std::uint64_t max_blocks = 0;   ///< ids that may be in use at once, the null block counted in
  std::uint64_t limit_bytes = 0;  ///< at start; at least one page is always held (null block)
  /// Of the device, where no ledger says it; no limit goes beyond it.
  std::uint64_t capacity_bytes = 0;
  std::uint64_t min_reserved_pages = 5;   ///< kept parked ahead of demand while there is any
  std::uint64_t max_reserved_pages = 10;  ///< never more than these are created ahead of demand
  std::int64_t max_cached_blocks = -1;    ///< -1: no bound
  /// The maintenance thread evicts cached blocks that nothing has used for so long; negative:
  /// never.
  std::chrono::milliseconds cache_idle{-1};
  bool preallocate = true;  ///< false: no page is created before an alloc needs it
  /// Cached blocks may move to other ids to empty pages; the engine must take_changes() then.
  bool movable = false;
  /// How long an alloc waits for memory that others have to give up; in a session only an ensure()
  /// does, where the engine would preempt otherwise.
  /// After it has waited in vain the next ones do not for kFruitlessWaits times as long.
  std::chrono::nanoseconds reclaim_wait = std::chrono::milliseconds(50);
};

}  // namespace kvelastic
