#include "ring.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "process.h"

namespace kvelastic {
namespace {

using std::chrono::nanoseconds;
using Clock = std::chrono::steady_clock;

/// How often a waiting scheduler looks whether its worker is still there.
constexpr nanoseconds kLivenessInterval = std::chrono::milliseconds(50);
/// How often a serving worker wakes to see that it should stop, should a wake-up be lost.
constexpr nanoseconds kServeInterval = std::chrono::seconds(1);

Result<RingMemory*> as_ring(std::span<std::byte> memory) {
  if (memory.size() < sizeof(RingMemory)) {
    return Error{Errc::kInvalidArgument, "a ring needs " + std::to_string(sizeof(RingMemory)) +
                                             " bytes, the memory given has " +
                                             std::to_string(memory.size())};
  }
  if (reinterpret_cast<std::uintptr_t>(memory.data()) % alignof(RingMemory) != 0) {
    return Error{Errc::kInvalidArgument, "a ring must lie at a multiple of " +
                                             std::to_string(alignof(RingMemory)) + " bytes"};
  }
  return reinterpret_cast<RingMemory*>(memory.data());
}

nanoseconds until(Clock::time_point deadline) {
  return deadline == Clock::time_point::max() ? kForever
                                              : std::max(deadline - Clock::now(), nanoseconds(0));
}

Clock::time_point deadline_after(nanoseconds timeout) {
  return timeout == kForever ? Clock::time_point::max() : Clock::now() + timeout;
}

/// What is mapped is not known any more, which the caller must not take for "no memory now".
Error cannot_be_undone(const Error& failure, const Error& undoing) {
  const Errc code = undoing.code == Errc::kPoolFailed ? undoing.code : Errc::kChannelClosed;
  return {code, failure.message + ", and what was done before could not be undone (" +
                    undoing.message + "); the engine has to be restarted"};
}

bool same(const Geometry& a, const Geometry& b) {
  return a.pages == b.pages && a.extents_per_page == b.extents_per_page &&
         a.extent_bytes == b.extent_bytes && a.extent_stride_bytes == b.extent_stride_bytes &&
         a.block_bytes == b.block_bytes && a.blocks_per_page == b.blocks_per_page &&
         a.buffers_per_extent == b.buffers_per_extent;
}

/// Both ids of a move, low and high half each.
constexpr std::size_t kWordsPerMove = 4;

std::vector<BlockMove> moves_of(std::span<const std::uint32_t> words) {
  const auto id = [&](std::size_t at) {
    return static_cast<BlockId>(words[at] | std::uint64_t{words[at + 1]} << 32);
  };
  std::vector<BlockMove> moves;
  for (std::size_t at = 0; at + kWordsPerMove <= words.size(); at += kWordsPerMove) {
    moves.push_back({id(at), id(at + 2)});
  }
  return moves;
}

}  // namespace

// --- the scheduler's end ---------------------------------------------------------------------

Result<std::unique_ptr<RingBacking>> RingBacking::create(std::span<std::byte> memory,
                                                         const Geometry& geometry,
                                                         nanoseconds timeout,
                                                         std::shared_ptr<void> keep) {
  Result<RingMemory*> ring = as_ring(memory);
  if (!ring) return ring.error();
  auto* fresh = new (*ring) RingMemory{};  // placement: nothing is owned
  fresh->version = RingMemory::kVersion;
  fresh->geometry = geometry;
  fresh->magic = RingMemory::kMagic;
  return std::unique_ptr<RingBacking>(new RingBacking(fresh, timeout, std::move(keep)));
}

Status RingBacking::wait_for_worker(nanoseconds timeout) {
  const Clock::time_point deadline = deadline_after(timeout);
  for (;;) {
    const std::uint32_t seen = memory_->attached.load(std::memory_order_acquire);
    if (worker_is_alive()) return ok();
    if (until(deadline) == nanoseconds::zero()) {
      return Error{Errc::kChannelTimeout,
                   "no worker has attached to the ring; see the worker's log for the reason"};
    }
    futex_wait(memory_->attached, seen, std::min(until(deadline), kLivenessInterval));
  }
}

Status RingBacking::worker_is_alive() const {
  const auto state = static_cast<RingMemory::WorkerState>(memory_->worker_state.load());
  const pid_t pid = memory_->worker_pid.load();
  if (state == RingMemory::WorkerState::kServing &&
      !process_is_gone(pid, memory_->worker_start_ticks.load())) {
    return ok();
  }
  return Error{Errc::kChannelClosed,
               "worker " + std::to_string(pid) + " is gone; the engine has to be restarted"};
}

Status RingBacking::map(std::span<const PageIndex> pages) {
  return run(RingMemory::Command::kMap, pages);
}

Status RingBacking::unmap(std::span<const PageIndex> pages) {
  return run(RingMemory::Command::kUnmap, pages);
}

Status RingBacking::copy(std::span<const BlockMove> moves) {
  const std::lock_guard lock(mutex_);
  constexpr std::size_t kMovesPerEntry = RingMemory::kPagesPerEntry / kWordsPerMove;
  std::vector<std::uint32_t> words;
  for (std::size_t done = 0; done < moves.size();) {
    const auto batch = moves.subspan(done, std::min(moves.size() - done, kMovesPerEntry));
    words.clear();
    for (const BlockMove& move : batch) {
      for (const BlockId id : {move.from, move.to}) {
        words.push_back(static_cast<std::uint32_t>(id));
        words.push_back(static_cast<std::uint32_t>(id >> 32));
      }
    }
    // What an earlier entry has copied stays copied: a copy changes blocks that nobody uses yet.
    if (Status copied = run_one(RingMemory::Command::kCopy, words); !copied) return copied;
    done += batch.size();
  }
  return ok();
}

std::optional<DeviceMemory> RingBacking::device_memory() const {
  const std::uint64_t total = memory_->device_total_bytes.load();
  if (total == 0) return std::nullopt;
  return DeviceMemory{total, memory_->device_free_bytes.load()};
}

Status RingBacking::run(RingMemory::Command command, std::span<const PageIndex> pages) {
  const std::lock_guard lock(mutex_);
  const auto opposite = command == RingMemory::Command::kMap ? RingMemory::Command::kUnmap
                                                             : RingMemory::Command::kMap;
  std::size_t done = 0;
  while (done < pages.size()) {
    const std::size_t count = std::min(pages.size() - done, RingMemory::kPagesPerEntry);
    Status answered = run_one(command, pages.subspan(done, count));
    if (!answered) {
      // The earlier entries of this batch are undone: a batch is all or nothing.
      for (std::size_t begin = 0; begin < done && !closed_;) {
        const std::size_t chunk = std::min(done - begin, RingMemory::kPagesPerEntry);
        if (Status undone = run_one(opposite, pages.subspan(begin, chunk)); !undone) {
          closed_ = true;
          return cannot_be_undone(answered.error(), undone.error());
        }
        begin += chunk;
      }
      return answered;
    }
    done += count;
  }
  return ok();
}

Status RingBacking::run_one(RingMemory::Command command, std::span<const PageIndex> pages) {
  if (closed_) {
    return Error{Errc::kChannelClosed,
                 "the ring was closed after a worker failed; the engine has to be restarted"};
  }
  // Never full: the lock lets one command be on its way, and a late one closes the ring.
  const std::uint32_t sequence = memory_->posted.load(std::memory_order_relaxed);
  RingMemory::Entry& entry = memory_->entries[sequence % RingMemory::kEntries];
  entry.command = static_cast<std::uint32_t>(command);
  entry.count = static_cast<std::uint32_t>(pages.size());
  entry.result = 0;
  std::copy(pages.begin(), pages.end(), entry.pages.begin());
  ring_bell(memory_->posted);

  const Clock::time_point deadline = deadline_after(timeout_);
  for (;;) {
    const std::uint32_t done = memory_->done.load(std::memory_order_acquire);
    if (done == sequence + 1) break;
    futex_wait(memory_->done, done, std::min(until(deadline), kLivenessInterval));
    // Looking whether the worker lives costs more than most of its answers take: only after a wait.
    if (memory_->done.load(std::memory_order_acquire) != done) continue;
    if (Status alive = worker_is_alive(); !alive) {
      closed_ = true;
      return alive;
    }
    if (until(deadline) == nanoseconds::zero()) {
      closed_ = true;
      return Error{Errc::kChannelTimeout,
                   "worker " + std::to_string(memory_->worker_pid.load()) + " did not answer in " +
                       std::to_string(timeout_.count() / 1'000'000) +
                       " ms (KVELASTIC_IPC_TIMEOUT); the engine has to be restarted"};
    }
  }
  if (entry.result == 0) return ok();
  const std::size_t length = std::min<std::size_t>(entry.message_bytes, entry.message.size());
  return Error{static_cast<Errc>(entry.result - 1), std::string(entry.message.data(), length)};
}

// --- the worker's end ------------------------------------------------------------------------

Result<std::unique_ptr<RingWorker>> RingWorker::start(std::span<std::byte> memory,
                                                      std::shared_ptr<Range> range,
                                                      std::shared_ptr<void> keep) {
  Result<RingMemory*> ring = as_ring(memory);
  if (!ring) return ring.error();
  RingMemory* shared = *ring;
  if (shared->magic != RingMemory::kMagic || shared->version != RingMemory::kVersion) {
    return Error{Errc::kSegmentFormat, "the segment holds no ring of version " +
                                           std::to_string(RingMemory::kVersion) +
                                           "; scheduler and worker must run the same kvelastic"};
  }
  if (!same(shared->geometry, range->geometry())) {
    return Error{Errc::kInvalidArgument,
                 "the worker's page layout is not the scheduler's; both must run the same model "
                 "with the same settings"};
  }
  const auto serving = static_cast<std::uint32_t>(RingMemory::WorkerState::kServing);
  const pid_t other = shared->worker_pid.load();
  if (shared->worker_state.load() == serving &&
      !process_is_gone(other, shared->worker_start_ticks.load())) {
    return Error{Errc::kChannelClosed,
                 "worker " + std::to_string(other) + " serves this ring already"};
  }
  shared->worker_pid = ::getpid();
  shared->worker_start_ticks = process_start_ticks(::getpid()).value_or(0);
  shared->worker_state = serving;
  std::unique_ptr<RingWorker> worker(new RingWorker(shared, std::move(range), std::move(keep)));
  worker->thread_ = std::thread(&RingWorker::serve, worker.get());
  ring_bell(shared->attached);
  return worker;
}

void RingWorker::stop() {
  if (!thread_.joinable()) return;
  if (::getpid() != started_by_) {
    // A forked child has inherited this object, but not the thread; the ring is its parent's.
    thread_.detach();
    return;
  }
  stopping_ = true;
  futex_wake(memory_->posted);
  thread_.join();
  memory_->worker_state = static_cast<std::uint32_t>(RingMemory::WorkerState::kGone);
  ring_bell(memory_->attached);
}

void RingWorker::serve() {
  while (!stopping_) {
    const std::uint32_t posted = memory_->posted.load(std::memory_order_acquire);
    const std::uint32_t done = memory_->done.load(std::memory_order_relaxed);
    if (posted == done) {
      look_at_device();
      futex_wait(memory_->posted, posted, kServeInterval);
      continue;
    }
    carry_out(memory_->entries[done % RingMemory::kEntries]);
    ring_bell(memory_->done);
  }
}

/// Tells the scheduler, which has no driver, what its device has left.
void RingWorker::look_at_device() {
  const std::optional<DeviceMemory> memory = range_->driver().memory();
  if (!memory) return;
  memory_->device_free_bytes = memory->free_bytes;
  memory_->device_total_bytes = memory->total_bytes;
}

void RingWorker::carry_out(RingMemory::Entry& entry) {
  const std::span<const PageIndex> pages(entry.pages.data(),
                                         std::min<std::size_t>(entry.count, entry.pages.size()));
  Status answer = ok();
  switch (static_cast<RingMemory::Command>(entry.command)) {
    case RingMemory::Command::kMap:
      answer = range_->map(pages);
      break;
    case RingMemory::Command::kUnmap:
      answer = range_->unmap(pages, Afterwards::kDestroy);
      break;
    case RingMemory::Command::kCopy:
      answer = range_->copy(moves_of(pages));
      break;
    default:
      answer = Error{Errc::kInvalidArgument, "no such command: " + std::to_string(entry.command)};
  }
  if (answer) {
    entry.result = 0;
    return;
  }
  const std::string& message = answer.error().message;
  entry.message_bytes = static_cast<std::uint32_t>(std::min(message.size(), entry.message.size()));
  std::memcpy(entry.message.data(), message.data(), entry.message_bytes);
  entry.result = 1 + static_cast<std::uint32_t>(answer.error().code);
}

}  // namespace kvelastic
