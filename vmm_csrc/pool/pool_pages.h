// Maps and unmaps a pool's pages. Only this class calls the backing, so only it releases the pool's
// lock for that. Every call is made with the lock held, and the state may have changed when it
// returns. While the lock is released, the pages are held but neither mapped nor unmapped.
//
// On a GPU, pages are unmapped once the kernels queued before are done with them. A call that waits
// for this also releases the session if it is the only holder, so that other threads can map pages.
// The pages have been chosen by then, so a session that begins in the meantime loses nothing.
//
// With shared devices, the ledgers grant a page before it is created, and get it back after it is
// destroyed.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "base/session.h"
#include "ledger/places.h"
#include "pages/backing.h"
#include "pool/accounting.h"
#include "pool/counters.h"
#include "pool/figures.h"

namespace kvelastic {

/// Pages are mapped and unmapped in batches, so that a waiting thread can use the first early. Each
/// batch is twice the last, from one page (or this size) to the largest.
inline constexpr std::uint64_t kFirstBatchBytes = std::uint64_t{8} << 20;
inline constexpr std::uint64_t kLargestBatchBytes = std::uint64_t{32} << 20;
/// A GPU zeroes fast, and its cost is per call and handle: one call covers a run of pages.
inline constexpr std::uint64_t kLargestGpuBatchBytes = std::uint64_t{512} << 20;
/// A call blocks all other calls to its device, and its time grows with the handles: an H100 took
/// 13 ms for 256.
inline constexpr std::uint64_t kMostGpuBatchHandles = 16;
inline constexpr int kMostRefusals = 10;

/// Granted pages that were refused for lack of memory.
struct Refusals {
  bool is_unanswered;  ///< since memory was last known to be available
  int in_a_row;        ///< since the last successful map, at most kMostRefusals
};

/// True for a failure that a retry cannot fix, which the caller must report. Any other failure
/// means "no blocks now", which an engine's scheduler handles.
bool is_final(const Error& error);

class PoolPages {
 public:
  using Lock = std::unique_lock<std::mutex>;

  PoolPages(Accounting& accounting, Figures& figures, Counters& counters, Session& session,
            std::shared_ptr<Backing> backing, std::shared_ptr<Places> places)
      : accounting_(accounting),
        figures_(figures),
        counters_(counters),
        session_(session),
        backing_(std::move(backing)),
        places_(std::move(places)) {}

  /// Maps up to `pages` pages, as many as the ledgers grant and the limit allows, and returns how
  /// many. Works in batches, so that a thread that needs a few pages need not wait for all: zeroing
  /// a GiB takes a tenth of a second. A failure after the first batch keeps the mapped pages and
  /// recurs at the next call. `interrupted` is called before each further batch, with the lock
  /// held, and stops the call if true.
  Result<std::uint64_t> grow(Lock& lock, std::uint64_t pages,
                             const std::function<bool()>& interrupted = {});
  /// Maps exactly these pages, all or none. False: the ledgers do not grant all. Pre: they are
  /// unmapped, and the limit allows them.
  Result<bool> grow_run(Lock& lock, std::vector<PageIndex> pages);
  /// Unmaps up to `pages` parked pages and returns how many. All or none on the host. On a GPU they
  /// wait together and are unmapped in batches, so that others get the first early. After a failure
  /// the rest stays parked; it is returned only if no page was unmapped.
  Result<std::uint64_t> shrink(Lock& lock, std::uint64_t pages);
  /// Unmaps page 0 if it is the last page and holds only the null block.
  Status unmap_null_page(Lock& lock);
  /// Waits for the device without the session before blocks are copied in it. The copy then waits
  /// only for work submitted since. No effect on the host. A failure recurs in the copy.
  void drain_ahead(Lock& lock);
  /// Copies blocks of mapped pages.
  Status copy(Lock& lock, std::span<const BlockMove> moves);

  /// Pool::copy_records, without the lock: it uses no state of the pool.
  Status copy_records(std::span<const BlockSlot> blocks, const std::shared_ptr<Staging>& staging,
                      CopyTo to);
  std::uint64_t ranks() const { return backing_->ranks(); }

  /// Waits until a batch has been mapped or unmapped.
  void wait_for_a_batch(Lock& lock) { settled_.wait(lock); }
  /// Waits until no page is being unmapped.
  void wait_until_left(Lock& lock) {
    settled_.wait(lock, [this] { return !accounting_.is_leaving(); });
  }
  /// Waits until no page is in transit.
  void wait_until_settled(Lock& lock) {
    settled_.wait(lock, [this] { return accounting_.moving_pages() == 0; });
  }

  std::uint64_t unmapped_ever() const { return counters_[Counter::kPagesUnmapped]; }
  /// Pages of the largest batch.
  std::uint64_t batch_pages() const {
    if (!works_behind()) return pages_of(kLargestBatchBytes);
    const std::uint64_t handles_per_page = accounting_.geometry().extents_per_page;
    return std::min(pages_of(kLargestGpuBatchBytes),
                    std::max<std::uint64_t>(kMostGpuBatchHandles / handles_per_page, 1));
  }
  /// True if unmapping may wait for kernels.
  bool works_behind() const { return backing_->works_behind(); }
  /// Backing::device_memory(), without the lock.
  std::vector<std::optional<DeviceMemory>> device_memory() { return backing_->device_memory(); }
  void keep_free(std::uint64_t bytes) { backing_->keep_free(bytes); }
  std::vector<pid_t> other_processes() const { return backing_->other_processes(); }
  /// True if a page was refused for lack of memory since the last call.
  bool take_refusal() { return std::exchange(refused_, false); }
  Refusals refusals() const { return {refused_, refusals_}; }

 private:
  class Unlocked;

  /// At least one.
  std::uint64_t pages_of(std::uint64_t bytes) const {
    return std::max<std::uint64_t>(bytes / accounting_.page_bytes(), 1);
  }
  Result<std::uint64_t> grow_by_batch(Lock& lock, std::uint64_t pages);
  Status map_granted(Lock& lock, const std::vector<PageIndex>& batch);
  enum class InSession : bool { kStay, kMayLetGo };
  Result<std::uint64_t> unmap(Lock& lock, const std::vector<PageIndex>& pages, InSession session);
  Status unmap_now(std::span<const PageIndex> batch);
  void end_unmap(std::span<const PageIndex> batch, const Status& unmapped);
  void note_moved(std::uint64_t pages);
  void note_refused();
  void note_if_final(const Status& answered);

  Accounting& accounting_;
  Figures& figures_;
  Counters& counters_;
  Session& session_;
  const std::shared_ptr<Backing> backing_;
  const std::shared_ptr<Places> places_;  // null: the device is not shared
  std::condition_variable settled_;
  bool refused_ = false;
  int refusals_ = 0;
};

}  // namespace kvelastic
