#include "ring_worker.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <string>

#include "process.h"

namespace kvelastic {
namespace {

using std::chrono::nanoseconds;

/// How often an idle worker looks what its GPU has left. On the host nothing wakes it but a
/// command.
constexpr nanoseconds kDeviceLookInterval = std::chrono::seconds(1);
/// How often a worker that stops rings for its thread, which may just be going to sleep.
constexpr std::chrono::microseconds kStopRingInterval{100};

/// The first number in which two layouts differ; empty: none.
std::string difference(const Geometry& scheduler, const Geometry& worker) {
  const struct {
    const char* name;
    std::uint64_t Geometry::* number;
  } fields[] = {{"pages", &Geometry::pages},
                {"extents_per_page", &Geometry::extents_per_page},
                {"extent_bytes", &Geometry::extent_bytes},
                {"extent_stride_bytes", &Geometry::extent_stride_bytes},
                {"block_bytes", &Geometry::block_bytes},
                {"blocks_per_page", &Geometry::blocks_per_page},
                {"buffers_per_extent", &Geometry::buffers_per_extent}};
  for (const auto& [name, number] : fields) {
    if (scheduler.*number == worker.*number) continue;
    return std::string(name) + " is " + std::to_string(worker.*number) + " there and " +
           std::to_string(scheduler.*number) + " here";
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<RingWorker>> RingWorker::start(std::span<std::byte> memory,
                                                      std::shared_ptr<Range> range,
                                                      std::size_t rank,
                                                      std::shared_ptr<void> keep) {
  Result<RingMemory*> ring = as_ring(memory);
  if (!ring) return ring.error();
  RingMemory* shared = *ring;
  if (shared->magic != RingMemory::kMagic || shared->version != RingMemory::kVersion) {
    return Error{Errc::kSegmentFormat, "the segment holds no ring of version " +
                                           std::to_string(RingMemory::kVersion) +
                                           "; scheduler and worker must run the same kvelastic"};
  }
  if (rank >= shared->ranks) {
    return Error{Errc::kInvalidArgument, "there is no rank " + std::to_string(rank) +
                                             ": the scheduler counts " +
                                             std::to_string(shared->ranks) + " workers"};
  }
  if (const std::string differs = difference(shared->geometry, range->geometry());
      !differs.empty()) {
    return Error{Errc::kInvalidArgument,
                 "the page layout of rank " + std::to_string(rank) + " is not the scheduler's (" +
                     differs + "); both must run the same model with the same settings"};
  }
  RingMemory::Rank& own = shared->workers[rank];
  auto absent = static_cast<std::uint32_t>(RingMemory::WorkerState::kAbsent);
  if (!own.state.compare_exchange_strong(
          absent, static_cast<std::uint32_t>(RingMemory::WorkerState::kTaken))) {
    return Error{Errc::kChannelClosed, "rank " + std::to_string(rank) + " of this ring is worker " +
                                           std::to_string(own.pid.load()) +
                                           "'s; when that has ended, the engine has to be "
                                           "restarted"};
  }
  own.pid = ::getpid();
  own.start_ticks = process_start_ticks(::getpid()).value_or(0);
  own.state = static_cast<std::uint32_t>(RingMemory::WorkerState::kServing);
  std::unique_ptr<RingWorker> worker(
      new RingWorker(shared, std::move(range), rank, std::move(keep)));
  worker->thread_ = std::thread(&RingWorker::serve, worker.get());
  ring_bell(shared->attached);
  return worker;
}

void RingWorker::stop() {
  if (!thread_.joinable()) return;
  if (!started_by_.is_this()) {
    // A forked child has inherited this object, but not the thread; the ring is its parent's.
    thread_.detach();
    return;
  }
  stopping_ = true;
  while (!ended_) {
    futex_wake(memory_->posted);
    std::this_thread::sleep_for(kStopRingInterval);
  }
  thread_.join();
  own_.state = static_cast<std::uint32_t>(RingMemory::WorkerState::kGone);
  ring_bell(memory_->attached);
  futex_wake(memory_->answered);  // a scheduler that waits for this one's answer looks at once
}

void RingWorker::serve() {
  // A wait with a timeout costs a timer each time, which on the host is for nothing.
  const nanoseconds patience = look_at_device() ? kDeviceLookInterval : kForever;
  while (!stopping_) {
    const std::uint32_t posted = memory_->posted.load(std::memory_order_acquire);
    const std::uint32_t done = own_.done.load(std::memory_order_relaxed);
    if (posted == done) {
      futex_wait(memory_->posted, posted, patience);
      if (memory_->posted.load(std::memory_order_relaxed) == posted) (void)look_at_device();
      continue;
    }
    const RingMemory::Entry& entry = memory_->entries[done % RingMemory::kEntries];
    const Status answer = (entry.ranks >> rank_ & 1) != 0 ? carry_out(entry) : ok();
    own_.result = answer ? 0 : 1 + static_cast<std::uint32_t>(answer.error().code);
    if (!answer) {
      const std::string& message = answer.error().message;
      const std::size_t length = std::min(message.size(), own_.message.size());
      own_.message_bytes = static_cast<std::uint32_t>(length);
      std::memcpy(own_.message.data(), message.data(), length);
    }
    own_.done.store(done + 1, std::memory_order_seq_cst);
    if (is_last(done + 1)) ring_bell(memory_->answered);
  }
  ended_ = true;
}

/// Whether every rank has answered as much as this one, so that nobody else will ring. Of two that
/// end at once at least the later one sees both answers, which is why all of this is sequentially
/// consistent; both may.
bool RingWorker::is_last(std::uint32_t done) const {
  for (std::size_t rank = 0; rank < memory_->ranks; ++rank) {
    if (memory_->workers[rank].done.load(std::memory_order_seq_cst) != done) return false;
  }
  return true;
}

/// Tells the scheduler, which has no driver, what its device has left. False: it has none.
bool RingWorker::look_at_device() {
  const std::optional<DeviceMemory> memory = range_->driver().memory();
  if (!memory) return false;
  own_.device_free_bytes = memory->free_bytes;
  own_.device_total_bytes = memory->total_bytes;
  return true;
}

/// No page is worth the process: memory for the books themselves may run out as well.
Status RingWorker::carry_out(const RingMemory::Entry& entry) try {
  const std::span<const PageIndex> pages(entry.pages.data(),
                                         std::min<std::size_t>(entry.count, entry.pages.size()));
  switch (static_cast<RingMemory::Command>(entry.command)) {
    case RingMemory::Command::kMap:
      range_->keep_free(memory_->keep_free_bytes);
      return range_->map(pages);
    case RingMemory::Command::kUnmap:
      return range_->unmap(pages, Afterwards::kDestroy);
    case RingMemory::Command::kCopy:
      return range_->copy(moves_of_ring_words(pages));
    case RingMemory::Command::kNothing:
      return ok();
  }
  return Error{Errc::kInvalidArgument, "no such command: " + std::to_string(entry.command)};
} catch (const std::bad_alloc&) {
  return Error{Errc::kOutOfMemory, "out of memory"};
}

}  // namespace kvelastic
