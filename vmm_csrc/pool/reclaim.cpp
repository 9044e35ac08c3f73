#include "pool/reclaim.h"

#include <algorithm>

namespace kvelastic {
namespace {

/// A shorter wait is not worth waking the copying thread.
constexpr std::chrono::milliseconds kLeastWait{1};

/// True if `pages` pages cannot be released without losing blocks that have no copy.
bool would_drop(const Blocks& blocks, std::uint64_t pages) {
  return blocks.dirty_blocks() > 0 && blocks.parked_pages() + blocks.clean_pages() < pages;
}

}  // namespace

// --- the order ---------------------------------------------------------------------------------

Status Reclaimer::enforce(Change& change) {
  const PendingWork::Enforcing enforcing(change->work);  // also ends on an exception
  const Accounting& accounting = change->accounting;
  if (accounting.excess_pages() > accounting.blocks().parked_pages()) drain_before_moves(change);
  return release_in_order(change);
}

Status Reclaimer::release_in_order(Change& change) {
  Accounting& accounting = change->accounting;
  const Blocks& blocks = accounting.blocks();
  const bool asleep = accounting.limit.is_asleep();
  if (asleep) accounting.evict_all();  // a moved block would only be evicted later
  if (accounting.excess_pages() > blocks.parked_pages()) (void)accounting.drop_reserved();
  while (accounting.excess_pages() > 0) {
    while (blocks.parked_pages() < accounting.excess_pages() && empty_a_page(change)) {
    }
    if (blocks.parked_pages() == 0) break;  // the remaining pages are in use
    Result<std::uint64_t> unmapped = unmap_parked(change, accounting.excess_pages());
    if (!unmapped) return unmapped.error();
  }
  // Each unmapped page leaves one less to drain.
  if (blocks.closed_pages() != accounting.excess_pages()) accounting.close_pages_over_limit();
  if (accounting.excess_pages() == 0) return ok();
  // Cached blocks now only lie on pages in use. Evict them, too: the blocks in use then fit into
  // the fullest pages, and the pages over the limit get no new blocks and drain.
  accounting.evict_all();
  return accounting.limit.is_asleep() ? unmap_null_page(change) : ok();
}

/// Releases pages over the limit whose release loses nothing: parked pages, and pages with clean
/// blocks only.
Status Reclaimer::release_clean(Change& change) {
  const PendingWork::Enforcing enforcing(change->work);
  Accounting& accounting = change->accounting;
  const Blocks& blocks = accounting.blocks();
  while (accounting.excess_pages() > 0) {
    while (blocks.parked_pages() < accounting.excess_pages() && blocks.clean_pages() > 0) {
      (void)accounting.evict_cheapest_page();
    }
    if (blocks.parked_pages() == 0) break;
    Result<std::uint64_t> unmapped = unmap_parked(change, accounting.excess_pages());
    if (!unmapped) return unmapped.error();
  }
  return ok();
}

Result<std::uint64_t> Reclaimer::give_up(Change& change, std::uint64_t pages, Depth depth,
                                         std::uint64_t min_pages) {
  Accounting& accounting = change->accounting;
  const Blocks& blocks = accounting.blocks();
  Pressure& pressure = accounting.limit.pressure;
  if (depth != Depth::kParked && pages > blocks.parked_pages()) drain_before_moves(change);
  const std::uint64_t staying = accounting.staying_pages();
  const std::uint64_t kept = std::max<std::uint64_t>(min_pages, 1);
  std::uint64_t target = std::max(staying > pages ? staying - pages : std::uint64_t{0}, kept);
  if (depth == Depth::kInUse)
    target = std::max(target, pressure.floor(Pressure::Time::clock::now()));
  const std::uint64_t before = change->counters[Counter::kPagesUnmapped];
  // If kernels must be waited for, all pages wait together. An idle engine has none, so its first
  // batch is released before the other pages are emptied.
  const bool waits = pool_.backing->works_behind();
  const bool first_alone = waits && depth != Depth::kParked && pages > blocks.parked_pages() &&
                           pool_.device_set && !pool_.device_set->is_busy();
  std::uint64_t most_at_once = first_alone ? pool_.first_batch_pages()
                               : waits     ? pages
                                           : pool_.largest_batch_pages();
  // Pages may have been mapped in the meantime; do not release more than requested.
  std::uint64_t given = 0;
  const auto missing = [&] {
    const std::uint64_t now = accounting.staying_pages();
    return now > target ? std::min(now - target, pages - std::min(given, pages)) : 0;
  };
  while (missing() > 0) {
    const std::uint64_t next = std::min(missing(), most_at_once);
    while (depth != Depth::kParked && blocks.parked_pages() < next &&
           (accounting.drop_reserved() || empty_a_page(change))) {
    }
    if (blocks.parked_pages() == 0) break;
    Result<std::uint64_t> unmapped = unmap_parked(change, next);
    if (!unmapped) return unmapped.error();
    given += *unmapped;
    if (waits) most_at_once = pages;
  }
  if (depth == Depth::kInUse && missing() > 0) {
    pressure.begin(target, Pressure::Time::clock::now());
    accounting.close_pages_over_limit();
    if (Status enforced = enforce(change); !enforced) return enforced.error();
  }
  return change->counters[Counter::kPagesUnmapped] - before;
}

// --- emptying pages ----------------------------------------------------------------------------

/// Parks one more page by moving its cached blocks, or else by evicting them.
bool Reclaimer::empty_a_page(Change& change) {
  Result<std::uint64_t> moved = move_a_page(change);
  if (moved && *moved > 0) return true;
  return change->accounting.evict_cheapest_page();
}

/// Waits for the device, which may still use blocks that will be moved: before decisions are made,
/// and without the session. The copy then waits only for work submitted since.
void Reclaimer::drain_before_moves(Change& change) {
  if (!pool_.options.movable || !change->accounting.blocks().can_compact() ||
      !pool_.backing->works_behind()) {
    return;
  }
  const Change::Unlocked unlocked(change, true);
  (void)guarded([&] { return pool_.backing->drain(); });  // a failure recurs in the copy
}

Result<std::uint64_t> Reclaimer::compact(Change& change) {
  drain_before_moves(change);
  return move_a_page(change);
}

Result<std::uint64_t> Reclaimer::move_a_page(Change& change) {
  Accounting& accounting = change->accounting;
  std::vector<BlockMove> moves;
  if (!pool_.options.movable || accounting.failure() ||
      !accounting.blocks().take_compaction(moves)) {
    return std::uint64_t{0};
  }
  Status copied = ok();
  {
    const Change::Unlocked unlocked(change);
    copied = guarded([&] {
      Status finished = pool_.backing->drain();
      return finished ? pool_.backing->copy(moves) : finished;
    });
  }
  change->fail_if_final(copied);
  const std::uint64_t moved = accounting.finish_moves(moves, static_cast<bool>(copied));
  if (!copied) return copied.error();
  return moved;
}

void Reclaimer::evict_over_bound(State& state) {
  if (pool_.options.max_cached_blocks < 0) return;
  const auto bound = static_cast<std::uint64_t>(pool_.options.max_cached_blocks);
  if (state.accounting.blocks().cached_blocks() <= bound) return;
  const std::unique_lock session(pool_.session, std::try_to_lock);
  if (!session) return;
  // Cached blocks can be allocated anyway, so a copyable one may wait for its copy.
  if (state.demotions.takes_blocks()) return state.accounting.evict_not_copyable_down_to(bound);
  state.accounting.evict_down_to(bound);
}

// --- unmapping ---------------------------------------------------------------------------------

Result<std::uint64_t> Reclaimer::unmap_parked(Change& change, std::uint64_t pages) {
  Blocks& blocks = change->accounting.blocks();
  std::vector<PageIndex> chosen;
  chosen.reserve(std::min(pages, blocks.parked_pages()));
  for (std::uint64_t i = 0; i < pages; ++i) {
    const std::optional<PageIndex> page = blocks.take_parked();
    if (!page) break;
    chosen.push_back(*page);
  }
  return unmap(change, chosen, InSession::kMayLetGo);
}

/// Unmaps page 0 if it is the last page and holds only the null block.
Status Reclaimer::unmap_null_page(Change& change) {
  Accounting& accounting = change->accounting;
  // Code that finds a page mapped relies on the null block, so page 0 is unmapped last.
  if (accounting.held_pages() != 1 || accounting.moving_pages() > 0) return ok();
  const std::optional<PageIndex> page = accounting.blocks().take_null_page();
  if (!page) return ok();
  // In the session: a waking thread must not map another page before this one.
  const Result<std::uint64_t> unmapped = unmap(change, {*page}, InSession::kStay);
  return unmapped ? ok() : Status(unmapped.error());
}

/// Unmaps pages in transit; after a failure the rest counts as mapped again.
Result<std::uint64_t> Reclaimer::unmap(Change& change, const std::vector<PageIndex>& pages,
                                       InSession session) {
  if (pages.empty()) return std::uint64_t{0};
  const bool waits = pool_.backing->works_behind();
  const std::uint64_t largest = waits ? pool_.largest_batch_pages() : pages.size();
  std::uint64_t batch_size = waits ? pool_.first_batch_pages() : largest;
  change->accounting.begin_unmap(pages.size());
  Status status = ok();
  std::uint64_t unmapped = 0;
  {
    const Change::Unlocked unlocked(change, waits && session == InSession::kMayLetGo);
    status = guarded([&] { return pool_.backing->drain(); });
    for (std::span<const PageIndex> rest(pages); !rest.empty();) {
      const std::span<const PageIndex> batch =
          rest.first(std::min<std::size_t>(rest.size(), batch_size));
      rest = rest.subspan(batch.size());
      batch_size = std::min(2 * batch_size, largest);
      if (status) status = unmap_now(batch);
      if (status) unmapped += batch.size();
      const Change own(pool_);
      end_unmap(*own, batch, status);
    }
  }
  if (!status && (unmapped == 0 || change->accounting.failure())) return status.error();
  return unmapped;
}

/// After a final failure the mappings are unknown: the pages stay in transit in the ledgers.
Status Reclaimer::unmap_now(std::span<const PageIndex> batch) {
  if (pool_.device_set) pool_.device_set->leaving(batch.size());
  Status done = guarded([&] { return pool_.backing->unmap(batch); });
  if (pool_.device_set && !done && !is_final(done.error())) pool_.device_set->arrived(batch.size());
  return done;
}

void Reclaimer::end_unmap(State& state, std::span<const PageIndex> batch, const Status& unmapped) {
  Blocks& blocks = state.accounting.blocks();
  state.fail_if_final(unmapped);
  for (const PageIndex page : batch) unmapped ? blocks.put_back(page) : blocks.add_page(page);
  if (unmapped) {
    state.accounting.end_unmap(batch.size());
    if (pool_.device_set) pool_.device_set->give_back(batch.size());
    state.counters.add(Counter::kPagesUnmapped, batch.size());
    state.counters.add(Counter::kPagesDestroyed, batch.size());
    pool_.note_moved(state, batch.size());
  } else {
    state.accounting.cancel_unmap(batch.size());
  }
  pool_.settled.notify_all();
}

// --- waiting for write-back --------------------------------------------------------------------

void Reclaimer::write_back_for_limit(const std::function<bool()>& interrupted) {
  Change change(pool_);
  const Accounting& accounting = change->accounting;
  const Blocks& blocks = accounting.blocks();
  Demotions& demotions = change->demotions;
  // After this, pages still over the limit are released with the rest of the cache.
  if (!demotions.is_attended() || !would_drop(blocks, accounting.excess_pages())) return;
  const Demotions::Wanting wanting(
      demotions, accounting.limit.is_asleep() ? DemotionReason::kSleep : DemotionReason::kLimit);
  while (wanting.goes_on() && would_drop(blocks, accounting.excess_pages()) &&
         !(interrupted && interrupted())) {
    wanting.wait(change.for_wait());
    if (blocks.clean_pages() + blocks.parked_pages() == 0) continue;
    const Change::Unlocked unlocked(change);  // the session is taken before the lock
    Change in_session(pool_, PoolState::InSession{});
    (void)release_clean(in_session);  // a failure recurs in enforce()
  }
}

void Reclaimer::write_back_for_others(std::uint64_t pages) {
  Change change(pool_);
  const Blocks& blocks = change->accounting.blocks();
  Demotions& demotions = change->demotions;
  if (!demotions.is_attended() || !would_drop(blocks, pages)) return;
  const Demotions::Clock::time_point begun = Demotions::Clock::now();
  const std::chrono::nanoseconds wait = demotions.reclaim_wait(begun);
  if (wait < kLeastWait) return;  // too short for a copy
  const Demotions::Wanting wanting(demotions, DemotionReason::kReclaim, wait);
  while (wanting.goes_on() && would_drop(blocks, pages)) wanting.wait(change.for_wait());
  demotions.note_reclaim(Demotions::Clock::now() - begun);
}

}  // namespace kvelastic
