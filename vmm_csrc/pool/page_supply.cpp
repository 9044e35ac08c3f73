#include "pool/page_supply.h"

#include <algorithm>

namespace kvelastic {
namespace {

using Clock = std::chrono::steady_clock;

/// How often a call that waits in a session checks for requests to this pool, and for pages that
/// the maintenance thread has mapped. No other ledger's bell reports these.
constexpr std::chrono::milliseconds kLookInSession{2};

}  // namespace

PageSupply::Wait PageSupply::may_wait(std::uint32_t own_entries, bool falls_short) const {
  const Clock::time_point now = Clock::now();
  const bool in_session = session_.is_mine() && session_.depth() > own_entries;
  if (!places_ || (in_session && !falls_short) || !starvation_.may_wait(now)) return {now, false};
  return {now + reclaim_wait_, own_entries > 0 && !in_session, in_session};
}

bool PageSupply::may_come(std::uint32_t own_entries, bool falls_short) const {
  if (accounting_.mappable_pages() == 0) return are_coming();
  if (starvation_.pages() == 0) return true;
  const Wait wait = may_wait(own_entries, falls_short);
  const Clock::time_point now = Clock::now();
  // Others were requested a moment ago without result; the maintenance thread continues.
  return starvation_.may_ask(now) || wait.until > now || places_->room() > 0;
}

/// True if another thread is mapping pages that this one may use.
bool PageSupply::are_coming() const {
  return accounting_.moving_pages() > 0 && accounting_.excess_pages() == 0;
}

Result<bool> PageSupply::get(Lock& lock, std::uint64_t blocks, const Wait& wait) {
  if (accounting_.mappable_pages() > 0) {
    const std::uint64_t pages =
        std::min(accounting_.pages_for(blocks), accounting_.mappable_pages());
    Result<std::uint64_t> grown = pages_.grow(lock, pages);
    if (!grown) return grown.error();
    if (*grown == pages) note_satisfied();
    return *grown > 0 || wait_for_grant(lock, pages, 1, wait);
  }
  if (!are_coming()) return false;
  pages_.wait_for_a_batch(lock);
  return true;
}

Result<bool> PageSupply::get_run(Lock& lock, std::vector<PageIndex> run, const Wait& wait) {
  const std::uint64_t pages = run.size();
  if (accounting_.mappable_pages() < pages) {
    // Parked pages lie outside a run of this length, and hold the memory that it needs.
    Result<std::uint64_t> given = pages_.shrink(lock, pages - accounting_.mappable_pages());
    if (!given) return given.error();
    return *given > 0;
  }
  Result<bool> grown = pages_.grow_run(lock, std::move(run));
  if (!grown) return grown.error();
  if (!*grown) return wait_for_grant(lock, pages, pages, wait);
  note_satisfied();
  return true;
}

/// Releases the pool's lock and the session, and waits until all devices have granted `enough` of
/// the pages that others release.
bool PageSupply::wait_for_grant(Lock& lock, std::uint64_t pages, std::uint64_t enough,
                                const Wait& wait) {
  if (!places_) return false;
  const std::uint32_t arrivals = figures_.arrivals.count();
  lock.unlock();
  if (wait.holds_session) session_.unlock();
  bool there = false, waited = false;
  for (;;) {
    const Places::Bells seen = places_->bells();
    const bool hope = places_->ask(pages) && (!wait.in_session || is_worth_a_session());
    there = places_->room() >= enough || figures_.arrivals.count() != arrivals;
    const Clock::time_point now = Clock::now();
    if (there || !hope || now >= wait.until) break;
    const std::chrono::nanoseconds look =
        wait.in_session ? std::chrono::nanoseconds(kLookInSession)
                        : std::chrono::nanoseconds(places_->rules().patience_ns);
    places_->wait(seen, std::min<std::chrono::nanoseconds>(wait.until - now, look));
    waited = true;
  }
  if (wait.holds_session) session_.lock();
  lock.lock();
  if (there) return true;
  const Clock::time_point now = Clock::now();
  if (waited) starvation_.waited_in_vain(reclaim_wait_, now);
  starvation_.begin(pages, now);
  figures_.update();
  return false;
}

/// Others may have been requested to release all of it at once, so they are expected to for as long
/// as a call waits.
bool PageSupply::is_worth_a_session() const {
  const auto patience =
      std::max(reclaim_wait_, std::chrono::nanoseconds(places_->rules().patience_ns));
  return places_->is_memory_coming(patience) && places_->wanted().pages == 0;
}

/// All requested memory is available, or no caller wants it any longer.
void PageSupply::note_satisfied() {
  starvation_.end();
  calls_.end_pursuit();  // until then it polls
  if (places_) places_->stop_asking();
}

bool PageSupply::pursue(Lock& lock) {
  if (starvation_.pages() == 0 || !places_) {
    calls_.end_pursuit();
    return false;
  }
  const std::chrono::nanoseconds lease(places_->rules().ask_lease_ns);
  const std::uint64_t wanted = std::min(starvation_.pages(), accounting_.mappable_pages());
  const Clock::time_point now = Clock::now();
  if (figures_.arrivals.is_awaited()) starvation_.want(now);
  if (wanted == 0 || !starvation_.is_wanted(lease, now)) {
    note_satisfied();
    return false;
  }
  Result<std::uint64_t> grown = pages_.grow(lock, wanted);
  if (grown) starvation_.got(*grown);
  if (!grown || starvation_.pages() == 0) {
    note_satisfied();
    return false;
  }
  const std::uint64_t missing = starvation_.pages();
  lock.unlock();
  (void)places_->ask(missing);
  return true;
}

}  // namespace kvelastic
