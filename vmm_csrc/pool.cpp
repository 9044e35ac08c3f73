#include "pool.h"

#include <algorithm>
#include <string>

namespace kvelastic {
namespace {

/// A failure that a later try cannot mend: the caller must hear of it. Anything else is "no blocks
/// now", which an engine's scheduler knows how to live with.
bool is_final(const Error& error) {
  return error.code == Errc::kPoolFailed || error.code == Errc::kChannelClosed ||
         error.code == Errc::kChannelTimeout;
}

}  // namespace

Result<std::unique_ptr<Pool>> Pool::create(const Geometry& geometry,
                                           std::shared_ptr<Backing> backing,
                                           const PoolOptions& options) {
  if (options.min_reserved_pages > options.max_reserved_pages) {
    return Error{Errc::kInvalidArgument, "min_reserved_pages is " +
                                             std::to_string(options.min_reserved_pages) +
                                             ", more than max_reserved_pages, " +
                                             std::to_string(options.max_reserved_pages)};
  }
  if (options.max_blocks < 2) {
    return Error{Errc::kInvalidArgument, "max_blocks is " + std::to_string(options.max_blocks) +
                                             ", must be at least 2: the null block and one more"};
  }
  if (Status sound = geometry.check(1); !sound) return sound.error();
  Result<std::unique_ptr<Blocks>> blocks = Blocks::create(geometry);
  if (!blocks) return blocks.error();
  return std::unique_ptr<Pool>(new Pool(geometry, std::move(backing), options, *std::move(blocks)));
}

Pool::Pool(const Geometry& geometry, std::shared_ptr<Backing> backing, const PoolOptions& options,
           std::unique_ptr<Blocks> blocks)
    : geometry_(geometry),
      options_(options),
      backing_(std::move(backing)),
      blocks_(std::move(blocks)),
      limit_bytes_(options.limit_bytes),
      pages_limit_(whole_pages(options.limit_bytes)) {
  const Lock lock(mutex_);
  changed();
}

std::uint64_t Pool::whole_pages(std::uint64_t limit_bytes) const {
  const std::uint64_t bytes = std::min(limit_bytes, options_.capacity_bytes);
  // Page 0 holds the null block and is never given back, so one page is the least.
  return std::clamp<std::uint64_t>(bytes / geometry_.page_bytes(), 1, geometry_.pages);
}

// --- alloc -----------------------------------------------------------------------------------

/// Takes `count` blocks without mapping; pre: free and reserved blocks suffice.
bool Pool::blocks_at_hand(std::uint64_t count, std::vector<BlockId>& out) {
  if (reserved_.size() + blocks_->free_blocks() < count) return false;
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
  if (count <= count_available(true)) return blocks_at_hand(count, out.emplace());
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
  bool may_map = true;
  while (count <= count_available(may_map)) {
    std::vector<BlockId> ids;
    if (blocks_at_hand(count, ids)) return std::optional(std::move(ids));
    const std::uint64_t missing = count - reserved_.size() - blocks_->free_blocks();
    if (may_map) {
      Result<bool> got = get_pages(lock, missing);
      if (!got && is_final(got.error())) return got.error();
      may_map = got && *got;
      // The lock was let go of, and without another page there may not be enough: evicting what
      // cannot make `count` would lose contents for nothing.
      continue;
    }
    const std::size_t before = evicted_.size();
    for (std::uint64_t i = 0; i < missing; ++i) (void)blocks_->evict_oldest_block(evicted_);
    note_evicted(before);
  }
  note_failed_alloc();
  changed();  // what an attempt mapped or evicted stays so
  return std::optional<std::vector<BlockId>>();
}

Result<std::uint64_t> Pool::ensure(std::uint64_t count) {
  Lock lock(mutex_);
  if (final_error_) return *final_error_;
  while (count <= count_available(true)) {
    const std::uint64_t at_hand = reserved_.size() + blocks_->free_blocks();
    if (at_hand >= count) break;
    Result<bool> got = get_pages(lock, count - at_hand);
    if (!got && is_final(got.error())) return got.error();
    if (!got || !*got) break;
  }
  return count_available(false);
}

Result<bool> Pool::try_to_reserve(std::uint64_t count) {
  const std::lock_guard session(session_);
  // An alloc takes what is reserved first, so it is asked for the old and the new together.
  const std::uint64_t already = stats().blocks_reserved;
  if (count > available() && !failed()) return false;
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
  (void)blocks_->free(std::exchange(reserved_, {}));
  given_back(lock);
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
    if (session) {
      (void)enforce(lock);  // a failure leaves the pool over its limit, and the keeper tries again
    } else if (wake_) {
      wake_();
    }
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

std::vector<BlockId> Pool::take_evicted() {
  const Lock lock(mutex_);
  has_evicted_.store(false, std::memory_order_release);
  return std::exchange(evicted_, {});
}

void Pool::clear() {
  const std::lock_guard session(session_);
  Lock lock(mutex_);
  reserved_.clear();
  const std::size_t before = evicted_.size();
  blocks_->clear(evicted_);
  note_evicted(before);
  (void)enforce(lock);
  changed();
}

// --- pages -----------------------------------------------------------------------------------

/// Maps pages for `blocks` more blocks, or waits for pages that another thread has on the way.
/// False: the limit has no room for another page.
Result<bool> Pool::get_pages(Lock& lock, std::uint64_t blocks) {
  if (mappable_pages() > 0) {
    Status grown = grow(lock, std::min(pages_for(blocks), mappable_pages()));
    if (!grown) return grown.error();
    return true;
  }
  if (held_pages_ == blocks_->mapped_pages() || over_pages() > 0) return false;
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
}

Status Pool::grow(Lock& lock, std::uint64_t pages) {
  std::vector<PageIndex> batch;
  for (std::uint64_t i = 0; i < pages; ++i) {
    const std::optional<PageIndex> page = blocks_->take_unmapped();
    if (!page) break;
    batch.push_back(*page);
  }
  if (batch.empty()) {
    return Error{Errc::kPoolExhausted, "every page of the range is mapped or on its way"};
  }
  held_pages_ += batch.size();
  lock.unlock();
  Status mapped = backing_->map(batch);
  lock.lock();
  note_if_final(mapped);
  for (const PageIndex page : batch) mapped ? blocks_->add_page(page) : blocks_->put_back(page);
  if (mapped) {
    counts_.pages_mapped_ever += batch.size();
    if (record_) record_->add(Counter::kPagesMapped, batch.size());
  } else {
    held_pages_ -= batch.size();
  }
  settled_.notify_all();
  changed();
  return mapped;
}

Status Pool::shrink(Lock& lock, std::uint64_t pages) {
  std::vector<PageIndex> batch;
  for (std::uint64_t i = 0; i < pages; ++i) {
    const std::optional<PageIndex> page = blocks_->take_parked();
    if (!page) break;
    batch.push_back(*page);
  }
  if (batch.empty()) return ok();
  changed();
  lock.unlock();
  Status unmapped = backing_->unmap(batch);
  lock.lock();
  note_if_final(unmapped);
  for (const PageIndex page : batch) unmapped ? blocks_->put_back(page) : blocks_->add_page(page);
  if (unmapped) {
    held_pages_ -= batch.size();
    counts_.pages_unmapped_ever += batch.size();
    if (record_) record_->add(Counter::kPagesUnmapped, batch.size());
  }
  settled_.notify_all();
  changed();
  return unmapped;
}

Status Pool::enforce(Lock& lock) {
  while (over_pages() > 0) {
    const std::size_t before = evicted_.size();
    while (blocks_->parked_pages() < over_pages() && blocks_->evict_cheapest_page(evicted_)) {
    }
    note_evicted(before);
    if (blocks_->parked_pages() == 0) break;  // what is left is in use
    if (Status given = shrink(lock, over_pages()); !given) return given;
  }
  if (over_pages() == 0) return ok();
  // Cached blocks now only lie on pages in use. They make way, too: with none of them in between,
  // the blocks that may be used fit into the fullest pages, and those over the limit get no new
  // ones and drain.
  const std::size_t before = evicted_.size();
  while (blocks_->evict_oldest_block(evicted_)) {
  }
  note_evicted(before);
  return ok();
}

LimitState Pool::set_limit(std::uint64_t limit_bytes) {
  const std::lock_guard session(session_);
  const Lock lock(mutex_);
  limit_bytes_ = limit_bytes;
  pages_limit_ = whole_pages(limit_bytes);
  changed();
  return limit_state_locked();
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
  if (Status grown = grow(lock, wanted); !grown) return grown.error();
  return wanted;
}

std::uint64_t Pool::take_idle_parked() {
  const Lock lock(mutex_);
  return std::exchange(parked_low_, blocks_->parked_pages());
}

// --- figures ---------------------------------------------------------------------------------

/// Ids that may be handed out at once: what was asked for at start, or what the limit has room for.
std::uint64_t Pool::usable_blocks() const {
  return std::min(options_.max_blocks, pages_limit_ * geometry_.blocks_per_page) - 1;
}

std::uint64_t Pool::count_available(bool may_map) const {
  const std::uint64_t usable = usable_blocks();
  if (final_error_ || in_use() >= usable) return 0;
  const std::uint64_t there = reserved_.size() + blocks_->free_blocks() + blocks_->cached_blocks();
  // Pages on their way in or out count as ones to come: an alloc that needs them waits for them.
  const std::uint64_t mapped = blocks_->mapped_pages();
  const std::uint64_t pages = may_map && mapped < pages_limit_ ? pages_limit_ - mapped : 0;
  // The first page ever mapped is page 0, whose null block is nobody's.
  const std::uint64_t null_block = pages > 0 && !blocks_->occupancy(0) ? 1 : 0;
  return std::min(usable - in_use(), there + pages * geometry_.blocks_per_page - null_block);
}

bool Pool::provisioning_due() const {
  return options_.preallocate && !provision_called_ && mappable_pages() > 0 && held_pages_ > 0 &&
         blocks_->parked_pages() < options_.min_reserved_pages && demand_pages_ > 0;
}

/// After every change of the accounting: publishes it, and says so when the keeper is needed.
void Pool::changed() {
  available_.store(count_available(true), std::memory_order_relaxed);
  available_mapped_.store(count_available(false), std::memory_order_relaxed);
  over_limit_.store(over_pages() > 0, std::memory_order_relaxed);
  parked_low_ = std::min(parked_low_, blocks_->parked_pages());
  if (record_) record_->publish_usage(usage_locked());
  if (!wake_) return;
  const bool provision = provisioning_due();
  const bool answer = over_pages() != announced_over_;
  const bool decay = !decay_armed_ && blocks_->parked_pages() > 0;
  if (!provision && !answer && !decay) return;
  provision_called_ = provision_called_ || provision;
  announced_over_ = over_pages();
  decay_armed_ = decay_armed_ || decay;
  wake_();
}

bool Pool::arm_decay() {
  const Lock lock(mutex_);
  return decay_armed_ = blocks_->parked_pages() > 0;
}

Usage Pool::usage_locked() const {
  const std::uint64_t page_bytes = geometry_.page_bytes();
  const std::uint64_t block_share_bytes = page_bytes / geometry_.blocks_per_page;
  Usage usage;
  usage.capacity_bytes = options_.capacity_bytes;
  usage.mapped_bytes = held_pages_ * page_bytes;
  usage.in_use_bytes = blocks_->used_blocks() * block_share_bytes;
  usage.cached_bytes = blocks_->cached_blocks() * block_share_bytes;
  usage.parked_bytes = blocks_->parked_pages() * page_bytes;
  usage.page_bytes = page_bytes;
  usage.blocks_total = options_.max_blocks;
  usage.blocks_in_use = in_use();
  usage.blocks_cached = blocks_->cached_blocks();
  usage.blocks_available = count_available(true);
  usage.blocks_reserved = reserved_.size();
  usage.pages_mapped = held_pages_;
  usage.pages_parked = blocks_->parked_pages();
  usage.pools = 1;
  return usage;
}

Usage Pool::usage() const {
  const Lock lock(mutex_);
  return usage_locked();
}

LimitState Pool::limit_state_locked() const {
  const std::uint64_t page_bytes = geometry_.page_bytes();
  return {limit_bytes_, pages_limit_ * page_bytes, held_pages_ * page_bytes,
          over_pages() * page_bytes};
}

LimitState Pool::limit_state() const {
  const Lock lock(mutex_);
  return limit_state_locked();
}

std::uint64_t Pool::mapped_bytes() const {
  const Lock lock(mutex_);
  return held_pages_ * geometry_.page_bytes();
}

std::optional<std::uint32_t> Pool::occupancy(PageIndex page) const {
  const Lock lock(mutex_);
  return blocks_->occupancy(page);
}

PoolStats Pool::stats() const {
  const Lock lock(mutex_);
  PoolStats stats = counts_;
  stats.page_bytes = geometry_.page_bytes();
  stats.pages_total = geometry_.pages;
  stats.pages_limit = pages_limit_;
  stats.pages_mapped = held_pages_;
  stats.pages_parked = blocks_->parked_pages();
  stats.blocks_total = options_.max_blocks;
  stats.blocks_used = in_use();
  stats.blocks_cached = blocks_->cached_blocks();
  stats.blocks_reserved = reserved_.size();
  stats.blocks_available = count_available(true);
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
  provision_called_ = decay_armed_ = false;
}

Status Pool::check_integrity() const {
  const Lock lock(mutex_);
  if (Status sound = blocks_->check_integrity(); !sound) return sound;
  if (held_pages_ < blocks_->mapped_pages()) {
    return Error{Errc::kIntegrity, "the pool holds " + std::to_string(held_pages_) +
                                       " pages, of which " +
                                       std::to_string(blocks_->mapped_pages()) + " are mapped"};
  }
  for (const BlockId id : reserved_) {
    if (id == Blocks::kNullBlock) return Error{Errc::kIntegrity, "the null block is reserved"};
  }
  if (has_evicted() == evicted_.empty()) {
    return Error{Errc::kIntegrity, "the mark of evicted blocks disagrees with their list"};
  }
  return ok();
}

}  // namespace kvelastic
