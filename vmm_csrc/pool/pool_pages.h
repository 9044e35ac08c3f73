// Pages on their way in and out of a pool. The only place that calls the backing, and so the only
// one that lets go of the pool's lock for that: every call is made with it held, and may find other
// figures afterwards. Meanwhile the pages are held, neither mapped nor unmapped.
//
// On a GPU pages are unmapped when the kernels that were queued before are done with them. Who
// waits for that lets go of the session, too, where it is its own alone: others map pages
// meanwhile. The pages are chosen by then, so nothing is taken from a session that begins
// meanwhile.
//
// Where devices are shared, their ledgers grant a page before that is created, and have it back
// after it is destroyed.
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

/// Memory comes and goes back in batches, so that who waits can begin with the first: each is twice
/// the one before, from one page (or this) up to the largest.
inline constexpr std::uint64_t kFirstBatchBytes = std::uint64_t{8} << 20;
inline constexpr std::uint64_t kLargestBatchBytes = std::uint64_t{32} << 20;
/// A GPU zeroes fast and charges by the call and the handle: one call serves a run of neighbours.
inline constexpr std::uint64_t kLargestGpuBatchBytes = std::uint64_t{512} << 20;
/// A call holds up all other calls to its device, and takes longer with each handle: an H100 took
/// 13 ms for 256.
inline constexpr std::uint64_t kMostGpuBatchHandles = 16;
inline constexpr int kMostRefusals = 10;

/// Pages that were refused for want of memory although they were granted.
struct Refusals {
  bool is_unanswered;  ///< since memory was last said to be there
  int in_a_row;        ///< since pages were last mapped, kMostRefusals at most
};

/// A failure that a later try cannot mend: the caller must hear of it. Anything else is "no blocks
/// now", which an engine's scheduler knows how to live with.
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

  /// Maps at most `pages` pages, as many as all ledgers grant and the limit has room for; answers
  /// how many. In batches, so that who waits for some of them need not wait for all: zeroing a GiB
  /// takes a tenth of a second. A failure after the first batch leaves what is mapped, and comes up
  /// again. `interrupted` is asked before each batch but the first whether to leave it at that; it
  /// is called with the lock held.
  Result<std::uint64_t> grow(Lock& lock, std::uint64_t pages,
                             const std::function<bool()>& interrupted = {});
  /// Maps these very pages, all or none: false where the ledgers do not grant all of them. Pre:
  /// they are unmapped, and the limit has room for them.
  Result<bool> grow_run(Lock& lock, std::vector<PageIndex> pages);
  /// Unmaps at most `pages` parked pages; answers how many. All or none on the host. On a GPU they
  /// wait together and go in batches, so that others have the first of them early; a failure leaves
  /// the rest parked then, and comes up if nothing was unmapped.
  Result<std::uint64_t> shrink(Lock& lock, std::uint64_t pages);
  /// Unmaps page 0, where it is the last and holds nothing but the null block.
  Status unmap_null_page(Lock& lock);
  /// Waits for the device without the session, before blocks are copied in it: the copy then has to
  /// wait only for work that came meanwhile. Nothing on the host. A failure comes up in the copy.
  void drain_ahead(Lock& lock);
  /// Copies blocks of mapped pages.
  Status copy(Lock& lock, std::span<const BlockMove> moves);

  /// As Pool::copy_records. Without the lock: nothing of the pool's state is in it.
  Status copy_records(std::span<const BlockSlot> blocks, const std::shared_ptr<Staging>& staging,
                      CopyTo to);
  std::uint64_t ranks() const { return backing_->ranks(); }

  /// Waits until a batch has come in or gone out.
  void wait_for_a_batch(Lock& lock) { settled_.wait(lock); }
  /// Waits until no page is on its way out.
  void wait_until_left(Lock& lock) {
    settled_.wait(lock, [this] { return !accounting_.is_leaving(); });
  }
  /// Waits until no page is on its way.
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
  /// Whether unmapping may have to wait for kernels.
  bool works_behind() const { return backing_->works_behind(); }
  /// As Backing::device_memory. Called without the lock.
  std::vector<std::optional<DeviceMemory>> device_memory() { return backing_->device_memory(); }
  void keep_free(std::uint64_t bytes) { backing_->keep_free(bytes); }
  std::vector<pid_t> other_processes() const { return backing_->other_processes(); }
  /// Whether a page was refused for want of memory since this was last asked.
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
  const std::shared_ptr<Places> places_;  // null: nobody shares the device
  std::condition_variable settled_;
  bool refused_ = false;
  int refusals_ = 0;
};

}  // namespace kvelastic
