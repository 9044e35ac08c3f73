// The scheduler's end of the ring to its workers; see ring_memory.h.
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
  /// is held as long. Fails with kInvalidArgument where the memory is too small or misaligned, or
  /// for more than RingMemory::kMaxRanks.
  static Result<std::unique_ptr<RingBacking>> create(std::span<std::byte> memory,
                                                     const Geometry& geometry, std::size_t ranks,
                                                     std::chrono::nanoseconds timeout,
                                                     std::shared_ptr<void> keep);

  const Geometry& geometry() const { return memory_->geometry; }

  /// Blocks until every rank has a worker. Fails with kChannelTimeout, naming those that have none.
  Status wait_for_workers(std::chrono::nanoseconds timeout);

  /// Blocks until every worker has answered, at most the timeout given to create(). Fails with the
  /// first failing worker's own error, nothing changed in any; with kChannelClosed when a worker is
  /// dead, with kChannelTimeout when one is late. A late worker may still carry the command out:
  /// the ring is closed then, for what is mapped is no longer known.
  Status map(std::span<const PageIndex> pages) override;
  /// False before wait_for_workers().
  bool works_behind() const override;
  /// Waits for kernels as long as they take: only a worker that does not look after them any more
  /// is late. Calls from several threads wait for each other.
  Status drain() override;
  Status unmap(std::span<const PageIndex> pages) override;
  Status copy(std::span<const BlockMove> moves) override;
  /// In several commands where there are many, with others in between: what asks for memory does
  /// not wait for all of them.
  Status copy_records(std::span<const BlockSlot> blocks, const std::shared_ptr<Staging>& staging,
                      CopyTo to) override;
  std::uint64_t ranks() const override { return memory_->ranks; }
  /// Asks every worker for nothing but an answer; fails as map. What a command costs at least.
  Status ping();
  /// Whether a process other than this one has been a worker and lives: its pages live with it.
  bool has_live_processes() const;
  std::vector<std::optional<DeviceMemory>> device_memory() override;
  void keep_free(std::uint64_t bytes) override { memory_->keep_free_bytes = bytes; }
  std::vector<pid_t> other_processes() const override;
  /// The processes that serve this ring, by rank: number and start; (0, 0): none yet.
  std::vector<std::pair<pid_t, std::uint64_t>> workers() const;

 private:
  RingBacking(RingMemory* memory, std::chrono::nanoseconds timeout, std::shared_ptr<void> keep)
      : memory_(memory), timeout_(timeout), keep_(std::move(keep)) {}

  using Ranks = std::uint64_t;  // a bit each
  Ranks all_ranks() const;

  /// What a command has come to in the ranks that carried it out.
  struct Outcome {
    Ranks done = 0;
    Status status = ok();  // the gravest failure; of several as grave, the first rank's
  };

  Status run(RingMemory::Command command, std::span<const PageIndex> pages);
  Status run_everywhere(RingMemory::Command command, std::span<const std::uint32_t> words);
  Outcome run_one(RingMemory::Command command, std::span<const std::uint32_t> words, Ranks ranks);
  std::uint32_t post(RingMemory::Command command, std::span<const std::uint32_t> words,
                     Ranks ranks);
  bool look_at_devices();
  Status wait_for_answers(std::uint32_t sequence);
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
  std::mutex drain_mutex_;            // one fence at a time; before mutex_
  std::uint32_t last_fence_ = 0;      // drain_mutex_
  std::shared_ptr<Staging> staging_;  // mutex_: what the workers have attached
  std::mutex mutex_;                  // one command at a time; nothing else is taken under it
  std::atomic<bool> closed_{false};
};

}  // namespace kvelastic
