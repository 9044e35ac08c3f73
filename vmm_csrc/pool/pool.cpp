#include "pool/pool.h"

#include <algorithm>
#include <numeric>
#include <string>

namespace kvelastic {
namespace {

std::uint64_t capacity_bytes(const Places* places, const PoolOptions& options) {
  return places != nullptr ? places->capacity_bytes() : options.capacity_bytes;
}

/// The size of a page on all devices.
std::uint64_t page_bytes(const Places* places, const Geometry& geometry) {
  return places != nullptr ? places->page_bytes() : geometry.page_bytes();
}

/// The time stamp of cached blocks.
std::uint32_t now_ms() {
  using std::chrono::milliseconds;
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<std::uint32_t>(std::chrono::duration_cast<milliseconds>(since).count());
}

}  // namespace

Result<std::unique_ptr<Pool>> Pool::create(const Geometry& geometry,
                                           std::shared_ptr<Backing> backing,
                                           const PoolOptions& options,
                                           std::shared_ptr<Places> places) {
  if (options.min_reserved_pages > options.max_reserved_pages) {
    return Error{Errc::kInvalidArgument, "min_reserved_pages is " +
                                             std::to_string(options.min_reserved_pages) +
                                             ", more than max_reserved_pages, " +
                                             std::to_string(options.max_reserved_pages)};
  }
  if (places && places->copy_bytes() != geometry.page_bytes()) {
    return Error{Errc::kInvalidArgument,
                 "the places are for pages of " + std::to_string(places->copy_bytes()) +
                     " bytes, and those of the pool have " + std::to_string(geometry.page_bytes())};
  }
  if (options.max_blocks < 2) {
    return Error{Errc::kInvalidArgument, "max_blocks is " + std::to_string(options.max_blocks) +
                                             ", must be at least 2: the null block and one more"};
  }
  if (Status sound = geometry.check(1); !sound) return sound.error();
  Result<std::unique_ptr<Blocks>> blocks = Blocks::create(geometry);
  if (!blocks) return blocks.error();
  return std::unique_ptr<Pool>(
      new Pool(geometry, std::move(backing), options, *std::move(blocks), std::move(places)));
}

Pool::Pool(const Geometry& geometry, std::shared_ptr<Backing> backing, const PoolOptions& options,
           std::unique_ptr<Blocks> blocks, std::shared_ptr<Places> places)
    : options_(options),
      places_(std::move(places)),
      accounting_(std::move(blocks),
                  PageLimit(options.limit_bytes, capacity_bytes(places_.get(), options),
                            page_bytes(places_.get(), geometry), geometry.pages),
                  page_bytes(places_.get(), geometry), options.max_blocks, counters_),
      provisioning_(pages_ahead(options.min_reserved_pages, geometry.page_bytes()),
                    pages_ahead(options.max_reserved_pages, geometry.page_bytes()),
                    options.preallocate),
      figures_(accounting_, starvation_, provisioning_, calls_, counters_, options, places_),
      pages_(accounting_, figures_, counters_, session_, std::move(backing), places_),
      supply_(accounting_, pages_, figures_, starvation_, calls_, session_, options.reclaim_wait,
              places_),
      ladder_(accounting_, pages_, figures_, calls_, options.movable) {
  const Lock lock(mutex_);
  tell_limit();
  figures_.update();
}

// --- alloc, ensure ---------------------------------------------------------------------------

/// Pinned blocks are reused before a page is mapped, and after all other blocks.
Pool::Parts Pool::parts_of(std::uint64_t count, bool reuse) const {
  if (!reuse || accounting_.blocks().waiting_blocks() == 0) return {count, 0};
  const std::uint64_t mapped = accounting_.count_available(Reach::kMapped);
  const std::uint64_t reused =
      count > mapped ? std::min(count - mapped, accounting_.reusable_blocks()) : 0;
  return {count - reused, reused};
}

/// Takes the blocks without mapping or evicting. False: there are too few.
bool Pool::take_at_hand(Parts parts, std::vector<BlockId>& out) {
  if (accounting_.at_hand() < parts.fresh) return false;
  const std::uint64_t parked = accounting_.blocks().parked_pages();
  accounting_.take(parts.fresh, out);
  accounting_.reuse(parts.reused, out);
  provisioning_.took(parked - accounting_.blocks().parked_pages());
  counters_.add(Counter::kAllocs);
  figures_.note_activity();
  figures_.update();
  return true;
}

bool Pool::try_alloc(std::uint64_t count, std::optional<std::vector<BlockId>>& out, bool reuse) {
  const std::unique_lock session(session_, std::try_to_lock);
  if (!session) return false;
  const Lock lock(mutex_);
  if (accounting_.failure()) return false;
  const Parts parts = parts_of(count, reuse);
  if (parts.fresh <= accounting_.count_available(Reach::kLimit)) {
    if (take_at_hand(parts, out.emplace())) return true;
    if (supply_.may_come(1)) return false;
    if (take_mapped(parts, *out)) return true;
  }
  counters_.add(Counter::kAllocFailures);
  out.reset();
  return true;
}

Result<std::optional<std::vector<BlockId>>> Pool::alloc(std::uint64_t count, bool reuse) {
  // Alloc takes blocks from other callers only while it evicts. But a session of another thread
  // must be able to rely on its view, so alloc waits for it from the start.
  const std::lock_guard session(session_);
  Lock lock(mutex_);
  if (accounting_.failure()) return *accounting_.failure();
  std::optional<PageSupply::Wait> wait;  // one deadline for all waits of this call
  for (;;) {
    const Parts parts = parts_of(count, reuse);
    if (parts.fresh > accounting_.count_available(Reach::kLimit)) break;
    std::vector<BlockId> ids;
    if (take_at_hand(parts, ids)) return std::optional(std::move(ids));
    if (!wait) wait = supply_.may_wait(1);
    Result<bool> got = supply_.get(lock, parts.fresh - accounting_.at_hand(), *wait);
    if (!got && is_final(got.error())) return got.error();
    if (got && *got) continue;
    if (take_mapped(parts_of(count, reuse), ids)) return std::optional(std::move(ids));
    break;
  }
  counters_.add(Counter::kAllocFailures);
  figures_.update();  // mapped or evicted pages of an attempt stay so
  return std::optional<std::vector<BlockId>>();
}

Result<std::optional<std::vector<BlockId>>> Pool::alloc_run(std::uint64_t pages) {
  const std::lock_guard session(session_);
  Lock lock(mutex_);
  if (accounting_.failure()) return *accounting_.failure();
  Blocks& blocks = accounting_.blocks();
  const std::uint64_t most = geometry().pages - 1;  // one page is the null block's
  const std::uint64_t count = std::min(pages, most + 1) * geometry().blocks_per_page;
  std::optional<PageSupply::Wait> wait;  // one deadline for all waits of this call
  while (pages > 0 && pages <= most && count <= accounting_.count_available(Reach::kLimit)) {
    if (!wait) wait = supply_.may_wait(1);
    Result<bool> got = false;
    if (!blocks.occupancy(0)) {  // the first page of a pool holds the null block
      got = supply_.get(lock, 1, *wait);
    } else if (const std::optional<PageIndex> parked = blocks.find_parked_run(pages)) {
      std::vector<BlockId> ids;
      ids.reserve(count);
      blocks.alloc_run(*parked, pages, ids);
      provisioning_.took(pages);
      counters_.add(Counter::kAllocs);
      figures_.note_activity();
      figures_.update();
      return std::optional(std::move(ids));
    } else if (const std::optional<PageIndex> unmapped = blocks.find_unmapped_run(pages)) {
      std::vector<PageIndex> run(pages);
      std::iota(run.begin(), run.end(), *unmapped);
      got = supply_.get_run(lock, std::move(run), *wait);
    } else {  // no contiguous addresses: parked pages lie in between
      Result<std::uint64_t> given = pages_.shrink(lock, blocks.parked_pages());
      if (!given) return given.error();
      got = *given > 0;
    }
    if (!got && is_final(got.error())) return got.error();
    if (!got || !*got) break;
  }
  counters_.add(Counter::kAllocFailures);
  figures_.update();
  return std::optional<std::vector<BlockId>>();
}

/// Takes the blocks without mapping; evicts cached blocks if that yields enough. False: nothing was
/// evicted.
bool Pool::take_mapped(Parts parts, std::vector<BlockId>& out) {
  while (parts.fresh <= accounting_.count_available(Reach::kMapped)) {
    if (take_at_hand(parts, out)) return true;
    accounting_.evict_oldest(parts.fresh - accounting_.at_hand());
  }
  return false;
}

bool Pool::try_ensure(std::uint64_t count, std::uint64_t needed, std::uint64_t& mapped) {
  const Lock lock(mutex_);
  if (accounting_.failure()) return false;
  const bool more =
      count > accounting_.at_hand() && count <= accounting_.count_available(Reach::kLimit);
  const bool falls_short = needed > accounting_.count_available(Reach::kMapped);
  if (more && supply_.may_come(0, falls_short)) return false;
  mapped = accounting_.count_available(Reach::kMapped);
  return true;
}

Result<std::uint64_t> Pool::ensure(std::uint64_t count, std::uint64_t needed) {
  Lock lock(mutex_);
  if (accounting_.failure()) return *accounting_.failure();
  const auto falls_short = [&] { return needed > accounting_.count_available(Reach::kMapped); };
  PageSupply::Wait wait = supply_.may_wait(0, falls_short());
  while (count > accounting_.at_hand() && count <= accounting_.count_available(Reach::kLimit)) {
    if (wait.in_session && !falls_short()) wait.until = {};
    Result<bool> got = supply_.get(lock, count - accounting_.at_hand(), wait);
    if (!got && is_final(got.error())) return got.error();
    if (!got || !*got) break;
  }
  return accounting_.count_available(Reach::kMapped);
}

std::uint32_t Pool::wait_for_arrival(std::uint32_t seen, std::chrono::nanoseconds timeout) {
  Lock lock(mutex_);
  figures_.arrivals.wait(lock, seen, timeout);
  starvation_.want(Starvation::Time::clock::now());
  return arrivals();
}

Result<bool> Pool::try_to_reserve(std::uint64_t count) {
  const std::lock_guard session(session_);
  // An alloc takes reserved blocks first, so allocate the old and new ones together.
  const std::uint64_t already = stats().blocks_reserved;
  // Over the limit the reservation would be dropped at once.
  if ((count > available() || is_over_limit()) && !failed()) return false;
  Result<std::optional<std::vector<BlockId>>> ids = alloc(already + count);
  if (!ids) return ids.error();
  if (!*ids) return false;
  const Lock lock(mutex_);
  accounting_.reserve(*std::move(*ids));
  figures_.update();
  return true;
}

void Pool::free_reserved() {
  const std::lock_guard session(session_);
  Lock lock(mutex_);
  (void)accounting_.drop_reserved();
  given_back(lock);
}

// --- free, cache, touch ----------------------------------------------------------------------

Status Pool::free(std::span<const BlockId> ids) {
  Lock lock(mutex_);
  if (Status handed_out = accounting_.refuse_reserved(ids); !handed_out) return handed_out;
  if (Status freed = accounting_.blocks().free(ids); !freed) return freed;
  given_back(lock);
  return ok();
}

Status Pool::cache(std::span<const BlockId> ids) {
  return cache(ids, {});
}

Status Pool::cache(std::span<const BlockId> ids, std::span<const BlockKey> keys) {
  Lock lock(mutex_);
  if (Status handed_out = accounting_.refuse_reserved(ids); !handed_out) return handed_out;
  accounting_.blocks().set_now(now_ms());
  if (Status cached = accounting_.blocks().cache(ids); !cached) return cached;
  if (!keys.empty())
    (void)accounting_.blocks().name(ids, keys);  // they are used or cached, so this cannot fail
  evict_over_bound();
  given_back(lock);
  return ok();
}

/// Runs after blocks left use. Over the limit the engine's own thread releases pages, because an
/// engine that preempts a request allocates again at once.
void Pool::given_back(Lock& lock) {
  counters_.add(Counter::kFrees);
  figures_.note_activity();
  std::unique_lock session(session_, std::defer_lock);
  // Only try_lock: a thread in a session may be waiting for this thread. If kernels must be waited
  // for, the maintenance thread does that.
  const bool waits = pages_.works_behind() && calls_.has_keeper();
  // While a call waits for copies, that call releases the memory.
  if (accounting_.excess_pages() > 0 && !waits && !demotions_.is_awaited()) {
    (void)session.try_lock();
  }
  {
    std::optional<KeeperCalls::Enforcing> enforcing;
    if (session) enforcing.emplace(calls_);
    // Counted before enforce() releases the lock: others may map pages then.
    const std::uint32_t before = figures_.arrivals.count();
    figures_.update();
    given_back_arrivals_.fetch_add(figures_.arrivals.count() - before, std::memory_order_relaxed);
  }
  if (!session) return;
  (void)ladder_.enforce(
      lock);  // after a failure the pool stays over its limit, and the maintenance thread retries
  figures_.update();
}

Status Pool::touch(std::span<const BlockId> ids) {
  const Lock lock(mutex_);
  Status touched = accounting_.blocks().touch(ids);
  figures_.note_activity();
  figures_.update();
  return touched;
}

Result<PinTicket> Pool::pin(std::span<const BlockId> ids, PinKind kind) {
  const Lock lock(mutex_);
  Result<PinTicket> ticket = accounting_.pin(ids, kind);
  figures_.update();
  return ticket;
}

bool Pool::unpin(PinTicket ticket) {
  Lock lock(mutex_);
  accounting_.blocks().set_now(now_ms());
  const bool ended = accounting_.blocks().unpin(ticket);
  evict_over_bound();
  if (ended) given_back(lock);
  return ended;
}

void Pool::evict_over_bound() {
  if (options_.max_cached_blocks < 0) return;
  const auto bound = static_cast<std::uint64_t>(options_.max_cached_blocks);
  if (accounting_.blocks().cached_blocks() <= bound) return;
  // In another thread's session nothing is evicted; the next cache() makes up for it.
  const std::unique_lock session(session_, std::try_to_lock);
  if (!session) return;
  // Cached blocks can be allocated anyway, so a copyable one may wait for its copy.
  if (demotions_.takes_blocks()) return accounting_.evict_not_copyable_down_to(bound);
  accounting_.evict_down_to(bound);
}

std::optional<std::chrono::milliseconds> Pool::evict_idle() {
  // Takes the session only to evict: an engine may hold it for a whole step.
  if (const auto left = until_idle_eviction(); !left || left->count() > 0) return left;
  {
    const std::lock_guard session(session_);
    const Lock lock(mutex_);
    const IdleTimes idle = idle_times();
    accounting_.evict_idle(static_cast<std::uint32_t>(idle.idle_ms),
                           static_cast<std::uint32_t>(idle.copyable_ms));
    figures_.update();
  }
  return until_idle_eviction();
}

/// The time until a cached block exceeds its idle time; empty without such a block.
std::optional<std::chrono::milliseconds> Pool::until_idle_eviction() {
  const Lock lock(mutex_);
  if (!calls_.arm_cache_idle(figures_.has_cached_to_age())) return std::nullopt;
  Blocks& blocks = accounting_.blocks();
  blocks.set_now(now_ms());
  const IdleTimes idle = idle_times();
  std::int64_t left_ms = idle.copyable_ms;
  if (const auto oldest_ms = blocks.oldest_not_copyable_ms())
    left_ms = std::min(left_ms, idle.idle_ms - *oldest_ms);
  if (const auto oldest_ms = blocks.oldest_copyable_ms())
    left_ms = std::min(left_ms, idle.copyable_ms - *oldest_ms);
  return std::chrono::milliseconds(std::max<std::int64_t>(left_ms, 0));
}

/// A copyable block may stay twice as long, so that a tier can copy it.
Pool::IdleTimes Pool::idle_times() const {
  const std::int64_t idle_ms = options_.cache_idle.count();
  return {idle_ms, demotions_.takes_blocks() ? 2 * idle_ms : idle_ms};
}

std::chrono::milliseconds Pool::oldest_copyable() {
  const Lock lock(mutex_);
  accounting_.blocks().set_now(now_ms());
  return std::chrono::milliseconds(accounting_.blocks().oldest_copyable_ms().value_or(0));
}

std::vector<BlockChange> Pool::take_changes() {
  const Lock lock(mutex_);
  return accounting_.take_changes();
}

void Pool::clear() {
  const std::lock_guard session(session_);
  Lock lock(mutex_);
  accounting_.discard_all();
  (void)ladder_.enforce(lock);
  figures_.update();
}

Result<std::uint64_t> Pool::close(bool discard) {
  const std::lock_guard session(session_);
  Lock lock(mutex_);
  accounting_.limit.set_asleep(true);  // the limit now allows no page
  accounting_.fail({Errc::kPoolFailed, "the pool is closed; make another one"});
  pages_.wait_until_settled(lock);
  if (discard) {
    accounting_.drop_pins();
    accounting_.discard_all();
  }
  Status done = ladder_.enforce(lock);
  figures_.update();
  counters_.publish_to(nullptr);
  if (!done) return done.error();
  return accounting_.held_pages();
}

}  // namespace kvelastic
