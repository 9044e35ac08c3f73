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
/// How often an idle worker looks what its GPU has left. On the host nothing wakes it but a
/// command.
constexpr nanoseconds kDeviceLookInterval = std::chrono::seconds(1);
/// How often a worker that stops rings for its thread, which may just be going to sleep.
constexpr std::chrono::microseconds kStopRingInterval{100};

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

RingMemory::Command opposite_of(RingMemory::Command command) {
  switch (command) {
    case RingMemory::Command::kMap:
      return RingMemory::Command::kUnmap;
    case RingMemory::Command::kUnmap:
      return RingMemory::Command::kMap;
    default:
      return RingMemory::Command::kNothing;
  }
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
                                                         std::size_t ranks, nanoseconds timeout,
                                                         std::shared_ptr<void> keep) {
  Result<RingMemory*> ring = as_ring(memory);
  if (!ring) return ring.error();
  if (ranks == 0 || ranks > RingMemory::kMaxRanks) {
    return Error{Errc::kInvalidArgument, "a ring is for 1 to " +
                                             std::to_string(RingMemory::kMaxRanks) +
                                             " workers, not " + std::to_string(ranks)};
  }
  auto* fresh = new (*ring) RingMemory{};  // placement: nothing is owned
  fresh->version = RingMemory::kVersion;
  fresh->geometry = geometry;
  fresh->ranks = static_cast<std::uint32_t>(ranks);
  fresh->magic = RingMemory::kMagic;
  return std::unique_ptr<RingBacking>(new RingBacking(fresh, timeout, std::move(keep)));
}

RingBacking::Ranks RingBacking::all_ranks() const {
  return ~Ranks{0} >> (RingMemory::kMaxRanks - memory_->ranks);
}

std::string RingBacking::name_of(std::size_t rank) const {
  return "worker " + std::to_string(memory_->workers[rank].pid.load()) +
         (memory_->ranks > 1 ? " (rank " + std::to_string(rank) + ")" : "");
}

bool RingBacking::is_serving(std::size_t rank) const {
  const RingMemory::Rank& worker = memory_->workers[rank];
  return worker.state.load() == static_cast<std::uint32_t>(RingMemory::WorkerState::kServing) &&
         !process_is_gone(worker.pid.load(), worker.start_ticks.load());
}

std::vector<std::pair<pid_t, std::uint64_t>> RingBacking::workers() const {
  std::vector<std::pair<pid_t, std::uint64_t>> found;
  for (std::size_t rank = 0; rank < memory_->ranks; ++rank) {
    found.emplace_back(memory_->workers[rank].pid.load(), memory_->workers[rank].start_ticks);
  }
  return found;
}

Status RingBacking::wait_for_workers(nanoseconds timeout) {
  const Clock::time_point deadline = deadline_after(timeout);
  for (;;) {
    const std::uint32_t seen = memory_->attached.load(std::memory_order_acquire);
    std::string absent;
    for (std::size_t rank = 0; rank < memory_->ranks; ++rank) {
      if (!is_serving(rank)) absent += (absent.empty() ? "" : ", ") + std::to_string(rank);
    }
    if (absent.empty()) return ok();
    if (until(deadline) == nanoseconds::zero()) {
      return Error{Errc::kChannelTimeout, "no worker has attached to the ring as rank " + absent +
                                              "; see the worker's log for the reason"};
    }
    futex_wait(memory_->attached, seen, std::min(until(deadline), kLivenessInterval));
  }
}

Status RingBacking::map(std::span<const PageIndex> pages) {
  return run(RingMemory::Command::kMap, pages);
}

Status RingBacking::unmap(std::span<const PageIndex> pages) {
  return run(RingMemory::Command::kUnmap, pages);
}

Status RingBacking::ping() {
  const std::lock_guard lock(mutex_);
  return run_everywhere(RingMemory::Command::kNothing, {});
}

bool RingBacking::has_live_processes() const {
  for (std::size_t rank = 0; rank < memory_->ranks; ++rank) {
    const RingMemory::Rank& worker = memory_->workers[rank];
    const auto pid = static_cast<pid_t>(worker.pid.load());
    if (pid <= 0 || pid == ::getpid()) continue;
    if (!process_is_gone(pid, worker.start_ticks.load())) return true;
  }
  return false;
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
    // What other ranks and earlier entries have copied stays copied: a copy changes blocks that
    // nobody uses yet.
    Outcome copied = run_one(RingMemory::Command::kCopy, words, all_ranks());
    if (!copied.status) return copied.status;
    done += batch.size();
  }
  return ok();
}

std::optional<DeviceMemory> RingBacking::device_memory() const {
  std::optional<DeviceMemory> least;
  for (std::size_t rank = 0; rank < memory_->ranks; ++rank) {
    const RingMemory::Rank& worker = memory_->workers[rank];
    const std::uint64_t total = worker.device_total_bytes.load();
    const std::uint64_t free = worker.device_free_bytes.load();
    if (total > 0 && (!least || free < least->free_bytes)) least = DeviceMemory{total, free};
  }
  return least;
}

Status RingBacking::run(RingMemory::Command command, std::span<const PageIndex> pages) {
  const std::lock_guard lock(mutex_);
  std::size_t done = 0;
  while (done < pages.size()) {
    const std::size_t count = std::min(pages.size() - done, RingMemory::kPagesPerEntry);
    Status answered = run_everywhere(command, pages.subspan(done, count));
    if (!answered) {
      // The earlier entries of this batch are undone: a batch is all or nothing.
      for (std::size_t begin = 0; begin < done && !closed_;) {
        const std::size_t chunk = std::min(done - begin, RingMemory::kPagesPerEntry);
        const Outcome undone =
            run_one(opposite_of(command), pages.subspan(begin, chunk), all_ranks());
        if (!undone.status) return close(cannot_be_undone(answered.error(), undone.status.error()));
        begin += chunk;
      }
      return answered;
    }
    done += count;
  }
  return ok();
}

/// One entry in all ranks; where one fails, those that have done it undo it.
Status RingBacking::run_everywhere(RingMemory::Command command,
                                   std::span<const std::uint32_t> words) {
  Outcome outcome = run_one(command, words, all_ranks());
  if (outcome.status || closed_) return outcome.status;
  const Error failure = outcome.status.error();
  Status undone = ok();
  // Memory that others have given back is not taken again for a pool that is lost anyway.
  const bool lost = failure.code == Errc::kPoolFailed;
  if (outcome.done != 0 && !(lost && command == RingMemory::Command::kUnmap)) {
    undone = run_one(opposite_of(command), words, outcome.done).status;
  }
  if (lost) return close(failure);
  return undone ? outcome.status : close(cannot_be_undone(failure, undone.error()));
}

Status RingBacking::close(Error why) {
  closed_ = true;
  return why;
}

RingBacking::Outcome RingBacking::run_one(RingMemory::Command command,
                                          std::span<const std::uint32_t> words, Ranks ranks) {
  Outcome outcome;
  if (closed_) {
    outcome.status =
        Error{Errc::kChannelClosed,
              "the ring was closed after a worker failed; the engine has to be restarted"};
    return outcome;
  }
  // Never full: the lock lets one command be on its way, and a late one closes the ring.
  const std::uint32_t sequence = memory_->posted.load(std::memory_order_relaxed);
  RingMemory::Entry& entry = memory_->entries[sequence % RingMemory::kEntries];
  entry.command = static_cast<std::uint32_t>(command);
  entry.count = static_cast<std::uint32_t>(words.size());
  entry.ranks = ranks;
  std::copy(words.begin(), words.end(), entry.pages.begin());
  ring_bell(memory_->posted);
  outcome.status = wait_for_answers(sequence);
  if (!outcome.status) return outcome;
  for (std::size_t rank = 0; rank < memory_->ranks; ++rank) {
    const RingMemory::Rank& worker = memory_->workers[rank];
    if ((ranks >> rank & 1) == 0) continue;
    if (worker.result == 0) {
      outcome.done |= Ranks{1} << rank;
      continue;
    }
    // After kPoolFailed nobody knows what is mapped there: no other failure may hide that.
    const auto code = static_cast<Errc>(worker.result - 1);
    const bool grave = code == Errc::kPoolFailed;
    if (outcome.status || (grave && outcome.status.error().code != Errc::kPoolFailed)) {
      const std::size_t length = std::min<std::size_t>(worker.message_bytes, worker.message.size());
      std::string why(worker.message.data(), length);
      if (memory_->ranks > 1) why = name_of(rank) + ": " + why;
      outcome.status = Error{code, std::move(why)};
    }
  }
  return outcome;
}

bool RingBacking::all_done(std::uint32_t sequence) const {
  for (std::size_t rank = 0; rank < memory_->ranks; ++rank) {
    if (memory_->workers[rank].done.load(std::memory_order_acquire) != sequence + 1) return false;
  }
  return true;
}

/// Blocks until every rank has answered the command; closes the ring where one does not.
Status RingBacking::wait_for_answers(std::uint32_t sequence) {
  const Clock::time_point deadline = deadline_after(timeout_);
  for (;;) {
    const std::uint32_t heard = memory_->answered.load(std::memory_order_acquire);
    if (all_done(sequence)) return ok();
    futex_wait(memory_->answered, heard, std::min(until(deadline), kLivenessInterval));
    // Looking whether the workers live costs more than most of their answers take: only after a
    // wait.
    if (memory_->answered.load(std::memory_order_acquire) != heard) continue;
    std::string late;
    for (std::size_t rank = 0; rank < memory_->ranks; ++rank) {
      if (memory_->workers[rank].done.load(std::memory_order_acquire) == sequence + 1) continue;
      if (!is_serving(rank)) {
        return close(
            {Errc::kChannelClosed, name_of(rank) + " is gone; the engine has to be restarted"});
      }
      late += (late.empty() ? "" : ", ") + name_of(rank);
    }
    if (!late.empty() && until(deadline) == nanoseconds::zero()) {
      return close({Errc::kChannelTimeout,
                    late + " did not answer in " + std::to_string(timeout_.count() / 1'000'000) +
                        " ms (KVELASTIC_IPC_TIMEOUT); the engine has to be restarted"});
    }
  }
}

// --- the worker's end ------------------------------------------------------------------------

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
      return range_->map(pages);
    case RingMemory::Command::kUnmap:
      return range_->unmap(pages, Afterwards::kDestroy);
    case RingMemory::Command::kCopy:
      return range_->copy(moves_of(pages));
    case RingMemory::Command::kNothing:
      return ok();
  }
  return Error{Errc::kInvalidArgument, "no such command: " + std::to_string(entry.command)};
} catch (const std::bad_alloc&) {
  return Error{Errc::kOutOfMemory, "out of memory"};
}

}  // namespace kvelastic
