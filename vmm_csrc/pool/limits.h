// The operator's calls on a pool: its limit, and sleep.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "pool/pool_state.h"
#include "pool/reclaim.h"

namespace kvelastic {

class Limits {
 public:
  Limits(PoolState& pool, Reclaimer& reclaimer) : pool_(pool), reclaimer_(reclaimer) {
    const PoolState::Change change(pool_);
    report_limit(*change);
  }

  /// Sets the limit without releasing memory yet. Waits for the session.
  LimitState set(std::uint64_t limit_bytes);
  /// Releases memory until the limit holds or only used blocks are left. Waits for the session;
  /// blocks. Fails as Backing::unmap. With tiers it waits for copies first and releases clean pages
  /// in the meantime, until `interrupted` (called every few milliseconds) returns true.
  Result<LimitState> enforce(const std::function<bool()>& interrupted = {});
  /// enforce() that also waits for pages being unmapped by others, so that the held memory it
  /// returns is in use. For a caller that reports the pool's memory as free in sleep.
  Result<LimitState> settle();
  /// Adopts a changed device capacity: limits beyond it are reduced to it. Releases nothing itself.
  /// True: it has changed; only then the session was waited for.
  bool see_capacity();
  /// Ends memory pressure that is no longer requested. True: the pool is still under pressure.
  bool expire_pressure();

  /// Asleep, a pool allocates no block and holds no memory: enforce() evicts every cached block and
  /// unmaps every page, including the null block's, once no block is in use. Awake again, the next
  /// alloc or ensure maps pages. Releases nothing itself; waits for the session. Its ledger members
  /// fall asleep with it. They must be awake before the pool can wake (see wake()).
  void set_asleep(bool asleep);
  /// Allows allocs again once all ledgers have granted the guarantee and the reserve, which other
  /// instances are requested to release. Fails as DeviceSet::claim_wake and wait_for_claim, and
  /// with kReserve if the pool is put to sleep in between; it then stays asleep. Blocks, at most
  /// for `timeout`. No effect if the pool is awake.
  Status wake(std::chrono::nanoseconds timeout);

  /// Why the pool is over its limit.
  struct Excess {
    std::uint64_t pages = 0;  ///< to be emptied until the limit holds
    /// Each candidate page with its blocks in use, pinned ones included.
    std::vector<std::pair<PageIndex, std::uint32_t>> used{};
  };
  Excess excess() const;

 private:
  Result<LimitState> enforce_now();
  void report_limit(const State& state);

  PoolState& pool_;
  Reclaimer& reclaimer_;
};

}  // namespace kvelastic
