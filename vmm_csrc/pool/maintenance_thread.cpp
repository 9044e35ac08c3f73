#include "pool/maintenance_thread.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <new>
#include <vector>

#include "base/debug_log.h"
#include "base/size_text.h"

namespace kvelastic {
namespace {

/// Retry interval if writers overtook the reading of a request.
constexpr std::int64_t kRequestRetryNs = 100'000;
/// Retry interval after the driver refused to release memory.
constexpr std::int64_t kShrinkRetryNs = 50'000'000;
/// Poll interval while memory is missing, or while other instances request this pool's memory.
constexpr std::int64_t kPursuitNs = 20'000'000;
/// Interval of measuring other processes' memory on a GPU.
constexpr std::int64_t kDeviceLookNs = 1'000'000'000;
/// After an uncertain measurement the next one follows after kPursuitNs, then twice that, and so
/// on.
constexpr int kMostUnsureLooks = 5;
constexpr std::int64_t kNever = -1;

/// Returns the next revision after `done` that still requires work; the newest if none does.
std::uint64_t next_revision(const Request& request, std::uint64_t done) {
  std::uint64_t next = request.revision;
  for (const std::uint64_t asked :
       {request.limit_revision, request.min_revision, request.priority_revision,
        request.asleep_revision, request.trim_revision}) {
    if (asked > done) next = std::min(next, asked);
  }
  return next;
}

const char* text_of(AckState state) {
  switch (state) {
    case AckState::kNone:
      return "none";
    case AckState::kApplied:
      return "applied";
    case AckState::kShrinking:
      return "shrinking";
    case AckState::kRefused:
      return "refused";
    case AckState::kFailed:
      return "failed";
  }
  return "?";
}

}  // namespace

std::unique_ptr<MaintenanceThread> MaintenanceThread::start(
    std::shared_ptr<Pool> pool, std::shared_ptr<ControlBlockOwner> control_block,
    const MaintenanceOptions& options) {
  std::unique_ptr<MaintenanceThread> thread(
      new MaintenanceThread(std::move(pool), std::move(control_block), options));
  if (options.watch_memory) {
    std::vector<pid_t> processes = thread->pool_->state.backing->other_processes();
    processes.push_back(::getpid());
    thread->watch_ = std::make_unique<MemoryWatch>(processes);
  }
  thread->pool_->publish_to(thread->control_block_);
  thread->acknowledge(thread->pool_->state.limit_state(), {});
  thread->pool_->background.on_work([bell = thread->control_block_] { bell->ring_bell(); });
  thread->thread_ = std::thread(&MaintenanceThread::run, thread.get());
  if (const std::shared_ptr<DeviceSet>& device_set = thread->pool_->state.device_set) {
    for (const Placement& placement : device_set->all()) {
      thread->bell_threads_.emplace_back(&MaintenanceThread::pass_bells_on, thread.get(),
                                         std::cref(*placement.member));
    }
  }
  return thread;
}

void MaintenanceThread::stop() {
  if (!thread_.joinable()) return;
  if (!started_by_.is_this()) {
    // A forked child inherits this object but not the threads.
    thread_.detach();
    for (std::thread& thread : bell_threads_) thread.detach();
    return;
  }
  stopping_ = true;
  control_block_->ring_bell();
  thread_.join();
  for (std::size_t i = 0; i < bell_threads_.size(); ++i) {
    pool_->state.device_set->all()[i].member->ring();
    bell_threads_[i].join();
  }
  // The pool continues to publish, so memory released by its close() is counted.
  pool_->background.on_work(nullptr);
}

/// A round that runs out of memory for its lists is abandoned and retried later: an escaping
/// exception would end the process.
void MaintenanceThread::run() {
  while (true) {
    // Read before `stopping_`: stop() sets that before it rings, so the wait cannot miss it.
    const std::uint32_t seen = control_block_->bell();
    if (stopping_) return;
    try {
      go_round(seen);
    } catch (const std::bad_alloc&) {
      (void)control_block_->wait_bell(control_block_->bell(), kShrinkRetryNs);
    }
  }
}

void MaintenanceThread::go_round(std::uint32_t seen) {
  const bool read = read_request();
  look_at_devices();
  if (pool_->state.has_failed() && !failure_reported_) acknowledge(pool_->state.limit_state(), {});
  see_capacity();
  const bool over_capacity = pool_->state.device_set && pool_->state.device_set->request_excess();
  serve_reclaim_requests();
  finish_shrinking();
  watch_memory();
  const bool waking = !finish_waking();
  const bool missing = pool_->background.pursue();
  pursuing_ = pool_->limits.expire_pressure() || missing || over_capacity || waking;
  // The begin or end of memory pressure changes the limit in effect, too.
  if (pool_->state.limit_state().effective_bytes != acknowledged_effective_bytes_) {
    acknowledge(pool_->state.limit_state(), {});
  }
  (void)pool_->background.provision();  // out of memory: the next alloc reports it
  pursuing_ = pursuing_ || pool_->background.is_provision_due();
  decay();
  evict_idle();
  (void)control_block_->wait_bell(seen, sleep_ns(!read));
}

bool MaintenanceThread::read_request() {
  if (control_block_->request_revision() == revision_) return true;
  const std::optional<Request> request = control_block_->read_request();
  if (!request) return false;
  // Several requests may have been merged while this thread was busy; each revision is judged
  // separately.
  do {
    const std::uint64_t before = revision_;
    revision_ = next_revision(*request, before);
    try {
      carry_out(*request);
    } catch (const std::bad_alloc&) {
      revision_ = before;  // the next round repeats and acknowledges it
      throw;
    }
  } while (revision_ != request->revision);
  finish_shrinking();
  if (logged_request_ && !waking_)
    log_outcome(AckState::kShrinking, pool_->state.limit_state(), {});
  return true;
}

/// Rings the instance's bell whenever a ledger's bell rings.
void MaintenanceThread::pass_bells_on(const LedgerMember& member) {
  std::uint32_t heard = member.bell();
  control_block_->ring_bell();  // for requests made before this thread started to listen
  while (!stopping_) {
    member.wait(heard, kForever);
    const std::uint32_t now = member.bell();
    if (std::exchange(heard, now) != now) control_block_->ring_bell();
  }
}

/// Measures other processes' memory on GPUs: periodically, and soon after a large move, an
/// uncertain measurement, or a refused page. Also notes when memory is available again.
void MaintenanceThread::look_at_devices() {
  const PoolState& state = pool_->state;
  // A GPU that cannot be measured now, as a worker is late, may be measured later.
  measures_devices_ = state.device_set && state.backing->works_behind();
  if (!measures_devices_) return;
  const bool moved = pool_->background.take_large_move();
  const Clock::time_point now = Clock::now();
  if (now < next_device_look_ && !moved) return;
  const Sight sight = pool_->background.see_devices();
  Refusals refusals = PoolState::Look(state)->refusals;
  // Not at the measurement that a refusal triggered: if the driver keeps refusing granted pages,
  // the engine must retry at increasing intervals.
  if (refusals.is_pending && !moved && state.device_set->room() > 0) {
    pool_->background.note_memory();
    refusals.is_pending = false;
  }
  const bool certain = (sight == Sight::kExact || sight == Sight::kNone) && !refusals.is_pending;
  // With backoff: a member that is stopped half-way must not keep this thread busy.
  const int doublings = std::max(unsure_looks_, refusals.in_a_row - 1);
  const std::int64_t again_ns = certain ? kDeviceLookNs : kPursuitNs << doublings;
  unsure_looks_ = certain ? 0 : std::min(unsure_looks_ + 1, kMostUnsureLooks);
  next_device_look_ = now + std::chrono::nanoseconds(again_ns);
}

/// Acknowledges a change of the capacity, which changes the limit in effect.
void MaintenanceThread::see_capacity() {
  if (pool_->limits.see_capacity()) acknowledge(pool_->state.limit_state(), {});
}

/// Releases memory that other instances request, as far as possible.
void MaintenanceThread::serve_reclaim_requests() {
  const std::shared_ptr<DeviceSet>& device_set = pool_->state.device_set;
  if (!device_set) return;
  for (DeviceSet::OpenReclaim open = device_set->open_reclaim(); open.pages > 0 && !stopping_;
       open = device_set->open_reclaim()) {
    const Result<std::uint64_t> given =
        pool_->background.give_up(open.pages, open.depth, device_set->min_pages());
    if (debug_logging()) {
      debug_log("ledger: reclaim request for %s, released %s",
                size_text(open.pages * device_set->page_bytes()).c_str(),
                size_text(given ? *given * device_set->page_bytes() : 0).c_str());
    }
    device_set->handled(open, given ? *given : 0);
  }
}

/// Sets guarantee and priority, all or nothing. Without a ledger there is no other instance.
Status MaintenanceThread::change_standing(const Request& request) {
  const std::shared_ptr<DeviceSet>& device_set = pool_->state.device_set;
  const bool min = request.min_revision == revision_;
  const bool priority = request.priority_revision == revision_;
  if (!min && !priority) return ok();
  if (!device_set) return Error{Errc::kInvalidArgument, "this instance does not share its device"};
  if (priority) {
    if (Status bounded = check_priority(request.priority); !bounded) return bounded;
  }
  if (min) {
    if (Status set = device_set->set_min(request.min_bytes); !set) return set;
  }
  return priority ? device_set->set_priority(request.priority) : ok();
}

void MaintenanceThread::log_request(const Request& request) {
  if (!info_logging()) return;
  std::string what;
  const auto is_of_it = [this](std::uint64_t revision) { return revision == revision_; };
  if (is_of_it(request.limit_revision)) {
    what += request.limit_bytes == kUnlimitedBytes
                ? "no limit, "
                : "limit " + size_text(request.limit_bytes) + ", ";
  }
  if (is_of_it(request.min_revision)) what += "guarantee " + size_text(request.min_bytes) + ", ";
  if (is_of_it(request.priority_revision)) {
    what += "priority " + std::to_string(request.priority) + ", ";
  }
  if (is_of_it(request.asleep_revision)) what += request.asleep != 0 ? "sleep, " : "wake, ";
  if (is_of_it(request.trim_revision)) what += "trim, ";
  what += "by process " + std::to_string(request.writer_pid);
  logged_request_ = {revision_, std::move(what), request.written_ns};
  if (debug_logging()) {
    debug_log("request %llu: %s", static_cast<unsigned long long>(revision_),
              logged_request_->what.c_str());
  }
}

/// Logs the result of a request once it is known, or at the end of a round that it is still in
/// progress.
void MaintenanceThread::log_outcome(AckState outcome, const LimitState& state,
                                    const std::string& reason) {
  const std::uint64_t page_bytes = std::max<std::uint64_t>(pool_->state.page_bytes(), 1);
  const double ms =
      static_cast<double>(saturating_sub(monotonic_ns(), logged_request_->written_ns)) / 1e6;
  std::string sizes = size_text(state.mapped_bytes) + " of KV cache held";
  if (state.limit_bytes != kUnlimitedBytes) {
    sizes = size_text(state.effective_bytes) + " allowed (" +
            std::to_string(state.effective_bytes / page_bytes) + " pages of " +
            size_text(page_bytes) + "), " + sizes;
  }
  if (state.over_bytes > 0) sizes += ", of which " + size_text(state.over_bytes) + " are in use";
  info_log("Request (%s): %s after %.1f ms. %s%s%s.", logged_request_->what.c_str(),
           text_of(outcome), ms, sizes.c_str(), reason.empty() ? "" : ": ", reason.c_str());
  if (outcome != AckState::kShrinking) logged_request_.reset();
}

/// Executes request `revision_`, all or nothing, and acknowledges it.
void MaintenanceThread::carry_out(const Request& request) {
  refusal_.clear();
  log_request(request);
  const std::shared_ptr<DeviceSet>& device_set = pool_->state.device_set;
  const std::uint64_t min_before_bytes = device_set ? device_set->min_bytes() : 0;
  const std::int64_t priority_before = device_set ? device_set->priority() : 0;
  if (Status standing = change_standing(request); !standing)
    return refuse(standing.error().message);
  if (request.asleep_revision != revision_) return apply(request, revision_);
  if (request.asleep != 0 || !device_set) {
    waking_.reset();
    pool_->limits.set_asleep(request.asleep != 0);
    return apply(request, revision_);
  }
  const Result<DeviceSet::Claimed> claimed = device_set->claim_wake();
  waking_ = {
      request, revision_,
      Clock::now() + std::chrono::nanoseconds(claimed ? device_set->rules().reserve_wait_ns : 0),
      min_before_bytes, priority_before};
  if (claimed) {
    (void)finish_waking();
  } else {
    refuse_waking(claimed.error().message);
  }
}

/// Returns true if no wake is waiting.
bool MaintenanceThread::finish_waking() {
  if (!waking_) return true;
  const std::shared_ptr<DeviceSet>& device_set = pool_->state.device_set;
  if (!device_set->claim_is_met()) {
    if (Clock::now() < waking_->until) return false;
    if (Status failed = device_set->fail_claim(); !failed) {
      refuse_waking(failed.error().message);
      return true;
    }
  }
  // Another thread may have withdrawn it: the pool then sleeps, and that is acknowledged.
  pool_->limits.set_asleep(false);
  Waking waking = *std::exchange(waking_, std::nullopt);
  // A limit that was set after the wake is already in effect.
  const std::optional<Request> newest = control_block_->read_request();
  if (newest && newest->limit_revision != waking.request.limit_revision)
    waking.request.limit_revision = 0;
  apply(waking.request, waking.revision);
  return true;
}

/// No part of that request has been applied.
void MaintenanceThread::refuse_waking(std::string reason) {
  const Waking waking = *std::exchange(waking_, std::nullopt);
  const std::shared_ptr<DeviceSet>& device_set = pool_->state.device_set;
  // What a later request has set stays.
  const std::optional<Request> newest = control_block_->read_request();
  if (newest && newest->min_revision == waking.revision)
    (void)device_set->set_min(waking.min_before_bytes);
  if (newest && newest->priority_revision == waking.revision) {
    (void)device_set->set_priority(waking.priority_before);
  }
  if (waking.revision == revision_) return refuse(std::move(reason));
  info_log("A request to wake was refused: %s.", reason.c_str());
  acknowledge(pool_->state.limit_state(), {});
}

void MaintenanceThread::refuse(std::string reason) {
  refusal_ = std::move(reason);
  acknowledge(pool_->state.limit_state(), {});
}

/// Applies the limit and trim of a request, and acknowledges it.
void MaintenanceThread::apply(const Request& request, std::uint64_t revision) {
  // Two acknowledgements if memory must be released: first received, then applied. A trim is
  // acknowledged only when it is complete.
  const LimitState state = request.limit_revision == revision
                               ? pool_->limits.set(request.limit_bytes)
                               : pool_->state.limit_state();
  const bool trim = request.trim_revision == revision;
  if (!trim || state.over_bytes > 0) acknowledge(state, {});
  if (trim) {
    Result<std::uint64_t> trimmed = pool_->background.trim();
    acknowledge(pool_->state.limit_state(), trimmed ? std::string() : trimmed.error().message);
  }
  control_block_->add(Counter::kRequestsApplied);
}

void MaintenanceThread::finish_shrinking() {
  shrink_again_ = false;
  if (acknowledged_over_bytes_ == 0 && pool_->state.limit_state().over_bytes == 0) return;
  // A new request must not wait for copies made for the last one.
  Result<LimitState> state = pool_->limits.enforce(
      [this] { return stopping_ || control_block_->request_revision() != revision_; });
  const LimitState now = state ? *state : pool_->state.limit_state();
  const std::string reason = state ? std::string() : state.error().message;
  shrink_again_ = !state && !pool_->state.has_failed();
  if (now.over_bytes != acknowledged_over_bytes_ || !reason.empty()) acknowledge(now, reason);
}

/// If the machine is running out of memory, releases caches before the kernel kills a process, and
/// then memory of requests.
void MaintenanceThread::watch_memory() {
  if (!watch_) return;
  watching_ = pool_->background.arm_memory_watch();
  const Clock::time_point now = Clock::now();
  if (!watching_ || now < next_look_) return;
  const std::uint64_t activity = pool_->state.activity();
  const bool at_work = std::exchange(looked_at_activity_, activity) != activity;
  const MemoryWatch::Look look = watch_->look(at_work);
  next_look_ = now + look.again_in;
  pool_->state.backing->keep_free(look.keep_free_bytes);
  ++memory_looks_;
  const std::uint64_t page_bytes = pool_->state.page_bytes();
  if (look.spare_bytes / 2 >= page_bytes) pool_->background.note_memory();
  const auto pages = [&](std::uint64_t bytes) { return (bytes + page_bytes - 1) / page_bytes; };
  if (look.relief.bytes == 0) return;
  const Result<std::uint64_t> given =
      pool_->background.give_up(pages(look.relief.bytes), Depth::kCached, 0);
  const std::uint64_t there = given ? *given * page_bytes : 0;
  if (look.relief.urgent_bytes <= there) return;
  (void)pool_->background.give_up(pages(look.relief.urgent_bytes - there), Depth::kInUse, 0);
}

void MaintenanceThread::acknowledge(const LimitState& state, std::string reason) {
  AckState outcome = state.over_bytes == 0 ? AckState::kApplied : AckState::kShrinking;
  // A refusal stays, whatever happens to a limit requested earlier.
  if (!refusal_.empty()) {
    outcome = AckState::kRefused;
    reason = refusal_;
  }
  if (const std::optional<Error> failure = pool_->state.failure()) {
    failure_reported_ = true;
    outcome = AckState::kFailed;
    reason = failure->message;
  }
  if (reason.empty() && state.effective_bytes > state.limit_bytes) {
    reason = "one page is always held, for the null block";
  }
  Ack ack;
  // While a wake waits, acknowledgements refer to the request before it: a later one would count as
  // replacing it.
  if (!waking_) acknowledged_revision_ = revision_;
  ack.revision = acknowledged_revision_;
  ack.effective_limit_bytes = state.effective_bytes;
  ack.mapped_bytes = state.mapped_bytes;
  ack.over_bytes = state.over_bytes;
  ack.state = outcome;
  if (const std::shared_ptr<DeviceSet>& device_set = pool_->state.device_set) {
    ack.min_bytes = device_set->min_bytes();
    ack.priority = device_set->priority();
  }
  acknowledged_over_bytes_ = state.over_bytes;
  acknowledged_effective_bytes_ = state.effective_bytes;
  if (debug_logging()) {
    debug_log("request %llu: %s; keeps to %s, %s are mapped, %s over%s%s",
              static_cast<unsigned long long>(revision_), text_of(outcome),
              size_text(ack.effective_limit_bytes).c_str(), size_text(ack.mapped_bytes).c_str(),
              size_text(ack.over_bytes).c_str(), reason.empty() ? "" : ": ", reason.c_str());
  }
  control_block_->acknowledge(ack, reason);
  const bool is_settled = outcome != AckState::kShrinking;
  if (is_settled && logged_request_ && logged_request_->revision == ack.revision) {
    log_outcome(outcome, state, reason);
  }
}

/// While pages are parked, unneeded ones are unmapped in steps. Once the pool is idle, cached
/// blocks are compacted.
void MaintenanceThread::decay() {
  if (options_.idle_trim.count() < 0) return;
  const Clock::time_point now = Clock::now();
  if (now < decay_.due() && decay_.is_running()) return;
  const std::uint64_t activity = pool_->state.activity();
  if (!decay_.is_running()) {
    if (pool_->background.arm_decay())
      decay_.begin(now, pool_->background.take_parked_use(), activity);
    return;
  }
  const bool idle = decay_.is_idle(activity);
  // Page by page, so that a waking engine waits for one page at most.
  while (idle && pool_->state.activity() == activity && !stopping_) {
    Result<std::uint64_t> moved = pool_->background.compact();
    if (!moved || *moved == 0) break;
  }
  const std::uint64_t unneeded = decay_.step(now, pool_->background.take_parked_use());
  if (unneeded > 0) (void)pool_->background.trim(unneeded);
  if (options_.sanity_check && idle) {
    if (Status sound = pool_->check_integrity(); !sound) {
      std::fprintf(stderr, "kvelastic: sanity check failed: %s\n", sound.error().message.c_str());
    }
  }
  if (!pool_->background.arm_decay()) decay_.end();
}

/// Evicts blocks unused for cache_idle, at most a hundred times in that interval.
void MaintenanceThread::evict_idle() {
  const Clock::time_point now = Clock::now();
  if (next_eviction_ != Clock::time_point::max() && now < next_eviction_) return;
  const std::optional<std::chrono::milliseconds> again = pool_->background.evict_idle();
  next_eviction_ = again ? now + std::max(*again, pool_->state.options.cache_idle / 100)
                         : Clock::time_point::max();
}

std::int64_t MaintenanceThread::sleep_ns(bool request_unreadable) {
  if (request_unreadable) return kRequestRetryNs;
  if (pursuing_) return kPursuitNs;
  const std::int64_t retry = shrink_again_ ? kShrinkRetryNs : kNever;
  Clock::time_point due = std::min(decay_.due(), next_eviction_);
  if (watching_) due = std::min(due, next_look_);
  if (measures_devices_) due = std::min(due, next_device_look_);
  if (due == Clock::time_point::max()) return retry;
  const auto left = std::chrono::nanoseconds(due - Clock::now()).count();
  return std::clamp<std::int64_t>(left, 0, retry < 0 ? kForever.count() : retry);
}

}  // namespace kvelastic
