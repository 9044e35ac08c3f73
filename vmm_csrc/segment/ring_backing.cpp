#include "segment/ring_backing.h"

#include <unistd.h>

#include <algorithm>
#include <new>

#include "base/process.h"

namespace kvelastic {
namespace {

using std::chrono::nanoseconds;
using Clock = std::chrono::steady_clock;

/// How often a waiting scheduler checks that its workers are alive.
constexpr nanoseconds kLivenessInterval = std::chrono::milliseconds(50);

/// Bytes per worker and copy command: the longest that a map command waits behind a copy.
constexpr std::uint64_t kCopyBytesAtOnce = std::uint64_t{8} << 20;

/// How long the scheduler waits for device_memory() replies. Other commands wait that long, too.
constexpr nanoseconds kLookPatience = std::chrono::milliseconds(100);

nanoseconds until(Clock::time_point deadline) {
  return deadline == Clock::time_point::max() ? kForever
                                              : std::max(deadline - Clock::now(), nanoseconds(0));
}

Clock::time_point deadline_after(nanoseconds timeout) {
  return timeout == kForever ? Clock::time_point::max() : Clock::now() + timeout;
}

/// The time that a scheduler has waited for its workers. While this process is stopped, its workers
/// usually are, too. So of each interval between two looks, at most twice the liveness interval
/// counts.
class Waited {
 public:
  void look() {
    const Clock::time_point now = Clock::now();
    total_ += std::min<nanoseconds>(now - std::exchange(last_, now), 2 * kLivenessInterval);
  }
  nanoseconds total() const { return total_; }

 private:
  nanoseconds total_{0};
  Clock::time_point last_ = Clock::now();
};

/// The state of the mappings is unknown. This must not be mistaken for "no memory now".
Error cannot_be_undone(const Error& failure, const Error& undoing) {
  const Errc code = undoing.code == Errc::kPoolFailed ? undoing.code : Errc::kChannelClosed;
  return {code, failure.message + ", and what was done before could not be undone (" +
                    undoing.message + "); the engine has to be restarted"};
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

}  // namespace

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

Error RingBacking::failure_of(std::size_t rank, std::uint32_t result,
                              const RingMemory::Reason& reason) const {
  std::string why = reason.read();
  if (memory_->ranks > 1) why = name_of(rank) + ": " + why;
  return {RingMemory::code_of(result), std::move(why)};
}

bool RingBacking::is_serving(std::size_t rank) const {
  const RingMemory::Rank& worker = memory_->workers[rank];
  return worker.state.load() == static_cast<std::uint32_t>(RingMemory::WorkerState::kServing) &&
         !process_is_gone(worker.pid.load(), worker.start_ticks.load());
}

std::vector<pid_t> RingBacking::other_processes() const {
  std::vector<pid_t> pids;
  for (const auto& [pid, start_ticks] : workers()) {
    if (pid != 0 && pid != ::getpid()) pids.push_back(pid);
  }
  return pids;
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

bool RingBacking::works_behind() const {
  const auto workers = std::span(memory_->workers).first(memory_->ranks);
  return std::any_of(workers.begin(), workers.end(),
                     [](const RingMemory::Rank& worker) { return worker.works_behind != 0; });
}

Status RingBacking::drain() {
  if (!works_behind()) return ok();
  const std::lock_guard one(drain_mutex_);
  const std::uint32_t number = ++last_fence_;
  {
    const std::lock_guard lock(mutex_);
    const Outcome begun = run_one(RingMemory::Command::kFence, std::span(&number, 1), all_ranks());
    if (!begun.status) return begun.status;
  }
  return wait_for_fence(number);  // without the lock: other commands can run
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
  constexpr std::size_t kMovesPerEntry = RingMemory::kPagesPerEntry / kRingWordsPerMove;
  for (std::size_t done = 0; done < moves.size();) {
    const auto batch = moves.subspan(done, std::min(moves.size() - done, kMovesPerEntry));
    // Copies of other ranks and earlier entries need no undo: they only wrote unused blocks.
    Outcome copied = run_one(RingMemory::Command::kCopy, ring_words_of(batch), all_ranks());
    if (!copied.status) return copied.status;
    done += batch.size();
  }
  return ok();
}

Status RingBacking::copy_records(std::span<const BlockSlot> blocks,
                                 const std::shared_ptr<Staging>& staging, CopyTo to) {
  if (Status finished = drain(); !finished) return finished;
  const auto command =
      to == CopyTo::kHost ? RingMemory::Command::kCopyOut : RingMemory::Command::kCopyIn;
  const std::uint64_t blocks_at_once =
      std::clamp<std::uint64_t>(kCopyBytesAtOnce / memory_->geometry.record_bytes(), 1,
                                RingMemory::kPagesPerEntry / kRingWordsPerBlockSlot);
  for (std::size_t done = 0; done < blocks.size();) {
    const auto batch =
        blocks.subspan(done, std::min<std::size_t>(blocks.size() - done, blocks_at_once));
    const std::lock_guard lock(mutex_);
    if (staging_ != staging) {
      staging_.reset();  // if only some ranks attach it, the state of each is unknown
      Outcome attached =
          run_one(RingMemory::Command::kStaging, ring_words_of(staging->name()), all_ranks());
      if (!attached.status) return attached.status;
      staging_ = staging;
    }
    Outcome copied = run_one(command, ring_words_of(batch), all_ranks());
    if (!copied.status) return copied.status;
    done += batch.size();
  }
  return ok();
}

std::vector<std::optional<DeviceMemory>> RingBacking::device_memory() {
  std::vector<std::optional<DeviceMemory>> by_rank(memory_->ranks);
  const std::lock_guard lock(mutex_);
  if (!works_behind() || !look_at_devices()) return by_rank;
  for (std::size_t rank = 0; rank < memory_->ranks; ++rank) {
    const RingMemory::Rank& worker = memory_->workers[rank];
    const std::uint64_t total = worker.device_total_bytes.load();
    const std::uint64_t free = worker.device_free_bytes.load();
    const bool replied = worker.result == RingMemory::kDone;
    if (total > 0 && replied) by_rank[rank] = DeviceMemory{total, free};
  }
  return by_rank;
}

/// Sends kLook and waits briefly; returns true if every rank has replied. A worker that is late is
/// not considered lost, and gets no further kLook before it has replied. Pre: mutex_ is held.
bool RingBacking::look_at_devices() {
  if (closed_ || !all_done(memory_->posted.load(std::memory_order_relaxed) - 1)) return false;
  const std::uint32_t sequence = post(RingMemory::Command::kLook, {}, all_ranks());
  const Clock::time_point deadline = deadline_after(std::min(timeout_, kLookPatience));
  for (;;) {
    const std::uint32_t before = memory_->replied.load(std::memory_order_acquire);
    if (all_done(sequence)) return true;
    if (until(deadline) == nanoseconds::zero()) return false;
    futex_wait(memory_->replied, before, until(deadline));
  }
}

Status RingBacking::run(RingMemory::Command command, std::span<const PageIndex> pages) {
  const std::lock_guard lock(mutex_);
  std::size_t done = 0;
  while (done < pages.size()) {
    const std::size_t count = std::min(pages.size() - done, RingMemory::kPagesPerEntry);
    Status replied = run_everywhere(command, pages.subspan(done, count));
    if (!replied) {
      // Undo the earlier entries of this batch: a batch is all or nothing.
      for (std::size_t begin = 0; begin < done && !closed_;) {
        const std::size_t chunk = std::min(done - begin, RingMemory::kPagesPerEntry);
        const Outcome undone =
            run_one(opposite_of(command), pages.subspan(begin, chunk), all_ranks());
        if (!undone.status) return close(cannot_be_undone(replied.error(), undone.status.error()));
        begin += chunk;
      }
      return replied;
    }
    done += count;
  }
  return ok();
}

/// Runs one entry in all ranks. If a rank fails, the ranks that succeeded undo the entry.
Status RingBacking::run_everywhere(RingMemory::Command command,
                                   std::span<const std::uint32_t> words) {
  Outcome outcome = run_one(command, words, all_ranks());
  if (outcome.status || closed_) return outcome.status;
  const Error failure = outcome.status.error();
  Status undone = ok();
  // A pool that is lost anyway must not take back memory that its workers have released.
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

Status RingBacking::refuse_if_closed() const {
  if (!closed_) return ok();
  return Error{Errc::kChannelClosed,
               "the ring was closed after a worker failed; the engine has to be restarted"};
}

Status RingBacking::gone(std::size_t rank) {
  return close({Errc::kChannelClosed, name_of(rank) + " is gone; the engine has to be restarted"});
}

Status RingBacking::late(const std::string& names) {
  return close({Errc::kChannelTimeout,
                names + " did not answer in " + std::to_string(timeout_.count() / 1'000'000) +
                    " ms (KVELASTIC_IPC_TIMEOUT); the engine has to be restarted"});
}

/// Posts a command and returns its number. The ring is never full: the lock admits one command at a
/// time, and a late command closes the ring. Only a kLook may be pending, with at most one command
/// behind it.
std::uint32_t RingBacking::post(RingMemory::Command command, std::span<const std::uint32_t> words,
                                Ranks ranks) {
  const std::uint32_t sequence = memory_->posted.load(std::memory_order_relaxed);
  RingMemory::Entry& entry = memory_->entries[sequence % RingMemory::kEntries];
  entry.command = static_cast<std::uint32_t>(command);
  entry.count = static_cast<std::uint32_t>(words.size());
  entry.ranks = ranks;
  std::copy(words.begin(), words.end(), entry.pages.begin());
  ring_bell(memory_->posted);
  return sequence;
}

RingBacking::Outcome RingBacking::run_one(RingMemory::Command command,
                                          std::span<const std::uint32_t> words, Ranks ranks) {
  Outcome outcome;
  outcome.status = refuse_if_closed();
  if (!outcome.status) return outcome;
  const std::uint32_t sequence = post(command, words, ranks);
  outcome.status = wait_for_replies(sequence);
  if (!outcome.status) return outcome;
  for (std::size_t rank = 0; rank < memory_->ranks; ++rank) {
    const RingMemory::Rank& worker = memory_->workers[rank];
    if ((ranks >> rank & 1) == 0) continue;
    if (worker.result == RingMemory::kDone) {
      outcome.done |= Ranks{1} << rank;
      continue;
    }
    // After kPoolFailed the mappings of that rank are unknown; no other failure may hide this.
    const Errc code = RingMemory::code_of(worker.result);
    const bool grave = code == Errc::kPoolFailed;
    if (outcome.status || (grave && outcome.status.error().code != Errc::kPoolFailed)) {
      outcome.status = failure_of(rank, worker.result, worker.reason);
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

/// Blocks until every rank has replied to the command; closes the ring if a rank does not.
Status RingBacking::wait_for_replies(std::uint32_t sequence) {
  Waited waited;
  for (;;) {
    const std::uint32_t before = memory_->replied.load(std::memory_order_acquire);
    if (all_done(sequence)) return ok();
    const nanoseconds left = std::max(timeout_ - waited.total(), nanoseconds(0));
    futex_wait(memory_->replied, before, std::min(left, kLivenessInterval));
    waited.look();
    // Checking the workers costs more than most replies take, so it is done only after a wait.
    if (memory_->replied.load(std::memory_order_acquire) != before) continue;
    std::string names;
    for (std::size_t rank = 0; rank < memory_->ranks; ++rank) {
      if (memory_->workers[rank].done.load(std::memory_order_acquire) == sequence + 1) continue;
      if (!is_serving(rank)) return gone(rank);
      names += (names.empty() ? "" : ", ") + name_of(rank);
    }
    if (!names.empty() && waited.total() >= timeout_) return late(names);
  }
}

/// Blocks until the fence has passed in every rank, as long as all workers keep polling it; closes
/// the ring if a worker stops.
Status RingBacking::wait_for_fence(std::uint32_t number) {
  struct Looks {
    std::uint32_t count;
    nanoseconds seen;
  };
  std::vector<Looks> looks(memory_->ranks, {0, nanoseconds(0)});
  Waited waited;
  nanoseconds next_check = kLivenessInterval;
  for (;;) {
    const std::uint32_t before = memory_->replied.load(std::memory_order_acquire);
    Status open = refuse_if_closed();
    waited.look();
    const nanoseconds now = waited.total();
    const bool check = now >= next_check;  // the bell also rings for every command
    if (check) next_check = now + kLivenessInterval;
    bool all = true;
    for (std::size_t rank = 0; rank < memory_->ranks && open; ++rank) {
      const RingMemory::Rank& worker = memory_->workers[rank];
      if (worker.passed.load(std::memory_order_acquire) == number) {
        if (worker.fence_result == RingMemory::kDone) continue;
        return failure_of(rank, worker.fence_result, worker.fence_reason);
      }
      all = false;
      if (!check) continue;
      Looks& own = looks[rank];
      const std::uint32_t count = worker.looks.load(std::memory_order_relaxed);
      if (std::exchange(own.count, count) != count) own.seen = now;
      if (!is_serving(rank))
        open = gone(rank);
      else if (now - own.seen > timeout_)
        open = late(name_of(rank));
    }
    if (all || !open) return open;
    futex_wait(memory_->replied, before, kLivenessInterval);
  }
}

}  // namespace kvelastic
