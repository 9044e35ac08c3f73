#include "segment/ring_worker.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <string>

#include "base/process.h"

namespace kvelastic {
namespace {

using std::chrono::nanoseconds;

/// Interval of wake-ups while stopping: the thread may go to sleep just after a wake-up.
constexpr std::chrono::microseconds kStopRingInterval{100};

/// Describes the first difference of two layouts; empty if they are equal.
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
  own.works_behind = range->works_behind() ? 1 : 0;
  std::unique_ptr<RingWorker> worker(
      new RingWorker(shared, std::move(range), rank, std::move(keep)));
  (void)worker->look_at_device();
  own.state = static_cast<std::uint32_t>(RingMemory::WorkerState::kServing);
  worker->thread_ = std::thread(&RingWorker::serve, worker.get());
  ring_bell(shared->attached);
  return worker;
}

void RingWorker::stop() {
  if (!thread_.joinable()) return;
  if (!started_by_.is_this()) {
    // A forked child inherits this object but not the thread; the ring belongs to the parent.
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
  futex_wake(memory_->replied);  // waiters check this worker's state at once
}

void RingWorker::serve() {
  while (!stopping_) {
    const std::uint32_t posted = memory_->posted.load(std::memory_order_acquire);
    const std::uint32_t done = own_.done.load(std::memory_order_relaxed);
    if (posted == done) {
      futex_wait(memory_->posted, posted, look_around());
      continue;
    }
    const RingMemory::Entry& entry = memory_->entries[done % RingMemory::kEntries];
    const Status result = (entry.ranks >> rank_ & 1) != 0 ? carry_out(entry) : ok();
    own_.result = RingMemory::result_of(result);
    if (!result) own_.reason.write(result.error().message);
    own_.done.store(done + 1, std::memory_order_seq_cst);
    if (is_last(done + 1)) ring_bell(memory_->replied);
    if (fence_)
      look_at_fence();  // also after a command: a continuous stream of commands must not delay the
                        // fence
  }
  fence_.reset();
  ended_ = true;
}

/// Runs when no command is pending. Returns how long to sleep afterwards.
nanoseconds RingWorker::look_around() {
  if (fence_) look_at_fence();
  return fence_ ? fence_pauses_.next() : kForever;
}

/// Marks the work submitted to the device so far. Replaces an earlier fence.
Status RingWorker::begin_fence(std::uint32_t number) {
  Result<std::unique_ptr<Fence>> fence = range_->fence();
  if (!fence) return fence.error();
  fence_ = *std::move(fence);
  fence_number_ = number;
  fence_pauses_ = Pauses();
  if (!fence_) end_fence(ok());
  return ok();
}

void RingWorker::look_at_fence() {
  own_.looks.fetch_add(1, std::memory_order_relaxed);
  const Result<bool> passed = fence_->has_passed();
  if (!passed) return end_fence(passed.error());
  if (*passed) end_fence(ok());
}

void RingWorker::end_fence(const Status& how) {
  fence_.reset();
  own_.fence_result = RingMemory::result_of(how);
  if (!how) own_.fence_reason.write(how.error().message);
  own_.passed.store(fence_number_, std::memory_order_release);
  ring_bell(memory_->replied);
}

/// True if every rank has replied as often as this one, so this rank must ring the bell. If two
/// ranks finish at once, sequential consistency ensures that at least the later one sees both
/// replies; both may ring.
bool RingWorker::is_last(std::uint32_t done) const {
  for (std::size_t rank = 0; rank < memory_->ranks; ++rank) {
    if (memory_->workers[rank].done.load(std::memory_order_seq_cst) != done) return false;
  }
  return true;
}

/// Reports the device's free memory to the scheduler, which has no driver.
Status RingWorker::look_at_device() {
  const std::optional<DeviceMemory> memory = range_->driver().memory();
  if (!memory) return Error{Errc::kDeviceUnavailable, "the device does not report its free memory"};
  own_.device_free_bytes = memory->free_bytes;
  own_.device_total_bytes = memory->total_bytes;
  return ok();
}

/// Turns bad_alloc of the bookkeeping into an error, so that the process survives it.
Status RingWorker::carry_out(const RingMemory::Entry& entry) try {
  const std::span<const PageIndex> pages(entry.pages.data(),
                                         std::min<std::size_t>(entry.count, entry.pages.size()));
  switch (static_cast<RingMemory::Command>(entry.command)) {
    case RingMemory::Command::kMap:
      range_->keep_free(memory_->keep_free_bytes);
      return range_->map(pages);
    case RingMemory::Command::kUnmap:
      return range_->unmap_idle(pages, Afterwards::kDestroy);
    case RingMemory::Command::kCopy:
      return range_->copy_idle(moves_of_ring_words(pages));
    case RingMemory::Command::kFence:
      return begin_fence(pages.empty() ? 0 : pages.front());
    case RingMemory::Command::kNothing:
      return ok();
    case RingMemory::Command::kStaging:
      return attach(staging_of_ring_words(pages));
    case RingMemory::Command::kCopyOut:
      return copy_records(pages, CopyTo::kHost);
    case RingMemory::Command::kCopyIn:
      return copy_records(pages, CopyTo::kDevice);
    case RingMemory::Command::kLook:
      return look_at_device();
  }
  return Error{Errc::kInvalidArgument, "no such command: " + std::to_string(entry.command)};
} catch (const std::bad_alloc&) {
  return Error{Errc::kOutOfMemory, "out of memory"};
}

Status RingWorker::attach(const StagingName& name) {
  Result<std::unique_ptr<Staging>> attached = Staging::attach(name);
  if (!attached) return attached.error();
  staging_ = *std::move(attached);
  return ok();
}

/// Pre: a fence has passed, so the device has finished its work with these blocks.
Status RingWorker::copy_records(std::span<const std::uint32_t> words, CopyTo to) {
  if (!staging_) return Error{Errc::kInvalidArgument, "no staging has been attached"};
  return window_.copy(block_slots_of_ring_words(words), staging_, to);
}

}  // namespace kvelastic
