// A worker's end of the ring (see ring_memory.h).
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

/// A thread that executes commands on a Range until it is stopped.
class RingWorker {
 public:
  /// Starts serving as `rank`. Fails with kSegmentFormat if the memory is not a ring of this
  /// version, kInvalidArgument if the rank does not exist or the geometry differs, and
  /// kChannelClosed if another worker is or was that rank.
  static Result<std::unique_ptr<RingWorker>> start(std::span<std::byte> memory,
                                                   std::shared_ptr<Range> range, std::size_t rank,
                                                   std::shared_ptr<void> keep);
  ~RingWorker() { stop(); }
  RingWorker(const RingWorker&) = delete;
  RingWorker& operator=(const RingWorker&) = delete;

  /// Stops serving. Blocks until the current command is complete, but not for a kernel: a scheduler
  /// that waits for a fence sees that this worker has ended. Idempotent. Does nothing in a forked
  /// child.
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
  // Used by the thread only:
  StagingWindow window_;
  std::shared_ptr<Staging> staging_;  // named last by the scheduler; null: none yet
  std::unique_ptr<Fence> fence_;      // null: no fence is pending
  std::uint32_t fence_number_ = 0;
  Pauses fence_pauses_;

  std::atomic<bool> stopping_{false};
  std::atomic<bool> ended_{false};  // the thread has seen `stopping_`
  std::thread thread_;
};

}  // namespace kvelastic
