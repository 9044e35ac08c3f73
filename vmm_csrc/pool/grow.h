// How a pool gets pages: it maps them, waits for pages that another thread is mapping, or requests
// memory from other instances. The maintenance thread pursues the rest. A page is created after the
// ledgers of the shared devices have granted it.
//
// The calls release the pool's lock while they map or wait, so the state may have changed when they
// return. Pages being mapped are held, but not yet mapped.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <vector>

#include "pool/pool_state.h"
#include "pool/reclaim.h"

namespace kvelastic {

class Grower {
 public:
  using Change = PoolState::Change;

  /// How long a call may wait for others, and whether it may release the session while waiting.
  struct Wait {
    MemoryWait::Time until;
    bool holds_session;
    bool in_session = false;  ///< in the caller's session, which is kept
  };

  Grower(PoolState& pool, Reclaimer& reclaimer) : pool_(pool), reclaimer_(reclaimer) {}

  /// `own_entries` is how many times the call itself entered the session. While the caller is in a
  /// session, the maintenance thread serves no requests. So a call waits then only if the engine
  /// would preempt otherwise (`falls_short`), for memory that is coming, until others request
  /// memory of this pool.
  Wait may_wait(const State& state, std::uint32_t own_entries, bool falls_short = false) const;
  /// True if get() could take time: to map, to wait, or to request memory. False: only mapped pages
  /// are available for now.
  bool may_come(const State& state, std::uint32_t own_entries, bool falls_short = false) const;
  /// Gets pages for up to `blocks` more blocks. False: none are available now.
  Result<bool> get(Change& change, std::uint64_t blocks, const Wait& wait);
  /// Gets exactly these pages, or releases memory for them; they are parked then. False: not
  /// available now. Pre: they are unmapped.
  Result<bool> get_run(Change& change, std::vector<PageIndex> run, const Wait& wait);
  /// Gets missing pages and requests the rest. False: all have been found.
  bool pursue(Change& change);
  /// Maps up to `pages` pages, as many as the ledgers grant and the limit allows, and returns how
  /// many. Works in batches, so that a thread that needs a few pages need not wait for all: zeroing
  /// a GiB takes a tenth of a second. A failure after the first batch keeps the mapped pages and
  /// recurs at the next call. `interrupted` is called before each further batch, with the lock
  /// held, and stops the call if true.
  Result<std::uint64_t> map(Change& change, std::uint64_t pages,
                            const std::function<bool()>& interrupted = {});

 private:
  Result<std::uint64_t> map_batch(Change& change, std::uint64_t pages);
  Status map_granted(Change& change, const std::vector<PageIndex>& batch);
  bool wait_for_grant(Change& change, std::uint64_t pages, std::uint64_t enough, const Wait& wait);
  bool is_worth_a_session() const;
  void note_satisfied(State& state);

  PoolState& pool_;
  Reclaimer& reclaimer_;
};

}  // namespace kvelastic
