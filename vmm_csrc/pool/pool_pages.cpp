#include "pool/pool_pages.h"

#include <algorithm>
#include <new>

namespace kvelastic {
namespace {

/// Returns the result of `call`, or kOutOfMemory if it runs out of memory for its lists, so that
/// the caller can complete the accounting in both cases.
template <typename F>
Status guarded(F call) {
  try {
    return call();
  } catch (const std::bad_alloc&) {
    return Error{Errc::kOutOfMemory, "out of memory"};
  }
}

}  // namespace

/// Releases the caller's lock during its lifetime; also the session, if a device is waited for and
/// no outer caller relies on it.
class PoolPages::Unlocked {
 public:
  Unlocked(Lock& lock, Session& session, bool may_let_go)
      : lock_(lock),
        session_(session),
        lets_go_(may_let_go && session.is_mine() && session.depth() == 1) {
    lock_.unlock();
    if (lets_go_) session_.unlock();
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;
  ~Unlocked() {
    if (lets_go_) session_.lock();
    lock_.lock();
  }

 private:
  Lock& lock_;
  Session& session_;
  const bool lets_go_;
};

bool is_final(const Error& error) {
  return error.code == Errc::kPoolFailed || error.code == Errc::kChannelClosed ||
         error.code == Errc::kChannelTimeout;
}

/// Schedules a measurement of other processes' memory: they may have taken the released memory, or
/// be visible only now.
void PoolPages::note_moved(std::uint64_t pages) {
  if (places_ && works_behind()) figures_.note_moved(pages);
}

/// Other processes, or a dead one, hold memory that the ledger has granted: measure the device now.
void PoolPages::note_refused() {
  refused_ = true;
  refusals_ = std::min(refusals_ + 1, kMostRefusals);
  if (places_ && works_behind()) figures_.note_refused();
}

/// Records a failure after which the mappings are unknown. Handing out a page that is not mapped
/// would crash the engine later.
void PoolPages::note_if_final(const Status& answered) {
  if (answered || accounting_.failure() || !is_final(answered.error())) return;
  Error error = answered.error();
  // Only this call waited for the timeout; later calls fail at once.
  if (error.code == Errc::kChannelTimeout) error.code = Errc::kChannelClosed;
  accounting_.fail(std::move(error));
  figures_.arrivals.note();  // threads that wait for blocks get the error from their next alloc
}

Result<std::uint64_t> PoolPages::grow(Lock& lock, std::uint64_t pages,
                                      const std::function<bool()>& interrupted) {
  const std::uint64_t largest = batch_pages();
  std::uint64_t grown = 0;
  for (std::uint64_t batch = std::min(pages_of(kFirstBatchBytes), largest);
       grown < pages && accounting_.mappable_pages() > 0; batch = std::min(2 * batch, largest)) {
    const std::uint64_t next = std::min({pages - grown, accounting_.mappable_pages(), batch});
    Result<std::uint64_t> got = grow_by_batch(lock, next);
    if (!got) {
      if (grown == 0 || accounting_.failure()) return got.error();
      break;
    }
    grown += *got;
    if (*got < next || (interrupted && interrupted())) break;
  }
  return grown;
}

/// All of the granted pages, or none.
Result<std::uint64_t> PoolPages::grow_by_batch(Lock& lock, std::uint64_t pages) {
  Blocks& blocks = accounting_.blocks();
  std::vector<PageIndex> batch;
  batch.reserve(pages);  // allocate before anything changes
  if (places_) pages = places_->grant(pages);
  if (pages == 0) return std::uint64_t{0};
  for (std::uint64_t i = 0; i < pages; ++i) {
    const std::optional<PageIndex> page = blocks.take_unmapped();
    if (!page) break;
    batch.push_back(*page);
  }
  if (places_) places_->give_back(pages - batch.size());
  if (batch.empty()) {
    return Error{Errc::kPoolExhausted, "every page of the range is mapped or on its way"};
  }
  if (Status mapped = map_granted(lock, batch); !mapped) return mapped.error();
  return static_cast<std::uint64_t>(batch.size());
}

Result<bool> PoolPages::grow_run(Lock& lock, std::vector<PageIndex> pages) {
  const std::uint64_t granted = places_ ? places_->grant(pages.size()) : pages.size();
  if (granted < pages.size()) {
    places_->give_back(granted);
    return false;
  }
  accounting_.blocks().take_unmapped(pages);
  if (Status mapped = map_granted(lock, pages); !mapped) return mapped.error();
  return true;
}

/// Pre: `batch` is granted and in transit.
Status PoolPages::map_granted(Lock& lock, const std::vector<PageIndex>& batch) {
  Blocks& blocks = accounting_.blocks();
  accounting_.hold(batch.size());
  lock.unlock();
  Status mapped = guarded([&] { return backing_->map(batch); });
  lock.lock();
  note_if_final(mapped);
  for (const PageIndex page : batch) mapped ? blocks.add_page(page) : blocks.put_back(page);
  if (mapped) {
    // Pages are created when mapped and destroyed when unmapped; none is kept in between.
    counters_.add(Counter::kPagesCreated, batch.size());
    counters_.add(Counter::kPagesMapped, batch.size());
    note_moved(batch.size());
    refusals_ = 0;
    if (places_) places_->arrived(batch.size());
  } else {
    accounting_.let_go(batch.size());
    if (mapped.error().code == Errc::kOutOfMemory) note_refused();
    // After a final failure the mappings are unknown: the grant stays, in transit.
    if (places_ && !accounting_.failure()) places_->give_back(batch.size());
  }
  settled_.notify_all();
  figures_.update();
  return mapped;
}

Result<std::uint64_t> PoolPages::shrink(Lock& lock, std::uint64_t pages) {
  std::vector<PageIndex> chosen;
  chosen.reserve(std::min(pages, accounting_.blocks().parked_pages()));
  for (std::uint64_t i = 0; i < pages; ++i) {
    const std::optional<PageIndex> page = accounting_.blocks().take_parked();
    if (!page) break;
    chosen.push_back(*page);
  }
  return unmap(lock, chosen, InSession::kMayLetGo);
}

Status PoolPages::unmap_null_page(Lock& lock) {
  // Code that finds a page mapped relies on the null block, so page 0 is unmapped last.
  if (accounting_.held_pages() != 1 || accounting_.moving_pages() > 0) return ok();
  const std::optional<PageIndex> page = accounting_.blocks().take_null_page();
  if (!page) return ok();
  // In the session: a waking thread must not map another page before this one.
  const Result<std::uint64_t> unmapped = unmap(lock, {*page}, InSession::kStay);
  return unmapped ? ok() : Status(unmapped.error());
}

/// Unmaps pages in transit; after a failure the rest counts as mapped again.
Result<std::uint64_t> PoolPages::unmap(Lock& lock, const std::vector<PageIndex>& pages,
                                       InSession session) {
  if (pages.empty()) return std::uint64_t{0};
  const bool waits = backing_->works_behind();
  const std::uint64_t largest = waits ? batch_pages() : pages.size();
  std::uint64_t batch_size = waits ? std::min(pages_of(kFirstBatchBytes), largest) : largest;
  accounting_.leave(pages.size());
  figures_.update();
  Status status = ok();
  std::uint64_t unmapped = 0;
  {
    std::mutex& mutex = *lock.mutex();
    const Unlocked unlocked(lock, session_, waits && session == InSession::kMayLetGo);
    status = guarded([&] { return backing_->drain(); });
    for (std::span<const PageIndex> rest(pages); !rest.empty();) {
      const std::span<const PageIndex> batch =
          rest.first(std::min<std::size_t>(rest.size(), batch_size));
      rest = rest.subspan(batch.size());
      batch_size = std::min(2 * batch_size, largest);
      if (status) status = unmap_now(batch);
      if (status) unmapped += batch.size();
      const std::lock_guard own(mutex);
      end_unmap(batch, status);
    }
  }
  if (!status && (unmapped == 0 || accounting_.failure())) return status.error();
  return unmapped;
}

/// After a final failure the mappings are unknown: the pages stay in transit in the ledgers.
Status PoolPages::unmap_now(std::span<const PageIndex> batch) {
  if (places_) places_->leaving(batch.size());
  Status done = guarded([&] { return backing_->unmap(batch); });
  if (places_ && !done && !is_final(done.error())) places_->arrived(batch.size());
  return done;
}

void PoolPages::end_unmap(std::span<const PageIndex> batch, const Status& unmapped) {
  Blocks& blocks = accounting_.blocks();
  note_if_final(unmapped);
  for (const PageIndex page : batch) unmapped ? blocks.put_back(page) : blocks.add_page(page);
  if (unmapped) {
    accounting_.left(batch.size());
    if (places_) places_->give_back(batch.size());
    counters_.add(Counter::kPagesUnmapped, batch.size());
    counters_.add(Counter::kPagesDestroyed, batch.size());
    note_moved(batch.size());
  } else {
    accounting_.stay(batch.size());
  }
  settled_.notify_all();
  figures_.update();
}

void PoolPages::drain_ahead(Lock& lock) {
  if (!backing_->works_behind()) return;
  const Unlocked unlocked(lock, session_, true);
  (void)guarded([&] { return backing_->drain(); });
}

Status PoolPages::copy(Lock& lock, std::span<const BlockMove> moves) {
  figures_.update();
  lock.unlock();
  Status copied = guarded([&] {
    Status finished = backing_->drain();
    return finished ? backing_->copy(moves) : finished;
  });
  lock.lock();
  note_if_final(copied);
  return copied;
}

Status PoolPages::copy_records(std::span<const BlockSlot> blocks,
                               const std::shared_ptr<Staging>& staging, CopyTo to) {
  return guarded([&] { return backing_->copy_records(blocks, staging, to); });
}

}  // namespace kvelastic
