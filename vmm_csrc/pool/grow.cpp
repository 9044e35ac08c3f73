#include "pool/grow.h"

#include <algorithm>

namespace kvelastic {
namespace {

using Clock = std::chrono::steady_clock;

/// How often a call that waits in a session checks for requests to this pool, and for pages that
/// the maintenance thread has mapped. No other ledger's bell reports these.
constexpr std::chrono::milliseconds kLookInSession{2};

/// True if another thread is mapping pages that this one may use.
bool are_coming(const Accounting& accounting) {
  return accounting.moving_pages() > 0 && accounting.excess_pages() == 0;
}

}  // namespace

Grower::Wait Grower::may_wait(const State& state, std::uint32_t own_entries,
                              bool falls_short) const {
  const Clock::time_point now = Clock::now();
  const bool in_session = pool_.session.is_mine() && pool_.session.depth() > own_entries;
  if (!pool_.device_set || (in_session && !falls_short) || !state.memory_wait.may_wait(now)) {
    return {now, false};
  }
  return {now + pool_.options.reclaim_wait, own_entries > 0 && !in_session, in_session};
}

bool Grower::may_come(const State& state, std::uint32_t own_entries, bool falls_short) const {
  if (state.accounting.mappable_pages() == 0) return are_coming(state.accounting);
  if (state.memory_wait.pages() == 0) return true;
  const Wait wait = may_wait(state, own_entries, falls_short);
  const Clock::time_point now = Clock::now();
  // Others were requested a moment ago without result; the maintenance thread continues.
  return state.memory_wait.may_request(now) || wait.until > now || pool_.device_set->room() > 0;
}

Result<bool> Grower::get(Change& change, std::uint64_t blocks, const Wait& wait) {
  const Accounting& accounting = change->accounting;
  if (accounting.mappable_pages() > 0) {
    const std::uint64_t pages = std::min(accounting.pages_for(blocks), accounting.mappable_pages());
    Result<std::uint64_t> mapped = map(change, pages);
    if (!mapped) return mapped.error();
    if (*mapped == pages) note_satisfied(*change);
    return *mapped > 0 || wait_for_grant(change, pages, 1, wait);
  }
  if (!are_coming(accounting)) return false;
  pool_.settled.wait(change.for_wait());
  return true;
}

Result<bool> Grower::get_run(Change& change, std::vector<PageIndex> run, const Wait& wait) {
  const std::uint64_t pages = run.size();
  const std::uint64_t mappable = change->accounting.mappable_pages();
  if (mappable < pages) {
    // Parked pages lie outside a run of this length, and hold the memory that it needs.
    Result<std::uint64_t> unmapped = reclaimer_.unmap_parked(change, pages - mappable);
    if (!unmapped) return unmapped.error();
    return *unmapped > 0;
  }
  const std::uint64_t granted = pool_.device_set ? pool_.device_set->grant(pages) : pages;
  if (granted < pages) {
    pool_.device_set->give_back(granted);
    return wait_for_grant(change, pages, pages, wait);
  }
  change->accounting.blocks().take_unmapped(run);
  if (Status mapped = map_granted(change, run); !mapped) return mapped.error();
  note_satisfied(*change);
  return true;
}

// --- mapping -----------------------------------------------------------------------------------

Result<std::uint64_t> Grower::map(Change& change, std::uint64_t pages,
                                  const std::function<bool()>& interrupted) {
  const Accounting& accounting = change->accounting;
  const std::uint64_t largest = pool_.largest_batch_pages();
  std::uint64_t mapped = 0;
  for (std::uint64_t batch = pool_.first_batch_pages();
       mapped < pages && accounting.mappable_pages() > 0; batch = std::min(2 * batch, largest)) {
    const std::uint64_t next = std::min({pages - mapped, accounting.mappable_pages(), batch});
    Result<std::uint64_t> got = map_batch(change, next);
    if (!got) {
      if (mapped == 0 || accounting.failure()) return got.error();
      break;
    }
    mapped += *got;
    if (*got < next || (interrupted && interrupted())) break;
  }
  return mapped;
}

/// All of the granted pages, or none.
Result<std::uint64_t> Grower::map_batch(Change& change, std::uint64_t pages) {
  std::vector<PageIndex> batch;
  batch.reserve(pages);  // allocate before anything changes
  if (pool_.device_set) pages = pool_.device_set->grant(pages);
  if (pages == 0) return std::uint64_t{0};
  for (std::uint64_t i = 0; i < pages; ++i) {
    const std::optional<PageIndex> page = change->accounting.blocks().take_unmapped();
    if (!page) break;
    batch.push_back(*page);
  }
  if (pool_.device_set) pool_.device_set->give_back(pages - batch.size());
  if (batch.empty()) {
    return Error{Errc::kPoolExhausted, "every page of the range is mapped or on its way"};
  }
  if (Status mapped = map_granted(change, batch); !mapped) return mapped.error();
  return static_cast<std::uint64_t>(batch.size());
}

/// Pre: `batch` is granted and in transit.
Status Grower::map_granted(Change& change, const std::vector<PageIndex>& batch) {
  Accounting& accounting = change->accounting;
  accounting.hold(batch.size());
  Status mapped = ok();
  {
    const Change::Unlocked unlocked(change);
    mapped = guarded([&] { return pool_.backing->map(batch); });
  }
  change->fail_if_final(mapped);
  for (const PageIndex page : batch) {
    mapped ? accounting.blocks().add_page(page) : accounting.blocks().put_back(page);
  }
  if (mapped) {
    // Pages are created when mapped and destroyed when unmapped; none is kept in between.
    change->counters.add(Counter::kPagesCreated, batch.size());
    change->counters.add(Counter::kPagesMapped, batch.size());
    pool_.note_moved(*change, batch.size());
    change->refusals.in_a_row = 0;
    if (pool_.device_set) pool_.device_set->arrived(batch.size());
  } else {
    accounting.let_go(batch.size());
    if (mapped.error().code == Errc::kOutOfMemory) pool_.note_refused(*change);
    // After a final failure the mappings are unknown: the grant stays, in transit.
    if (pool_.device_set && !accounting.failure()) pool_.device_set->give_back(batch.size());
  }
  pool_.settled.notify_all();
  return mapped;
}

// --- memory of other instances -----------------------------------------------------------------

/// Releases the pool's lock and the session, and waits until all devices have granted `enough` of
/// the pages that others release.
bool Grower::wait_for_grant(Change& change, std::uint64_t pages, std::uint64_t enough,
                            const Wait& wait) {
  if (!pool_.device_set) return false;
  const std::shared_ptr<DeviceSet>& device_set = pool_.device_set;
  bool there = false, waited = false;
  {
    const Change::Unlocked unlocked(change);
    if (wait.holds_session) pool_.session.unlock();
    for (;;) {
      const DeviceSet::Bells seen = device_set->bells();
      const bool hope =
          device_set->request_memory(pages) && (!wait.in_session || is_worth_a_session());
      there = device_set->room() >= enough || pool_.epoch() != unlocked.epoch();
      const Clock::time_point now = Clock::now();
      if (there || !hope || now >= wait.until) break;
      const std::chrono::nanoseconds look =
          wait.in_session ? std::chrono::nanoseconds(kLookInSession)
                          : std::chrono::nanoseconds(device_set->rules().patience_ns);
      device_set->wait(seen, std::min<std::chrono::nanoseconds>(wait.until - now, look));
      waited = true;
    }
    if (wait.holds_session) pool_.session.lock();
  }
  if (there) return true;
  const Clock::time_point now = Clock::now();
  if (waited) change->memory_wait.waited_in_vain(pool_.options.reclaim_wait, now);
  change->memory_wait.begin(pages, now);
  return false;
}

/// Others may have been requested to release all of it at once, so they are expected to for as long
/// as a call waits.
bool Grower::is_worth_a_session() const {
  const auto patience = std::max(pool_.options.reclaim_wait,
                                 std::chrono::nanoseconds(pool_.device_set->rules().patience_ns));
  return pool_.device_set->is_memory_coming(patience) &&
         pool_.device_set->open_reclaim().pages == 0;
}

/// All requested memory is available, or no caller wants it any longer.
void Grower::note_satisfied(State& state) {
  state.memory_wait.end();
  state.work.end_pursuit();  // until then it polls
  if (pool_.device_set) pool_.device_set->end_memory_request();
}

bool Grower::pursue(Change& change) {
  MemoryWait& memory_wait = change->memory_wait;
  if (memory_wait.pages() == 0 || !pool_.device_set) {
    change->work.end_pursuit();
    return false;
  }
  if (change->accounting.is_null_block_moving()) return true;
  const std::chrono::nanoseconds expiry(pool_.device_set->rules().request_expiry_ns);
  const std::uint64_t pages = std::min(memory_wait.pages(), change->accounting.mappable_pages());
  const Clock::time_point now = Clock::now();
  if (change->epoch.is_awaited()) memory_wait.renew(now);
  if (pages == 0 || !memory_wait.is_current(expiry, now)) {
    note_satisfied(*change);
    return false;
  }
  Result<std::uint64_t> mapped = map(change, pages);
  if (mapped) memory_wait.got(*mapped);
  if (!mapped || memory_wait.pages() == 0) {
    note_satisfied(*change);
    return false;
  }
  const std::uint64_t missing = memory_wait.pages();
  const Change::Unlocked unlocked(change);
  (void)pool_.device_set->request_memory(missing);
  return true;
}

}  // namespace kvelastic
