#include "pool.h"

#include <algorithm>
#include <new>
#include <string>

namespace kvelastic {
namespace {

/// A failure that a later try cannot mend: the caller must hear of it. Anything else is "no blocks
/// now", which an engine's scheduler knows how to live with.
bool is_final(const Error& error) {
  return error.code == Errc::kPoolFailed || error.code == Errc::kChannelClosed ||
         error.code == Errc::kChannelTimeout;
}

/// After a wait in vain, allocs do not wait for this many times as long.
constexpr int kFruitlessWaits = 8;
/// What `call` answers; kOutOfMemory where there is no memory for its lists. What the accounting
/// has begun is ended in either case.
template <typename F>
Status guarded(F call) {
  try {
    return call();
  } catch (const std::bad_alloc&) {
    return Error{Errc::kOutOfMemory, "out of memory"};
  }
}

/// A squeeze that nobody has asked for so long is lifted.
constexpr std::chrono::milliseconds kSqueezeLease{500};
/// After a squeeze was met, a request for as much may still be one of those that repeated it.
constexpr std::chrono::milliseconds kRepeatedFor{40};
/// After this long an engine that goes on without the pages it wants asks for them once more.
constexpr std::chrono::milliseconds kAskAgain{10};
/// Memory comes and goes back in batches of about this size, so that who waits can begin with it.
constexpr std::uint64_t kBatchBytes = std::uint64_t{32} << 20;

}  // namespace

Result<std::unique_ptr<Pool>> Pool::create(const Geometry& geometry,
                                           std::shared_ptr<Backing> backing,
                                           const PoolOptions& options,
                                           std::shared_ptr<LedgerMember> member) {
  if (options.min_reserved_pages > options.max_reserved_pages) {
    return Error{Errc::kInvalidArgument, "min_reserved_pages is " +
                                             std::to_string(options.min_reserved_pages) +
                                             ", more than max_reserved_pages, " +
                                             std::to_string(options.max_reserved_pages)};
  }
  if (options.page_copies == 0) {
    return Error{Errc::kInvalidArgument, "page_copies is 0, must be at least 1"};
  }
  if (options.max_blocks < 2) {
    return Error{Errc::kInvalidArgument, "max_blocks is " + std::to_string(options.max_blocks) +
                                             ", must be at least 2: the null block and one more"};
  }
  if (Status sound = geometry.check(1); !sound) return sound.error();
  Result<std::unique_ptr<Blocks>> blocks = Blocks::create(geometry);
  if (!blocks) return blocks.error();
  return std::unique_ptr<Pool>(
      new Pool(geometry, std::move(backing), options, *std::move(blocks), std::move(member)));
}

Pool::Pool(const Geometry& geometry, std::shared_ptr<Backing> backing, const PoolOptions& options,
           std::unique_ptr<Blocks> blocks, std::shared_ptr<LedgerMember> member)
    : geometry_(geometry),
      options_(options),
      backing_(std::move(backing)),
      member_(std::move(member)),
      blocks_(std::move(blocks)),
      seen_capacity_bytes_(capacity_bytes()),
      limit_bytes_(options.limit_bytes),
      pages_limit_(whole_pages(options.limit_bytes)) {
  const Lock lock(mutex_);
  tell_limit();
  changed();
}

void Pool::tell_limit() {
  if (member_) member_->set_limit(std::min(limit_bytes_, capacity_bytes()));
}

std::uint64_t Pool::batch_pages() const {
  return std::max<std::uint64_t>(kBatchBytes / page_cost_bytes(), 1);
}

std::uint64_t Pool::whole_pages(std::uint64_t limit_bytes) const {
  const std::uint64_t bytes = std::min(limit_bytes, capacity_bytes());
  // Page 0 holds the null block and is never given back, so one page is the least.
  return std::clamp<std::uint64_t>(bytes / page_cost_bytes(), 1, geometry_.pages);
}

// --- alloc -----------------------------------------------------------------------------------

/// Takes `count` blocks without mapping; pre: free and reserved blocks suffice.
bool Pool::blocks_at_hand(std::uint64_t count, std::vector<BlockId>& out) {
  if (at_hand() < count) return false;
  out.reserve(count);
  while (out.size() < count && !reserved_.empty()) {
    out.push_back(reserved_.back());
    reserved_.pop_back();
  }
  const std::uint64_t parked = blocks_->parked_pages();
  blocks_->alloc(count - out.size(), over_pages() > 0 ? Blocks::Fit::kFullest : Blocks::Fit::kBest,
                 out);
  demand_pages_ += parked - blocks_->parked_pages();
  ++counts_.allocs;
  if (record_) record_->add(Counter::kAllocs);
  note_activity();
  changed();
  return true;
}

void Pool::note_failed_alloc() {
  ++counts_.alloc_failures;
  if (record_) record_->add(Counter::kAllocFailures);
}

bool Pool::try_alloc(std::uint64_t count, std::optional<std::vector<BlockId>>& out) {
  const std::unique_lock session(session_, std::try_to_lock);
  if (!session) return false;
  const Lock lock(mutex_);
  if (final_error_) return false;
  if (count <= count_available(Reach::kLimit)) {
    if (blocks_at_hand(count, out.emplace())) return true;
    if (pages_may_come(1)) return false;
    if (take_mapped(count, *out)) return true;
  }
  note_failed_alloc();
  out.reset();
  return true;
}

Result<std::optional<std::vector<BlockId>>> Pool::alloc(std::uint64_t count) {
  // Only while it evicts does alloc take anything from others; but a session begun by another
  // thread must be able to count on what it saw, so alloc waits for it from the start.
  const std::lock_guard session(session_);
  Lock lock(mutex_);
  if (final_error_) return *final_error_;
  std::optional<Wait> wait;  // one deadline for all that this call waits
  while (count <= count_available(Reach::kLimit)) {
    std::vector<BlockId> ids;
    if (blocks_at_hand(count, ids)) return std::optional(std::move(ids));
    if (!wait) wait = may_wait(1);
    Result<bool> got = get_pages(lock, count - at_hand(), *wait);
    if (!got && is_final(got.error())) return got.error();
    if (got && *got) continue;
    if (take_mapped(count, ids)) return std::optional(std::move(ids));
    break;
  }
  note_failed_alloc();
  changed();  // what an attempt mapped or evicted stays so
  return std::optional<std::vector<BlockId>>();
}

/// Takes `count` blocks without mapping, evicting cached ones for it; false, and nothing evicted,
/// where that cannot make as many.
bool Pool::take_mapped(std::uint64_t count, std::vector<BlockId>& out) {
  while (count <= count_available(Reach::kMapped)) {
    if (blocks_at_hand(count, out)) return true;
    const std::size_t before = evicted_.size();
    for (std::uint64_t missing = count - at_hand(); missing > 0; --missing) {
      (void)blocks_->evict_oldest_block(evicted_);
    }
    note_evicted(before);
  }
  return false;
}

bool Pool::try_ensure(std::uint64_t count, std::uint64_t& mapped) {
  const Lock lock(mutex_);
  if (final_error_) return false;
  const bool more = count > at_hand() && count <= count_available(Reach::kLimit);
  if (more && pages_may_come(0)) return false;
  mapped = count_available(Reach::kMapped);
  return true;
}

Result<std::uint64_t> Pool::ensure(std::uint64_t count) {
  Lock lock(mutex_);
  if (final_error_) return *final_error_;
  const Wait wait = may_wait(0);
  while (count > at_hand() && count <= count_available(Reach::kLimit)) {
    Result<bool> got = get_pages(lock, count - at_hand(), wait);
    if (!got && is_final(got.error())) return got.error();
    if (!got || !*got) break;
  }
  return count_available(Reach::kMapped);
}

std::uint32_t Pool::wait_for_arrival(std::uint32_t seen, std::chrono::nanoseconds timeout) {
  Lock lock(mutex_);
  ++awaiting_;
  lock.unlock();
  futex_wait(arrivals_, seen, timeout);
  lock.lock();
  --awaiting_;
  wanted_at_ = Clock::now();
  return arrivals();
}

/// Under mutex_, and so is the count of who awaits it: nobody can begin to wait in between.
void Pool::note_arrival() {
  arrivals_.store(arrivals_.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  if (awaiting_ > 0) futex_wake(arrivals_);
}

Result<bool> Pool::try_to_reserve(std::uint64_t count) {
  const std::lock_guard session(session_);
  // An alloc takes what is reserved first, so it is asked for the old and the new together.
  const std::uint64_t already = stats().blocks_reserved;
  // Over the limit it would be dropped again at once.
  if ((count > available() || is_over_limit()) && !failed()) return false;
  Result<std::optional<std::vector<BlockId>>> ids = alloc(already + count);
  if (!ids) return ids.error();
  if (!*ids) return false;
  const Lock lock(mutex_);
  reserved_ = *std::move(*ids);
  std::sort(reserved_.begin(), reserved_.end());
  changed();
  return true;
}

void Pool::free_reserved() {
  const std::lock_guard session(session_);
  Lock lock(mutex_);
  (void)drop_reserved();
  given_back(lock);
}

/// What is set aside for allocs to come has no contents: it makes way before anything cached does,
/// and those allocs take what there is then. False: nothing was set aside.
bool Pool::drop_reserved() {
  if (reserved_.empty()) return false;
  (void)blocks_->free(std::exchange(reserved_, {}));
  return true;
}

// --- free, cache, touch ----------------------------------------------------------------------

/// A set-aside block is used in the accounting and was never handed out: to free or cache it is a
/// mistake of the caller that only this list can tell.
Status Pool::refuse_reserved(std::span<const BlockId> ids) const {
  for (const BlockId id : reserved_.empty() ? std::span<const BlockId>{} : ids) {
    if (!std::binary_search(reserved_.begin(), reserved_.end(), id)) continue;
    return Error{Errc::kDoubleFree, "block " + std::to_string(id) +
                                        " is reserved and was never handed out; call "
                                        "free_reserved() to give reserved blocks back"};
  }
  return ok();
}

Status Pool::free(std::span<const BlockId> ids) {
  Lock lock(mutex_);
  if (Status handed_out = refuse_reserved(ids); !handed_out) return handed_out;
  if (Status freed = blocks_->free(ids); !freed) return freed;
  given_back(lock);
  return ok();
}

Status Pool::cache(std::span<const BlockId> ids) {
  Lock lock(mutex_);
  if (Status handed_out = refuse_reserved(ids); !handed_out) return handed_out;
  if (Status cached = blocks_->cache(ids); !cached) return cached;
  evict_over_bound();
  given_back(lock);
  return ok();
}

/// After blocks left use. Over the limit the engine's own thread goes down the ladder: an engine
/// that preempts a request to make room asks for blocks again at once.
void Pool::given_back(Lock& lock) {
  ++counts_.frees;
  if (record_) record_->add(Counter::kFrees);
  note_activity();
  if (over_pages() > 0) {
    // Only tried for: who is in a session may be waiting for this very thread.
    const std::unique_lock session(session_, std::try_to_lock);
    // A failure leaves the pool over its limit, and the keeper tries again.
    if (session) (void)enforce(lock);
  }
  changed();
}

Status Pool::touch(std::span<const BlockId> ids) {
  const Lock lock(mutex_);
  Status touched = blocks_->touch(ids);
  note_activity();
  changed();
  return touched;
}

void Pool::evict_over_bound() {
  if (options_.max_cached_blocks < 0) return;
  const auto bound = static_cast<std::uint64_t>(options_.max_cached_blocks);
  if (blocks_->cached_blocks() <= bound) return;
  // In another thread's session nothing is evicted: the next cache() makes up for it.
  const std::unique_lock session(session_, std::try_to_lock);
  if (!session) return;
  const std::size_t before = evicted_.size();
  // Whole pages where that does not cost more blocks than the bound asks for, since only a whole
  // page is memory given back; the oldest blocks for the rest.
  while (blocks_->cached_blocks() > bound) {
    const std::optional<std::uint32_t> cost = blocks_->cheapest_page_cost();
    if (cost && *cost <= blocks_->cached_blocks() - bound) {
      (void)blocks_->evict_cheapest_page(evicted_);
    } else {
      (void)blocks_->evict_oldest_block(evicted_);
    }
  }
  note_evicted(before);
}

void Pool::note_evicted(std::size_t before) {
  const std::size_t count = evicted_.size() - before;
  if (count == 0) return;
  counts_.blocks_evicted += count;
  if (record_) record_->add(Counter::kBlocksEvicted, count);
  has_evicted_.store(true, std::memory_order_release);
}

std::vector<Pool::Change> Pool::take_changes() {
  const Lock lock(mutex_);
  has_evicted_.store(false, std::memory_order_release);
  std::vector<Change> changes = std::exchange(history_, {});
  for (const BlockId id : std::exchange(evicted_, {})) changes.push_back({id, Change::kEvicted});
  return changes;
}

std::vector<BlockId> Pool::take_evicted() {
  const Lock lock(mutex_);
  has_evicted_.store(false, std::memory_order_release);
  return std::exchange(evicted_, {});
}

void Pool::clear() {
  const std::lock_guard session(session_);
  Lock lock(mutex_);
  discard_everything();
  (void)enforce(lock);
  changed();
}

void Pool::discard_everything() {
  reserved_.clear();
  const std::size_t before = evicted_.size();
  blocks_->clear(evicted_);
  note_evicted(before);
}

Result<std::uint64_t> Pool::close(bool discard) {
  const std::lock_guard session(session_);
  Lock lock(mutex_);
  asleep_ = true;  // from here on the limit has room for no page
  if (!final_error_) {
    final_error_ = Error{Errc::kPoolFailed, "the pool is closed; make another one"};
    failed_.store(true, std::memory_order_relaxed);
  }
  settled_.wait(lock, [this] { return held_pages_ == blocks_->mapped_pages(); });
  if (discard) discard_everything();
  Status done = enforce(lock);
  changed();
  record_.reset();
  if (!done) return done.error();
  return held_pages_;
}

// --- pages -----------------------------------------------------------------------------------

/// Whether get_pages would have anything to do that takes time: to map, to wait, or to ask others.
/// False: what is mapped is all there is for now. `own_entries`: as of may_wait.
bool Pool::pages_may_come(std::uint32_t own_entries) const {
  if (mappable_pages() == 0) return pages_are_coming();
  if (starved_pages_ == 0) return true;
  const Wait wait = may_wait(own_entries);
  const Clock::time_point now = Clock::now();
  // Others were asked a moment ago and had nothing: the keeper goes on asking them.
  return now - starved_at_ >= kAskAgain || wait.until > now || member_->room(page_cost_bytes()) > 0;
}

/// Whether another thread has pages on the way that this one may use.
bool Pool::pages_are_coming() const {
  return held_pages_ != blocks_->mapped_pages() && over_pages() == 0;
}

/// Maps pages for `blocks` more blocks, or waits for pages that another thread has on the way.
/// False: the limit has no room for another page.
Result<bool> Pool::get_pages(Lock& lock, std::uint64_t blocks, const Wait& wait) {
  if (mappable_pages() > 0) {
    const std::uint64_t pages = std::min(pages_for(blocks), mappable_pages());
    Result<std::uint64_t> grown = grow(lock, pages);
    if (!grown) return grown.error();
    if (*grown == pages) note_satisfied();
    return *grown > 0 || wait_for_grant(lock, pages, wait);
  }
  if (!pages_are_coming()) return false;
  settled_.wait(lock);
  return true;
}

/// Remembers a failure after which nobody knows what is mapped. A page that is said to be mapped
/// and is not would be a fault in the engine, far from here.
void Pool::note_if_final(const Status& answered) {
  if (answered || final_error_ || !is_final(answered.error())) return;
  final_error_ = answered.error();
  // That call waited; those to come do not.
  if (final_error_->code == Errc::kChannelTimeout) final_error_->code = Errc::kChannelClosed;
  failed_.store(true, std::memory_order_relaxed);
  note_arrival();  // whoever waits for blocks is to hear of it from the next alloc
}

/// `own_entries` is how often the call itself has entered the session. In a session of the caller's
/// nobody waits: it counts on an answer at once, and the keeper could serve nobody meanwhile.
Pool::Wait Pool::may_wait(std::uint32_t own_entries) const {
  const Clock::time_point now = Clock::now();
  const bool in_session = session_.is_mine() && session_.depth() > own_entries;
  if (!member_ || in_session || now < no_wait_before_) return {now, false};
  return {now + options_.reclaim_wait, own_entries > 0};
}

/// Waits, without the pool's lock and without the session, until the device has a page for this
/// pool that others give up. What is missing after that is the keeper's to pursue.
bool Pool::wait_for_grant(Lock& lock, std::uint64_t pages, const Wait& wait) {
  if (!member_) return false;
  const std::uint64_t page_bytes = page_cost_bytes();
  lock.unlock();
  if (wait.holds_session) session_.unlock();
  bool there = false, waited = false;
  for (;;) {
    const std::uint32_t seen = member_->bell();
    const bool hope = member_->ask(pages * page_bytes);
    there = member_->room(page_bytes) > 0;
    const Clock::time_point now = Clock::now();
    if (there || !hope || now >= wait.until) break;
    const std::chrono::nanoseconds patience(member_->rules().patience_ns);
    member_->wait(seen, std::min<std::chrono::nanoseconds>(wait.until - now, patience));
    waited = true;
  }
  if (wait.holds_session) session_.lock();
  lock.lock();
  if (there) return true;
  if (waited) no_wait_before_ = Clock::now() + kFruitlessWaits * options_.reclaim_wait;
  starved_pages_ = pages;
  starved_at_ = wanted_at_ = Clock::now();
  changed();
  return false;
}

std::optional<Error> Pool::failure() const {
  const Lock lock(mutex_);
  return final_error_;
}

/// Everything that was asked for is there.
void Pool::note_satisfied() {
  starved_pages_ = 0;
  pursuit_called_ = false;  // until then the keeper looks by itself
  no_wait_before_ = {};
  if (member_) member_->stop_asking();
}

bool Pool::pursue() {
  Lock lock(mutex_);
  if (starved_pages_ == 0 || !member_) return pursuit_called_ = false;
  const std::chrono::nanoseconds lease(member_->rules().ask_lease_ns);
  const std::uint64_t wanted = std::min(starved_pages_, mappable_pages());
  const Clock::time_point now = Clock::now();
  if (awaiting_ > 0) wanted_at_ = now;
  if (wanted == 0 || now - wanted_at_ > lease) {
    note_satisfied();
    return false;
  }
  Result<std::uint64_t> grown = grow(lock, wanted);
  if (grown) starved_pages_ -= std::min(*grown, starved_pages_);
  if (!grown || starved_pages_ == 0) {
    note_satisfied();
    return false;
  }
  const std::uint64_t bytes = starved_pages_ * page_cost_bytes();
  lock.unlock();
  (void)member_->ask(bytes);
  return true;
}

/// Maps at most `pages` pages, as many as the ledger grants and the limit has room for; answers how
/// many. In batches, so that who waits for some of them need not wait for all: zeroing a GiB takes
/// a tenth of a second. A failure after the first batch leaves what is mapped, and comes up again.
Result<std::uint64_t> Pool::grow(Lock& lock, std::uint64_t pages) {
  std::uint64_t grown = 0;
  while (grown < pages && mappable_pages() > 0) {
    const std::uint64_t next = std::min({pages - grown, mappable_pages(), batch_pages()});
    Result<std::uint64_t> got = grow_by_batch(lock, next);
    if (!got) {
      if (grown == 0 || final_error_) return got.error();
      break;
    }
    grown += *got;
    if (*got < next) break;
  }
  return grown;
}

/// All of the pages that are granted, or none.
Result<std::uint64_t> Pool::grow_by_batch(Lock& lock, std::uint64_t pages) {
  const std::uint64_t page_bytes = page_cost_bytes();
  std::vector<PageIndex> batch;
  batch.reserve(pages);  // what throws does so before anything is taken
  if (member_) pages = member_->grant(pages, page_bytes);
  if (pages == 0) return std::uint64_t{0};
  for (std::uint64_t i = 0; i < pages; ++i) {
    const std::optional<PageIndex> page = blocks_->take_unmapped();
    if (!page) break;
    batch.push_back(*page);
  }
  if (member_) member_->give_back(pages - batch.size(), page_bytes);
  if (batch.empty()) {
    return Error{Errc::kPoolExhausted, "every page of the range is mapped or on its way"};
  }
  held_pages_ += batch.size();
  lock.unlock();
  Status mapped = guarded([&] { return backing_->map(batch); });
  lock.lock();
  note_if_final(mapped);
  for (const PageIndex page : batch) mapped ? blocks_->add_page(page) : blocks_->put_back(page);
  if (mapped) {
    counts_.pages_mapped_ever += batch.size();
    // A page is created to be mapped and destroyed when it is unmapped: none is kept in between.
    if (record_) {
      record_->add(Counter::kPagesCreated, batch.size());
      record_->add(Counter::kPagesMapped, batch.size());
    }
  } else {
    held_pages_ -= batch.size();
    // After a final failure nobody knows what is mapped: what was granted stays taken.
    if (member_ && !final_error_) member_->give_back(batch.size(), page_bytes);
  }
  settled_.notify_all();
  changed();
  if (!mapped) return mapped.error();
  return static_cast<std::uint64_t>(batch.size());
}

Status Pool::shrink(Lock& lock, std::uint64_t pages) {
  std::vector<PageIndex> batch;
  batch.reserve(std::min(pages, blocks_->parked_pages()));
  for (std::uint64_t i = 0; i < pages; ++i) {
    const std::optional<PageIndex> page = blocks_->take_parked();
    if (!page) break;
    batch.push_back(*page);
  }
  return unmap(lock, batch);
}

Status Pool::unmap(Lock& lock, const std::vector<PageIndex>& batch) {
  if (batch.empty()) return ok();
  changed();
  lock.unlock();
  Status unmapped = guarded([&] { return backing_->unmap(batch); });
  lock.lock();
  note_if_final(unmapped);
  for (const PageIndex page : batch) unmapped ? blocks_->put_back(page) : blocks_->add_page(page);
  if (unmapped) {
    held_pages_ -= batch.size();
    if (member_) member_->give_back(batch.size(), page_cost_bytes());
    counts_.pages_unmapped_ever += batch.size();
    if (record_) {
      record_->add(Counter::kPagesUnmapped, batch.size());
      record_->add(Counter::kPagesDestroyed, batch.size());
    }
  }
  settled_.notify_all();
  changed();
  return unmapped;
}

/// Moves the cached blocks of one page into holes of others. 0: there is no such page.
Result<std::uint64_t> Pool::compact_page(Lock& lock) {
  std::vector<BlockMove> moves;
  if (!options_.movable || failed() || !blocks_->take_compaction(moves)) return std::uint64_t{0};
  changed();
  lock.unlock();
  Status copied = guarded([&] { return backing_->copy(moves); });
  lock.lock();
  note_if_final(copied);
  // Evictions so far come before these moves: an id that was evicted may be where a block moves to.
  for (const BlockId id : std::exchange(evicted_, {})) history_.push_back({id, Change::kEvicted});
  std::uint64_t moved = 0;
  for (const BlockMove& move : moves) {
    if (!blocks_->finish_move(move, static_cast<bool>(copied))) continue;
    history_.push_back({move.from, move.to});
    ++moved;
  }
  if (!history_.empty()) has_evicted_.store(true, std::memory_order_release);
  counts_.blocks_moved += moved;
  if (record_) record_->add(Counter::kBlocksMoved, moved);
  changed();
  if (!copied) return copied.error();
  return moved;
}

Result<std::uint64_t> Pool::compact() {
  const std::lock_guard session(session_);
  Lock lock(mutex_);
  return compact_page(lock);
}

/// Parks one more page: by moving what is cached on it, or else by evicting that.
bool Pool::empty_a_page(Lock& lock) {
  Result<std::uint64_t> moved = compact_page(lock);
  if (moved && *moved > 0) return true;
  const std::size_t before = evicted_.size();
  const bool evicted = blocks_->evict_cheapest_page(evicted_);
  note_evicted(before);
  return evicted;
}

Status Pool::enforce(Lock& lock) {
  enforcing_ = true;
  const auto over = [this](void*) { enforcing_ = false; };
  const std::unique_ptr<void, decltype(over)> ends(this, over);  // also by an exception
  return go_down_the_ladder(lock);
}

/// Whether enforce() would find something to give: a state, so it does not matter in which order
/// the limit, the blocks and the pages came to be so.
bool Pool::enforcing_due() const {
  if (over_pages() == 0 || final_error_) return false;
  const bool null_page_only = asleep_ && held_pages_ == 1 && blocks_->null_page_is_bare();
  return blocks_->parked_pages() > 0 || blocks_->cached_blocks() > 0 || !reserved_.empty() ||
         null_page_only;
}

Status Pool::go_down_the_ladder(Lock& lock) {
  if (asleep_) evict_everything();  // what is moved first would only be evicted later
  if (over_pages() > blocks_->parked_pages()) (void)drop_reserved();
  while (over_pages() > 0) {
    while (blocks_->parked_pages() < over_pages() && empty_a_page(lock)) {
    }
    if (blocks_->parked_pages() == 0) break;  // what is left is in use
    if (Status given = shrink(lock, over_pages()); !given) return given;
  }
  // Each page given back leaves one less to drain.
  if (blocks_->closed_pages() != over_pages()) blocks_->close_pages(over_pages());
  if (over_pages() == 0) return ok();
  // Cached blocks now only lie on pages in use. They make way, too: with none of them in between,
  // the blocks that may be used fit into the fullest pages, and those over the limit get no new
  // ones and drain.
  evict_everything();
  // The last page goes only in sleep, and only when no other is mapped or on its way: whoever finds
  // a page mapped may count on the null block.
  if (asleep_ && held_pages_ == 1 && blocks_->mapped_pages() == 1) {
    if (const std::optional<PageIndex> last = blocks_->take_null_page())
      return unmap(lock, {*last});
  }
  return ok();
}

void Pool::evict_everything() {
  const std::size_t before = evicted_.size();
  while (blocks_->evict_oldest_block(evicted_)) {
  }
  note_evicted(before);
}

void Pool::set_asleep(bool asleep) {
  const std::lock_guard session(session_);
  const Lock lock(mutex_);
  asleep_ = asleep;
  blocks_->close_pages(over_pages());
  changed();
}

bool Pool::is_asleep() const {
  const Lock lock(mutex_);
  return asleep_;
}

LimitState Pool::set_limit(std::uint64_t limit_bytes) {
  const std::lock_guard session(session_);
  const Lock lock(mutex_);
  limit_bytes_ = limit_bytes;
  pages_limit_ = whole_pages(limit_bytes);
  blocks_->close_pages(over_pages());
  tell_limit();
  changed();
  return limit_state_locked();
}

bool Pool::see_capacity() {
  {
    const Lock lock(mutex_);
    if (capacity_bytes() == seen_capacity_bytes_) return false;
  }
  const std::lock_guard session(session_);
  const Lock lock(mutex_);
  seen_capacity_bytes_ = capacity_bytes();
  pages_limit_ = whole_pages(limit_bytes_);
  blocks_->close_pages(over_pages());
  tell_limit();
  note_arrival();  // with more of it, others than this pool may have come to give blocks
  changed();
  return true;
}

Result<LimitState> Pool::enforce_limit() {
  const std::lock_guard session(session_);
  Lock lock(mutex_);
  Status done = enforce(lock);
  changed();
  if (!done) return done.error();
  return limit_state_locked();
}

Result<std::uint64_t> Pool::trim(std::uint64_t most) {
  const std::lock_guard session(session_);
  Lock lock(mutex_);
  const std::uint64_t before = counts_.pages_unmapped_ever;
  if (Status given = shrink(lock, std::min(most, blocks_->parked_pages())); !given) {
    return given.error();
  }
  return counts_.pages_unmapped_ever - before;
}

Result<std::uint64_t> Pool::provision() {
  Lock lock(mutex_);
  // Only when demand has called for it: what was just trimmed must not come back by itself.
  if (!std::exchange(provision_called_, false)) return std::uint64_t{0};
  // The mark: what was taken since the last time, within the two bounds.
  const std::uint64_t mark = std::clamp(std::exchange(demand_pages_, 0),
                                        options_.min_reserved_pages, options_.max_reserved_pages);
  const std::uint64_t parked = blocks_->parked_pages();
  const std::uint64_t wanted = std::min(mark > parked ? mark - parked : 0, mappable_pages());
  if (wanted == 0) return std::uint64_t{0};
  ++counts_.provision_runs;
  if (record_) record_->add(Counter::kProvisionRuns);
  return grow(lock, wanted);
}

// --- giving to others ------------------------------------------------------------------------

Result<std::uint64_t> Pool::give_up(std::uint64_t pages, Depth depth, std::uint64_t min_bytes) {
  const std::lock_guard session(session_);
  Lock lock(mutex_);
  const std::uint64_t page_bytes = page_cost_bytes();
  const std::uint64_t kept = std::max<std::uint64_t>((min_bytes + page_bytes - 1) / page_bytes, 1);
  std::uint64_t target =
      std::max(held_pages_ > pages ? held_pages_ - pages : std::uint64_t{0}, kept);
  if (depth == Depth::kInUse) target = std::max(target, squeeze_floor());
  const std::uint64_t before = counts_.pages_unmapped_ever;
  while (held_pages_ > target) {
    const std::uint64_t next = std::min(held_pages_ - target, batch_pages());
    while (depth != Depth::kParked && blocks_->parked_pages() < next &&
           (drop_reserved() || empty_a_page(lock))) {
    }
    if (blocks_->parked_pages() == 0) break;
    if (Status given = shrink(lock, next); !given) return given.error();
  }
  if (depth == Depth::kInUse && held_pages_ > target) {
    squeezed_to_ = target;
    squeezed_until_ = Clock::now() + kSqueezeLease;
    blocks_->close_pages(over_pages());
    if (Status given = enforce(lock); !given) return given.error();
  }
  changed();
  return counts_.pages_unmapped_ever - before;
}

bool Pool::see_device() {
  const std::optional<DeviceMemory> memory = backing_->device_memory();
  if (!memory || !member_) return false;
  member_->see_device(memory->total_bytes, memory->free_bytes);
  return true;
}

/// Requests for blocks in use are repeated until they are met, and one that was written just before
/// the last page went is carried out just after: neither may take anything twice.
std::uint64_t Pool::squeeze_floor() const {
  if (squeezed_to_ != ~std::uint64_t{0}) return squeezed_to_;
  return Clock::now() < met_squeeze_until_ ? met_squeeze_to_ : 0;
}

bool Pool::expire_squeeze() {
  const Lock lock(mutex_);
  if (squeezed_to_ == ~std::uint64_t{0}) return false;
  if (over_pages() > 0 && Clock::now() < squeezed_until_) return true;
  if (over_pages() == 0) {
    met_squeeze_to_ = squeezed_to_;
    met_squeeze_until_ = Clock::now() + kRepeatedFor;
  }
  squeezed_to_ = ~std::uint64_t{0};
  blocks_->close_pages(over_pages());
  changed();
  return false;
}

std::uint64_t Pool::take_idle_parked() {
  const Lock lock(mutex_);
  return std::exchange(parked_low_, blocks_->parked_pages());
}

// --- figures ---------------------------------------------------------------------------------

/// Ids that may be handed out at once: what was asked for at start, or what the limit has room for.
std::uint64_t Pool::usable_blocks() const {
  if (asleep_) return 0;
  return std::min(options_.max_blocks, pages_limit() * geometry_.blocks_per_page) - 1;
}

std::vector<BlockId> Pool::reusable(std::span<const BlockId> ids) const {
  const Lock lock(mutex_);
  std::vector<BlockId> out(ids.begin(), ids.end());
  if (over_pages() == 0) return out;
  std::erase_if(out, [this](BlockId id) { return blocks_->is_closed(id); });
  const std::uint64_t others = in_use() - std::min<std::uint64_t>(ids.size(), in_use());
  const std::uint64_t usable = usable_blocks();
  const std::uint64_t room = usable > others ? usable - others : 0;
  const std::uint64_t without = count_available(Reach::kMapped);
  out.resize(std::min<std::uint64_t>(out.size(), room > without ? room - without : 0));
  return out;
}

std::uint64_t Pool::count_available(Reach reach) const {
  const std::uint64_t usable = usable_blocks();
  if (final_error_ || in_use() >= usable) return 0;
  const std::uint64_t there = at_hand() + blocks_->evictable_blocks();
  // Pages on their way in or out count as ones to come: an alloc that needs them waits for them.
  const std::uint64_t mapped = blocks_->mapped_pages();
  const std::uint64_t pages =
      reach == Reach::kLimit && mapped < pages_limit() ? pages_limit() - mapped : 0;
  // The first page ever mapped is page 0, whose null block is nobody's.
  const std::uint64_t null_block = pages > 0 && !blocks_->occupancy(0) ? 1 : 0;
  return std::min(usable - in_use(), there + pages * geometry_.blocks_per_page - null_block);
}

std::uint64_t Pool::available() const {
  const std::uint64_t within_limit = available_limit_.load(std::memory_order_relaxed);
  if (!member_ || within_limit == 0) return within_limit;
  const std::int64_t held = available_held_.load(std::memory_order_relaxed);
  const auto with = [&](std::uint64_t pages) {
    // No device has more pages than fit here by far; the limit is the smaller one then.
    const auto more =
        static_cast<std::int64_t>(std::min(pages, geometry_.pages) * geometry_.blocks_per_page);
    return std::min(within_limit,
                    static_cast<std::uint64_t>(std::max<std::int64_t>(held + more, 0)));
  };
  const std::uint64_t free_now = with(member_->room(page_cost_bytes()));
  if (free_now == within_limit) return within_limit;
  return with(member_->reach(page_cost_bytes()));
}

bool Pool::provisioning_due() const {
  return options_.preallocate && !provision_called_ && mappable_pages() > 0 && held_pages_ > 0 &&
         blocks_->parked_pages() < options_.min_reserved_pages && demand_pages_ > 0;
}

/// After every change of the accounting: publishes it, and says so when the keeper is needed.
void Pool::changed() {
  const std::uint64_t within_limit = count_available(Reach::kLimit);
  const std::uint64_t mapped = count_available(Reach::kMapped);
  const bool more = within_limit > available_limit_.load(std::memory_order_relaxed) ||
                    mapped > available_mapped_.load(std::memory_order_relaxed);
  available_limit_.store(within_limit, std::memory_order_relaxed);
  available_mapped_.store(mapped, std::memory_order_relaxed);
  if (more) note_arrival();
  const std::uint64_t coming = held_pages_ - blocks_->mapped_pages();
  const auto null_block = static_cast<std::int64_t>(blocks_->occupancy(0) ? 0 : 1);
  available_held_.store(
      static_cast<std::int64_t>(mapped + coming * geometry_.blocks_per_page) - null_block,
      std::memory_order_relaxed);
  over_limit_.store(over_pages() > 0, std::memory_order_relaxed);
  parked_low_ = std::min(parked_low_, blocks_->parked_pages());
  const Usage usage = usage_locked(within_limit);
  if (record_) record_->publish_usage(usage);
  if (member_) {
    const bool active = std::exchange(published_activity_, activity()) != activity();
    // Cached is what others can have of it: a page with a block in use stays, whatever else it has.
    // Blocks that are set aside lie together, as one alloc gave them, and make way as cached ones
    // do.
    const std::uint64_t pages =
        blocks_->evictable_pages() + reserved_.size() / geometry_.blocks_per_page;
    member_->publish(usage.in_use_bytes, pages * usage.page_bytes, usage.parked_bytes,
                     usage.page_bytes, active);
  }
  if (!wake_) return;
  // Pages that land after the last enforce() are its business too. While one runs it looks itself.
  // Where it failed the keeper has been called and tries again in its own time.
  const bool shrink = !enforcing_ && enforcing_due() && !shrink_called_;
  if (!enforcing_) shrink_called_ = enforcing_due();
  const bool provision = provisioning_due();
  const bool answer = over_pages() != announced_over_;
  const bool decay = !decay_armed_ && something_to_decay();
  const bool pursue = starved_pages_ > 0 && !pursuit_called_;
  const bool failure = final_error_ && !std::exchange(failure_announced_, true);
  if (!shrink && !provision && !answer && !decay && !pursue && !failure) return;
  pursuit_called_ = pursuit_called_ || pursue;
  provision_called_ = provision_called_ || provision;
  announced_over_ = over_pages();
  decay_armed_ = decay_armed_ || decay;
  wake_();
}

bool Pool::something_to_decay() const {
  return blocks_->parked_pages() > 0 || (options_.movable && blocks_->can_compact());
}

bool Pool::arm_decay() {
  const Lock lock(mutex_);
  return decay_armed_ = something_to_decay();
}

Usage Pool::usage_locked(std::uint64_t available) const {
  const std::uint64_t page_bytes = page_cost_bytes();
  const std::uint64_t block_share_bytes = page_bytes / geometry_.blocks_per_page;
  Usage usage;
  usage.capacity_bytes = capacity_bytes();
  usage.mapped_bytes = held_pages_ * page_bytes;
  usage.in_use_bytes = blocks_->used_blocks() * block_share_bytes;
  usage.cached_bytes = blocks_->cached_blocks() * block_share_bytes;
  usage.parked_bytes = blocks_->parked_pages() * page_bytes;
  usage.page_bytes = page_bytes;
  usage.blocks_total = options_.max_blocks;
  usage.blocks_in_use = in_use();
  usage.blocks_cached = blocks_->cached_blocks();
  usage.blocks_available = available;
  usage.blocks_reserved = reserved_.size();
  usage.pages_mapped = held_pages_;
  usage.pages_parked = blocks_->parked_pages();
  usage.pools = 1;
  usage.asleep = asleep_ ? 1 : 0;
  usage.limit_bytes = limit_bytes_;
  usage.squeezed = !asleep_ && squeezed_to_ < pages_limit_ ? 1 : 0;
  return usage;
}

Usage Pool::usage() const {
  const Lock lock(mutex_);
  return usage_locked(count_available(Reach::kLimit));
}

LimitState Pool::limit_state_locked() const {
  const std::uint64_t page_bytes = page_cost_bytes();
  return {limit_bytes_, pages_limit() * page_bytes, held_pages_ * page_bytes,
          over_pages() * page_bytes};
}

LimitState Pool::limit_state() const {
  const Lock lock(mutex_);
  return limit_state_locked();
}

std::uint64_t Pool::mapped_bytes() const {
  const Lock lock(mutex_);
  return held_pages_ * page_cost_bytes();
}

std::optional<std::uint32_t> Pool::occupancy(PageIndex page) const {
  const Lock lock(mutex_);
  return blocks_->occupancy(page);
}

PoolStats Pool::stats() const {
  const Lock lock(mutex_);
  PoolStats stats = counts_;
  stats.page_bytes = page_cost_bytes();
  stats.pages_total = geometry_.pages;
  stats.pages_limit = pages_limit();
  stats.pages_mapped = held_pages_;
  stats.pages_parked = blocks_->parked_pages();
  stats.blocks_total = options_.max_blocks;
  stats.blocks_used = in_use();
  stats.blocks_cached = blocks_->cached_blocks();
  stats.blocks_reserved = reserved_.size();
  stats.blocks_available = count_available(Reach::kLimit);
  return stats;
}

void Pool::publish_to(std::shared_ptr<RecordOwner> record) {
  const Lock lock(mutex_);
  record_ = std::move(record);
  changed();
}

void Pool::on_wanted(std::function<void()> wake) {
  const Lock lock(mutex_);
  wake_ = std::move(wake);
  shrink_called_ = provision_called_ = decay_armed_ = pursuit_called_ = false;
}

Status Pool::check_integrity() const {
  const Lock lock(mutex_);
  if (Status sound = blocks_->check_integrity(); !sound) return sound;
  if (held_pages_ < blocks_->mapped_pages()) {
    return Error{Errc::kIntegrity, "the pool holds " + std::to_string(held_pages_) +
                                       " pages, of which " +
                                       std::to_string(blocks_->mapped_pages()) + " are mapped"};
  }
  if (member_ && !final_error_) {
    if (Status granted = member_->check_integrity(held_pages_, page_cost_bytes()); !granted) {
      return granted;
    }
  }
  for (const BlockId id : reserved_) {
    if (id == Blocks::kNullBlock) return Error{Errc::kIntegrity, "the null block is reserved"};
  }
  if (has_evicted() == (evicted_.empty() && history_.empty())) {
    return Error{Errc::kIntegrity, "the mark of evicted blocks disagrees with their list"};
  }
  return ok();
}

}  // namespace kvelastic
