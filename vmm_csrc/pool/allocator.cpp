#include "pool/allocator.h"

#include <algorithm>
#include <numeric>

namespace kvelastic {

// --- alloc, ensure ---------------------------------------------------------------------------

/// Pinned blocks are reused before a page is mapped, and after all other blocks.
Allocator::Parts Allocator::parts_of(const Accounting& accounting, std::uint64_t count,
                                     bool reuse) {
  if (!reuse || accounting.blocks().waiting_blocks() == 0) return {count, 0};
  const std::uint64_t mapped = accounting.count_available(Reach::kMapped);
  const std::uint64_t reused =
      count > mapped ? std::min(count - mapped, accounting.reusable_blocks()) : 0;
  return {count - reused, reused};
}

/// Takes the blocks without mapping or evicting. False: there are too few.
bool Allocator::take_at_hand(State& state, Parts parts, std::vector<BlockId>& out) {
  Accounting& accounting = state.accounting;
  if (accounting.at_hand() < parts.fresh) return false;
  const std::uint64_t parked = accounting.blocks().parked_pages();
  accounting.take(parts.fresh, out);
  accounting.reuse(parts.reused, out);
  state.provisioning.took(parked - accounting.blocks().parked_pages());
  state.counters.add(Counter::kAllocs);
  pool_.note_activity();
  return true;
}

/// Takes the blocks without mapping; evicts cached blocks if that yields enough. False: nothing was
/// evicted.
bool Allocator::take_mapped(State& state, Parts parts, std::vector<BlockId>& out) {
  while (parts.fresh <= state.accounting.count_available(Reach::kMapped)) {
    if (take_at_hand(state, parts, out)) return true;
    state.accounting.evict_oldest(parts.fresh - state.accounting.at_hand());
  }
  return false;
}

bool Allocator::try_alloc(std::uint64_t count, std::optional<std::vector<BlockId>>& out,
                          bool reuse) {
  const std::unique_lock session(pool_.session, std::try_to_lock);
  if (!session) return false;
  const Change change(pool_);
  const Accounting& accounting = change->accounting;
  if (accounting.failure()) return false;
  const Parts parts = parts_of(accounting, count, reuse);
  if (parts.fresh <= accounting.count_available(Reach::kLimit)) {
    if (take_at_hand(*change, parts, out.emplace())) return true;
    if (grower_.may_come(*change, 1)) return false;
    if (take_mapped(*change, parts, *out)) return true;
  }
  change->counters.add(Counter::kAllocFailures);
  out.reset();
  return true;
}

Result<std::optional<std::vector<BlockId>>> Allocator::alloc(std::uint64_t count, bool reuse) {
  // Alloc takes blocks from other callers only while it evicts. But a session of another thread
  // must be able to rely on its view, so alloc waits for it from the start.
  Change change(pool_, PoolState::InSession{});
  const Accounting& accounting = change->accounting;
  if (accounting.failure()) return *accounting.failure();
  std::optional<Grower::Wait> wait;  // one deadline for all waits of this call
  for (;;) {
    const Parts parts = parts_of(accounting, count, reuse);
    if (parts.fresh > accounting.count_available(Reach::kLimit)) break;
    std::vector<BlockId> ids;
    if (take_at_hand(*change, parts, ids)) return std::optional(std::move(ids));
    if (!wait) wait = grower_.may_wait(*change, 1);
    Result<bool> got = grower_.get(change, parts.fresh - accounting.at_hand(), *wait);
    if (!got && is_final(got.error())) return got.error();
    if (got && *got) continue;
    if (take_mapped(*change, parts_of(accounting, count, reuse), ids)) {
      return std::optional(std::move(ids));
    }
    break;
  }
  change->counters.add(Counter::kAllocFailures);
  return std::optional<std::vector<BlockId>>();
}

Result<std::optional<std::vector<BlockId>>> Allocator::alloc_run(std::uint64_t pages) {
  Change change(pool_, PoolState::InSession{});
  Accounting& accounting = change->accounting;
  if (accounting.failure()) return *accounting.failure();
  Blocks& blocks = accounting.blocks();
  const std::uint64_t most = pool_.geometry.pages - 1;  // one page is the null block's
  const std::uint64_t count = std::min(pages, most + 1) * pool_.geometry.blocks_per_page;
  std::optional<Grower::Wait> wait;  // one deadline for all waits of this call
  while (pages > 0 && pages <= most && count <= accounting.count_available(Reach::kLimit)) {
    if (!wait) wait = grower_.may_wait(*change, 1);
    Result<bool> got = false;
    if (!blocks.occupancy(0)) {  // the first page of a pool holds the null block
      got = grower_.get(change, 1, *wait);
    } else if (const std::optional<PageIndex> parked = blocks.find_parked_run(pages)) {
      std::vector<BlockId> ids;
      ids.reserve(count);
      blocks.alloc_run(*parked, pages, ids);
      change->provisioning.took(pages);
      change->counters.add(Counter::kAllocs);
      pool_.note_activity();
      return std::optional(std::move(ids));
    } else if (const std::optional<PageIndex> unmapped = blocks.find_unmapped_run(pages)) {
      std::vector<PageIndex> run(pages);
      std::iota(run.begin(), run.end(), *unmapped);
      got = grower_.get_run(change, std::move(run), *wait);
    } else {  // no contiguous addresses: parked pages lie in between
      Result<std::uint64_t> given = reclaimer_.unmap_parked(change, blocks.parked_pages());
      if (!given) return given.error();
      got = *given > 0;
    }
    if (!got && is_final(got.error())) return got.error();
    if (!got || !*got) break;
  }
  change->counters.add(Counter::kAllocFailures);
  return std::optional<std::vector<BlockId>>();
}

bool Allocator::try_ensure(std::uint64_t count, std::uint64_t needed, std::uint64_t& mapped) const {
  const PoolState::Look state(pool_);
  const Accounting& accounting = state->accounting;
  if (accounting.failure()) return false;
  const bool more =
      count > accounting.at_hand() && count <= accounting.count_available(Reach::kLimit);
  const bool falls_short = needed > accounting.count_available(Reach::kMapped);
  if (more && grower_.may_come(*state, 0, falls_short)) return false;
  mapped = accounting.count_available(Reach::kMapped);
  return true;
}

Result<std::uint64_t> Allocator::ensure(std::uint64_t count, std::uint64_t needed) {
  Change change(pool_);
  const Accounting& accounting = change->accounting;
  if (accounting.failure()) return *accounting.failure();
  const auto falls_short = [&] { return needed > accounting.count_available(Reach::kMapped); };
  Grower::Wait wait = grower_.may_wait(*change, 0, falls_short());
  while (count > accounting.at_hand() && count <= accounting.count_available(Reach::kLimit)) {
    if (wait.in_session && !falls_short()) wait.until = {};
    Result<bool> got = grower_.get(change, count - accounting.at_hand(), wait);
    if (!got && is_final(got.error())) return got.error();
    if (!got || !*got) break;
  }
  return accounting.count_available(Reach::kMapped);
}

std::uint32_t Allocator::wait_for_epoch(std::uint32_t seen, std::chrono::nanoseconds timeout) {
  Change change(pool_);
  change->epoch.wait(change.for_wait(), seen, timeout);
  change->memory_wait.renew(MemoryWait::Time::clock::now());
  return pool_.epoch();
}

Result<bool> Allocator::try_to_reserve(std::uint64_t count) {
  const std::lock_guard session(pool_.session);
  // An alloc takes reserved blocks first, so allocate the old and new ones together.
  const std::uint64_t already = pool_.stats().blocks_reserved;
  // Over the limit the reservation would be dropped at once.
  if ((count > pool_.available() || pool_.is_over_limit()) && !pool_.has_failed()) return false;
  Result<std::optional<std::vector<BlockId>>> ids = alloc(already + count);
  if (!ids) return ids.error();
  if (!*ids) return false;
  const Change change(pool_);
  change->accounting.reserve(*std::move(*ids));
  return true;
}

void Allocator::free_reserved() {
  Change change(pool_, PoolState::InSession{});
  (void)change->accounting.drop_reserved();
  given_back(change);
}

WaitingBytes Allocator::report_waiting(const Waiting& waiting) {
  const Change change(pool_);
  change->waiting = waiting;
  return change->waiting_bytes();
}

// --- free, cache, touch ----------------------------------------------------------------------

Status Allocator::free(std::span<const BlockId> ids) {
  Change change(pool_);
  if (Status handed_out = change->accounting.refuse_reserved(ids); !handed_out) return handed_out;
  if (Status freed = change->accounting.blocks().free(ids); !freed) return freed;
  given_back(change);
  return ok();
}

Status Allocator::cache(std::span<const BlockId> ids, std::span<const BlockKey> keys) {
  Change change(pool_);
  Accounting& accounting = change->accounting;
  if (Status handed_out = accounting.refuse_reserved(ids); !handed_out) return handed_out;
  change->set_now();
  if (Status cached = accounting.blocks().cache(ids); !cached) return cached;
  // They are used or cached, so this cannot fail.
  if (!keys.empty()) (void)accounting.blocks().name(ids, keys);
  reclaimer_.evict_over_bound(*change);
  given_back(change);
  return ok();
}

/// Runs after blocks left use. Over the limit the engine's own thread releases pages, because an
/// engine that preempts a request allocates again at once.
void Allocator::given_back(Change& change) {
  change->counters.add(Counter::kFrees);
  change->given_back = true;
  pool_.note_activity();
  // If kernels must be waited for, the maintenance thread releases the pages. While a call waits
  // for copies, that call does.
  const bool leaves_it = (pool_.backing->works_behind() && change->work.has_thread()) ||
                         change->demotions.is_awaited();
  if (change->accounting.excess_pages() == 0 || leaves_it) return;
  // Only try_lock: a thread in a session may be waiting for this thread.
  const std::unique_lock session(pool_.session, std::try_to_lock);
  // After a failure the pool stays over its limit, and the maintenance thread retries.
  if (session) (void)reclaimer_.enforce(change);
}

Status Allocator::touch(std::span<const BlockId> ids) {
  const Change change(pool_);
  pool_.note_activity();
  return change->accounting.blocks().touch(ids);
}

Result<PinTicket> Allocator::pin(std::span<const BlockId> ids, PinKind kind) {
  const Change change(pool_);
  return change->accounting.pin(ids, kind);
}

bool Allocator::unpin(PinTicket ticket) {
  Change change(pool_);
  change->set_now();
  const bool ended = change->accounting.blocks().unpin(ticket);
  reclaimer_.evict_over_bound(*change);
  if (ended) given_back(change);
  return ended;
}

std::vector<BlockChange> Allocator::take_changes() {
  const Change change(pool_);
  return change->accounting.take_changes();
}

void Allocator::clear() {
  Change change(pool_, PoolState::InSession{});
  change->accounting.discard_all();
  (void)reclaimer_.enforce(change);
}

}  // namespace kvelastic
