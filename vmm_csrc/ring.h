// Commands from the scheduler process to one worker process, through shared memory: page indices
// one way, results the other. No pickle, no socket, no Python on the worker's side.
//
//   scheduler                      shared memory                       worker
//   post(map, pages)  ->  entries[seq % kEntries] = command   ->  its thread wakes (posted bell),
//                         posted = seq + 1                        runs the command on its Range,
//   wait(seq)         <-  the entry's result, done = seq + 1  <-  answers (done bell)
//
// One producer at a time (RingBacking holds a lock), one consumer. An entry is written by the
// producer before `posted` passes it, by the worker before `done` passes it, by nobody at once.
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

namespace kvelastic {

/// The ring as it lies in shared memory. Only fixed-size integers: two builds must agree on it.
struct RingMemory {
  static constexpr std::uint32_t kMagic = 0x6b76726e;  // "kvrn"
  static constexpr std::uint32_t kVersion = 2;
  static constexpr std::size_t kEntries = 64;
  static constexpr std::size_t kPagesPerEntry = 480;

  enum class Command : std::uint32_t { kMap = 1, kUnmap = 2, kCopy = 3 };
  enum class WorkerState : std::uint32_t { kAbsent = 0, kServing = 1, kGone = 2 };

  struct Entry {
    std::uint32_t command;
    std::uint32_t count;
    std::uint32_t result;  ///< 0 = done, else 1 + Errc
    std::uint32_t message_bytes;
    std::array<char, 112> message;                    ///< why, cut to fit
    std::array<std::uint32_t, kPagesPerEntry> pages;  ///< kCopy: moves, four words each
  };

  std::uint32_t magic;
  std::uint32_t version;
  Geometry geometry;             ///< the scheduler's; a worker refuses to serve another one
  alignas(64) FutexWord posted;  ///< commands posted so far, modulo 2^32
  alignas(64) FutexWord done;    ///< commands answered so far, modulo 2^32
  alignas(64) std::atomic<std::uint32_t> worker_state;
  std::atomic<std::int32_t> worker_pid;
  std::atomic<std::uint64_t> worker_start_ticks;  ///< tells a reused pid from the worker's
  FutexWord attached;                             ///< bell: worker_state has changed
  std::atomic<std::uint64_t> device_total_bytes;  ///< as the worker sees its GPU; 0: the host
  std::atomic<std::uint64_t> device_free_bytes;
  alignas(64) std::array<Entry, kEntries> entries;
};
static_assert(std::is_standard_layout_v<RingMemory>);
static_assert(sizeof(RingMemory) <= 192 * 1024, "must fit the segment's ring area");

/// The scheduler's end. Thread-safe.
class RingBacking final : public Backing {
 public:
  /// Writes an empty ring into `memory`, which must outlive this object; `keep` is held as long.
  /// Fails with kInvalidArgument where the memory is too small or misaligned.
  static Result<std::unique_ptr<RingBacking>> create(std::span<std::byte> memory,
                                                     const Geometry& geometry,
                                                     std::chrono::nanoseconds timeout,
                                                     std::shared_ptr<void> keep);

  const Geometry& geometry() const { return memory_->geometry; }

  /// Blocks until a worker serves this ring. Fails with kChannelTimeout.
  Status wait_for_worker(std::chrono::nanoseconds timeout);

  /// Blocks until the worker has answered, at most the timeout given to create(). Fails with the
  /// worker's own error, with kChannelClosed when the worker is dead, with kChannelTimeout when it
  /// is late. A late worker may still carry the command out: the ring is closed then, for what is
  /// mapped is no longer known.
  Status map(std::span<const PageIndex> pages) override;
  Status unmap(std::span<const PageIndex> pages) override;
  Status copy(std::span<const BlockMove> moves) override;
  std::optional<DeviceMemory> device_memory() const override;
  /// The process that serves this ring, once there is one: its number and its start.
  std::pair<pid_t, std::uint64_t> worker() const {
    return {memory_->worker_pid.load(), memory_->worker_start_ticks.load()};
  }

 private:
  RingBacking(RingMemory* memory, std::chrono::nanoseconds timeout, std::shared_ptr<void> keep)
      : memory_(memory), timeout_(timeout), keep_(std::move(keep)) {}

  Status run(RingMemory::Command command, std::span<const PageIndex> pages);
  Status run_one(RingMemory::Command command, std::span<const PageIndex> pages);
  Status worker_is_alive() const;

  RingMemory* const memory_;
  const std::chrono::nanoseconds timeout_;
  const std::shared_ptr<void> keep_;
  std::mutex mutex_;  // one command at a time; nothing else is taken under it
  bool closed_ = false;
};

/// The worker's end: a thread that carries commands out on a Range until stopped.
class RingWorker {
 public:
  /// Starts serving. Fails with kSegmentFormat where the memory is no ring of this version,
  /// kInvalidArgument where the ring's geometry is not the range's, kChannelClosed where another
  /// live worker serves it already.
  static Result<std::unique_ptr<RingWorker>> start(std::span<std::byte> memory,
                                                   std::shared_ptr<Range> range,
                                                   std::shared_ptr<void> keep);
  ~RingWorker() { stop(); }
  RingWorker(const RingWorker&) = delete;
  RingWorker& operator=(const RingWorker&) = delete;

  /// Stops serving; blocks until the command in hand is done. Safe to call twice. In a forked child
  /// it does nothing.
  void stop();

 private:
  RingWorker(RingMemory* memory, std::shared_ptr<Range> range, std::shared_ptr<void> keep)
      : memory_(memory),
        range_(std::move(range)),
        keep_(std::move(keep)),
        started_by_(::getpid()) {}

  void serve();
  void look_at_device();
  void carry_out(RingMemory::Entry& entry);

  RingMemory* const memory_;
  const std::shared_ptr<Range> range_;
  const std::shared_ptr<void> keep_;
  const pid_t started_by_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace kvelastic
