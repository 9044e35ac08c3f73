// How an alloc with too few blocks gets pages: it maps them, waits for pages that another thread is
// mapping, or requests memory from other instances. The maintenance thread pursues the rest. The
// caller holds the pool's lock; calls with a `lock` parameter release it while they wait.
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

  /// How long a call may wait for others, and whether it may release the session while waiting.
  struct Wait {
    Starvation::Time until;
    bool holds_session;
    bool in_session = false;  ///< in the caller's session, which is kept
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

  /// `own_entries` is how many times the call itself entered the session. While the caller is in a
  /// session, the maintenance thread serves no requests. So a call waits then only if the engine
  /// would preempt otherwise (`falls_short`), for memory that is coming, until others request
  /// memory of this pool.
  Wait may_wait(std::uint32_t own_entries, bool falls_short = false) const;
  /// True if get() could take time: to map, to wait, or to request memory. False: only mapped pages
  /// are available for now.
  bool may_come(std::uint32_t own_entries, bool falls_short = false) const;
  /// Gets pages for up to `blocks` more blocks. False: none are available now.
  Result<bool> get(Lock& lock, std::uint64_t blocks, const Wait& wait);
  /// Gets exactly these pages, or releases memory for them; they are parked then. False: not
  /// available now. Pre: they are unmapped.
  Result<bool> get_run(Lock& lock, std::vector<PageIndex> run, const Wait& wait);
  /// Gets missing pages and requests the rest. False: all have been found.
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
  const std::shared_ptr<Places> places_;  // null: the device is not shared
};

}  // namespace kvelastic
