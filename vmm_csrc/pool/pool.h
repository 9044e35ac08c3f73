// A pool: the blocks of one layout over one range. The engine allocates and frees block ids; the
// pool maps and unmaps the pages under them. Its parts work on one state (pool_state.h):
//
//   allocator     the engine's calls           \  grow.h: maps pages, requests them from others
//   limits        the operator's calls          > reclaim.h: the order in which memory is released
//   maintenance   the maintenance thread's     /
//   writeback     the tiers' calls
//
// Threads. Any thread may make any call. docs/ARCHITECTURE.md has the lock order. A pool has two
// locks, taken in this order:
//   session     held by a caller that relies on the state it has read, and by every call that takes
//               pages or cached blocks away. A call that waits for a GPU to finish with pages
//               releases it.
//   the state's guards all state of the parts; never held during a call to the backing.
//
// With shared devices, their ledgers grant every page before it is created, and get it back after
// it is destroyed. The maintenance thread serves memory requests of other instances (give_up). It
// requests missing memory from others, first by the alloc that needs it (for reclaim_wait) and then
// by the maintenance thread (pursue).
#pragma once

#include <memory>

#include "base/own_process.h"
#include "pool/allocator.h"
#include "pool/background_work.h"
#include "pool/limits.h"
#include "pool/pool_state.h"
#include "pool/writeback.h"

namespace kvelastic {

class Pool {
 public:
  static Result<std::unique_ptr<Pool>> create(const Geometry& geometry,
                                              std::shared_ptr<Backing> backing,
                                              const PoolOptions& options,
                                              std::shared_ptr<DeviceSet> device_set = nullptr);
  /// Unmaps nothing: the range or the worker's end releases the memory.
  ~Pool() = default;
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  /// The process that may call this pool. In a forked child only the destructor may run: pages
  /// belong to the parent, and a lock may be held by a thread that does not exist there. The
  /// binding refuses such calls.
  const OwnProcess& made_by() const { return made_by_; }

  /// Closes the pool permanently: alloc fails with kPoolFailed, and free, cached and reserved
  /// blocks are released with their pages, including the null block's. Waits for pages that are
  /// being mapped, and for the session. With `discard`, used and pinned blocks are released as
  /// well; otherwise their pages stay until they are freed and unpinned. Returns the number of
  /// pages still held. Blocks. Idempotent. Fails as Backing::unmap.
  Result<std::uint64_t> close(bool discard);

  /// Publishes usage and counters to `control_block` at every change; null stops publishing.
  void publish_to(std::shared_ptr<ControlBlockOwner> control_block);

  /// Fails with kIntegrity, naming the inconsistency.
  Status check_integrity() const;

  PoolState state;

 private:
  Pool(std::shared_ptr<Backing> backing, const PoolOptions& options, std::unique_ptr<Blocks> blocks,
       std::shared_ptr<DeviceSet> device_set)
      : state(options, std::move(backing), std::move(blocks), std::move(device_set)) {}

  const OwnProcess made_by_;
  Reclaimer reclaimer_{state};
  Grower grower_{state, reclaimer_};

 public:
  Allocator allocator{state, grower_, reclaimer_};
  Limits limits{state, reclaimer_};
  BackgroundWork background{state, grower_, reclaimer_};
  Writeback writeback{state, reclaimer_};
};

}  // namespace kvelastic
