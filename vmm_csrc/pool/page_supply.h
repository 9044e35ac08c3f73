// How an alloc that finds too few blocks gets pages: it maps them, waits for those that another
// thread has on the way, or asks the other instances of its devices. What is missing after that the
// keeper pursues. Every call is made with the pool's lock held; those that take `lock` let go of
// it.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

#include "base/session.h"
#include "ledger/places.h"
#include "pool/accounting.h"
#include "pool/figures.h"
#include "pool/keeper_calls.h"
#include "pool/pool_pages.h"
#include "pool/starvation.h"

namespace kvelastic {

class PageSupply {
 public:
  using Lock = PoolPages::Lock;

  /// How long a call may wait for others, and whether the session is its own to let go meanwhile.
  struct Wait {
    Starvation::Time until;
    bool holds_session;
    bool in_session = false;  ///< of the caller's, which is kept
  };

  PageSupply(Accounting& accounting, PoolPages& pages, Figures& figures, Starvation& starvation,
             KeeperCalls& calls, Session& session, std::chrono::nanoseconds reclaim_wait,
             std::shared_ptr<Places> places)
      : accounting_(accounting),
        pages_(pages),
        figures_(figures),
        starvation_(starvation),
        calls_(calls),
        session_(session),
        reclaim_wait_(reclaim_wait),
        places_(std::move(places)) {}

  /// `own_entries` is how often the call itself has entered the session. In a session of the
  /// caller's the maintenance thread serves nobody, so a call waits only where the engine would
  /// preempt otherwise (`falls_short`): for memory that is coming, until others ask this pool.
  Wait may_wait(std::uint32_t own_entries, bool falls_short = false) const;
  /// Whether get() would have anything to do that takes time: to map, to wait, or to ask others.
  /// False: what is mapped is all there is for now.
  bool may_come(std::uint32_t own_entries, bool falls_short = false) const;
  /// Gets pages for `blocks` more blocks, or some of them. False: none can be had now.
  Result<bool> get(Lock& lock, std::uint64_t blocks, const Wait& wait);
  /// Gets these very pages, or room for them; they are parked then. False: not to be had now. Pre:
  /// they are unmapped.
  Result<bool> get_run(Lock& lock, std::vector<PageIndex> run, const Wait& wait);
  /// Gets what is missing, and asks for the rest. False: nothing is missing any more.
  bool pursue(Lock& lock);

 private:
  bool are_coming() const;
  bool wait_for_grant(Lock& lock, std::uint64_t pages, std::uint64_t enough, const Wait& wait);
  bool is_worth_a_session() const;
  void note_satisfied();

  Accounting& accounting_;
  PoolPages& pages_;
  Figures& figures_;
  Starvation& starvation_;
  KeeperCalls& calls_;
  Session& session_;
  const std::chrono::nanoseconds reclaim_wait_;
  const std::shared_ptr<Places> places_;  // null: nobody shares the device
};

}  // namespace kvelastic
