// A worker's end of the ring; see ring_memory.h.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <thread>
#include <utility>

#include "base/own_process.h"
#include "base/pauses.h"
#include "pages/range.h"
#include "pages/staging_window.h"
#include "segment/ring_memory.h"

namespace kvelastic {

/// A thread that carries commands out on a Range until stopped.
class RingWorker {
 public:
  /// Starts serving as `rank`. Fails with kSegmentFormat where the memory is no ring of this
  /// version, kInvalidArgument where the ring has no such rank or its geometry is not the range's,
  /// kChannelClosed where another worker is, or was, that rank.
  static Result<std::unique_ptr<RingWorker>> start(std::span<std::byte> memory,
                                                   std::shared_ptr<Range> range, std::size_t rank,
                                                   std::shared_ptr<void> keep);
  ~RingWorker() { stop(); }
  RingWorker(const RingWorker&) = delete;
  RingWorker& operator=(const RingWorker&) = delete;

  /// Stops serving; blocks until the command in hand is done, and not for a kernel: who waits for a
  /// fence hears that this worker is gone. Safe to call twice. In a forked child it does nothing.
  void stop();

 private:
  RingWorker(RingMemory* memory, std::shared_ptr<Range> range, std::size_t rank,
             std::shared_ptr<void> keep)
      : memory_(memory),
        own_(memory->workers[rank]),
        rank_(rank),
        range_(std::move(range)),
        keep_(std::move(keep)),
        window_(range_, rank) {}

  void serve();
  std::chrono::nanoseconds look_around();
  Status look_at_device();
  void look_at_fence();
  Status begin_fence(std::uint32_t number);
  void end_fence(const Status& how);
  bool is_last(std::uint32_t done) const;
  Status carry_out(const RingMemory::Entry& entry);
  Status attach(const StagingName& name);
  Status copy_records(std::span<const std::uint32_t> words, CopyTo to);

  RingMemory* const memory_;
  RingMemory::Rank& own_;
  const std::size_t rank_;
  const std::shared_ptr<Range> range_;
  const std::shared_ptr<void> keep_;
  const OwnProcess started_by_;
  // The thread's own:
  StagingWindow window_;
  std::shared_ptr<Staging> staging_;  // as the scheduler named it last; null: not yet
  std::unique_ptr<Fence> fence_;      // null: none is waited for
  std::uint32_t fence_number_ = 0;
  Pauses fence_pauses_;

  std::atomic<bool> stopping_{false};
  std::atomic<bool> ended_{false};  // the thread has seen it
  std::thread thread_;
};

}  // namespace kvelastic
