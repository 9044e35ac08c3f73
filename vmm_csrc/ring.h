// Commands from the scheduler process to its worker processes, through shared memory: page indices
// one way, results the other. No pickle, no socket, no Python on the workers' side.
//
//   scheduler                      shared memory                       each worker (rank)
//   post(map, pages)  ->  entries[seq % kEntries] = command   ->  its thread wakes (posted bell),
//                         posted = seq + 1                        runs the command on its Range,
//   all are done      <-  each rank's result, done = seq + 1  <-  the last one rings (answered
//   bell)
//
// A command is one operation over all ranks. A page that is mapped in one of them is prepared, no
// more: no id of it is handed out before all have mapped it, and where one could not the others
// unmap it again. So there is nothing to commit but the answer.
//
// One producer at a time (RingBacking holds a lock), one consumer a rank. An entry is written by
// the producer before `posted` passes it, a rank's slot by its worker before its `done` does.
#pragma once

#include <unistd.h>

#include <array>
#include <chrono>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backing.h"
#include "futex.h"
#include "own_process.h"

namespace kvelastic {

/// The ring as it lies in shared memory. Only fixed-size integers: two builds must agree on it.
struct RingMemory {
  static constexpr std::uint32_t kMagic = 0x6b76726e;  // "kvrn"
  static constexpr std::uint32_t kVersion = 4;
  static constexpr std::size_t kEntries = 64;
  static constexpr std::size_t kPagesPerEntry = 480;
  static constexpr std::size_t kMaxRanks = 64;

  enum class Command : std::uint32_t { kMap = 1, kUnmap = 2, kCopy = 3, kNothing = 4 };
  /// A rank is taken once: what its worker had mapped, a later one would not have.
  enum class WorkerState : std::uint32_t { kAbsent = 0, kTaken = 1, kServing = 2, kGone = 3 };

  struct Entry {
    std::uint32_t command;
    std::uint32_t count;
    std::uint64_t ranks;                              ///< a bit each: who carries it out
    std::array<std::uint32_t, kPagesPerEntry> pages;  ///< kCopy: moves, four words each
  };

  /// One worker's own.
  struct alignas(64) Rank {
    FutexWord done;  ///< commands answered so far, modulo 2^32
    std::atomic<std::uint32_t> state;
    std::atomic<std::int32_t> pid;
    std::uint32_t result;                           ///< of the last command: 0, or 1 + Errc
    std::atomic<std::uint64_t> start_ticks;         ///< tells a reused pid from the worker's
    std::atomic<std::uint64_t> device_total_bytes;  ///< as it sees its GPU; 0: the host
    std::atomic<std::uint64_t> device_free_bytes;
    std::uint32_t message_bytes;
    std::array<char, 204> message;  ///< why, cut to fit
  };
  static_assert(sizeof(Rank) == 256);

  std::uint32_t magic;
  std::uint32_t version;
  Geometry geometry;  ///< the scheduler's; a worker refuses to serve another one
  std::uint32_t ranks;
  alignas(64) FutexWord posted;    ///< commands posted so far, modulo 2^32
  alignas(64) FutexWord answered;  ///< bell: every rank has answered
  FutexWord attached;              ///< bell: a rank's state has changed
  std::array<Rank, kMaxRanks> workers;
  alignas(64) std::array<Entry, kEntries> entries;
};
static_assert(std::is_standard_layout_v<RingMemory>);
static_assert(sizeof(RingMemory) <= 192 * 1024, "must fit the segment's ring area");

/// The scheduler's end. Thread-safe.
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
  Status unmap(std::span<const PageIndex> pages) override;
  Status copy(std::span<const BlockMove> moves) override;
  /// Asks every worker for nothing but an answer; fails as map. What a command costs at least.
  Status ping();
  /// Whether a process other than this one has been a worker and lives: its pages live with it.
  bool has_live_processes() const;
  /// Of the rank with the least free memory: a grant is good for the smallest.
  std::optional<DeviceMemory> device_memory() const override;
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
  Status wait_for_answers(std::uint32_t sequence);
  bool all_done(std::uint32_t sequence) const;
  Status close(Error why);
  std::string name_of(std::size_t rank) const;
  bool is_serving(std::size_t rank) const;

  RingMemory* const memory_;
  const std::chrono::nanoseconds timeout_;
  const std::shared_ptr<void> keep_;
  std::mutex mutex_;  // one command at a time; nothing else is taken under it
  bool closed_ = false;
};

/// The worker's end: a thread that carries commands out on a Range until stopped.
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

  /// Stops serving; blocks until the command in hand is done. Safe to call twice. In a forked child
  /// it does nothing.
  void stop();

 private:
  RingWorker(RingMemory* memory, std::shared_ptr<Range> range, std::size_t rank,
             std::shared_ptr<void> keep)
      : memory_(memory),
        own_(memory->workers[rank]),
        rank_(rank),
        range_(std::move(range)),
        keep_(std::move(keep)) {}

  void serve();
  bool look_at_device();
  bool is_last(std::uint32_t done) const;
  Status carry_out(const RingMemory::Entry& entry);

  RingMemory* const memory_;
  RingMemory::Rank& own_;
  const std::size_t rank_;
  const std::shared_ptr<Range> range_;
  const std::shared_ptr<void> keep_;
  const OwnProcess started_by_;
  std::atomic<bool> stopping_{false};
  std::atomic<bool> ended_{false};  // the thread has seen it
  std::thread thread_;
};

}  // namespace kvelastic
