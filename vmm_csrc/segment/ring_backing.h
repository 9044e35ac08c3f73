// The scheduler's end of the ring to its workers (see ring_memory.h).
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "pages/backing.h"
#include "segment/ring_memory.h"

namespace kvelastic {

/// Thread-safe.
class RingBacking final : public Backing {
 public:
  /// Writes an empty ring for `ranks` workers into `memory`, which must outlive this object; `keep`
  /// is held as long. Fails with kInvalidArgument if the memory is too small or misaligned, or for
  /// more than RingMemory::kMaxRanks.
  static Result<std::unique_ptr<RingBacking>> create(std::span<std::byte> memory,
                                                     const Geometry& geometry, std::size_t ranks,
                                                     std::chrono::nanoseconds timeout,
                                                     std::shared_ptr<void> keep);

  const Geometry& geometry() const { return memory_->geometry; }

  /// Blocks until every rank has a worker. Fails with kChannelTimeout, naming the missing ranks.
  Status wait_for_workers(std::chrono::nanoseconds timeout);

  /// Blocks until every worker has replied, at most for the timeout of create(). Fails with the
  /// first failing worker's error, with nothing changed in any worker. Fails with kChannelClosed if
  /// a worker is dead, and with kChannelTimeout if one is late. A late worker may still execute the
  /// command; the mappings are then unknown, so the ring is closed.
  Status map(std::span<const PageIndex> pages) override;
  /// False before wait_for_workers().
  bool works_behind() const override;
  /// Waits for kernels without a deadline. A worker counts as late only if it stops polling the
  /// fence. Concurrent calls are serialised.
  Status drain() override;
  Status unmap(std::span<const PageIndex> pages) override;
  Status copy(std::span<const BlockMove> moves) override;
  /// Splits a large copy into several commands, so that a map can run in between.
  Status copy_records(std::span<const BlockSlot> blocks, const std::shared_ptr<Staging>& staging,
                      CopyTo to) override;
  std::uint64_t ranks() const override { return memory_->ranks; }
  /// Sends a command that does nothing: the minimum cost of a command. Fails as map().
  Status ping();
  /// True if another process has been a worker and is alive: its pages exist as long as it lives.
  bool has_live_processes() const;
  std::vector<std::optional<DeviceMemory>> device_memory() override;
  void keep_free(std::uint64_t bytes) override { memory_->keep_free_bytes = bytes; }
  std::vector<pid_t> other_processes() const override;
  /// The processes that serve this ring, by rank: pid and start time; (0, 0) if not attached yet.
  std::vector<std::pair<pid_t, std::uint64_t>> workers() const;

 private:
  RingBacking(RingMemory* memory, std::chrono::nanoseconds timeout, std::shared_ptr<void> keep)
      : memory_(memory), timeout_(timeout), keep_(std::move(keep)) {}

  using Ranks = std::uint64_t;  // one bit per rank
  Ranks all_ranks() const;

  /// The result of a command in the ranks that executed it.
  struct Outcome {
    Ranks done = 0;
    Status status = ok();  // the most severe failure; among equals, the lowest rank's
  };

  Status run(RingMemory::Command command, std::span<const PageIndex> pages);
  Status run_everywhere(RingMemory::Command command, std::span<const std::uint32_t> words);
  Outcome run_one(RingMemory::Command command, std::span<const std::uint32_t> words, Ranks ranks);
  std::uint32_t post(RingMemory::Command command, std::span<const std::uint32_t> words,
                     Ranks ranks);
  bool look_at_devices();
  Status wait_for_replies(std::uint32_t sequence);
  bool all_done(std::uint32_t sequence) const;
  Status wait_for_fence(std::uint32_t number);
  Status refuse_if_closed() const;
  Status close(Error why);
  Status gone(std::size_t rank);
  Status late(const std::string& names);
  Error failure_of(std::size_t rank, std::uint32_t result, const RingMemory::Reason& reason) const;
  std::string name_of(std::size_t rank) const;
  bool is_serving(std::size_t rank) const;

  RingMemory* const memory_;
  const std::chrono::nanoseconds timeout_;
  const std::shared_ptr<void> keep_;
  std::mutex drain_mutex_;        // one fence at a time; taken before mutex_
  std::uint32_t last_fence_ = 0;  // drain_mutex_
  std::shared_ptr<Staging>
      staging_;       // guarded by mutex_: the staging that the workers have attached
  std::mutex mutex_;  // one command at a time; a leaf lock
  std::atomic<bool> closed_{false};
};

}  // namespace kvelastic
