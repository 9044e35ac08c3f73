#include "keeper.h"

#include <algorithm>
#include <cstdio>
#include <new>

namespace kvelastic {
namespace {

/// When to look again at a wish whose writers were faster than the reader.
constexpr std::int64_t kWishRetryNs = 100'000;
/// When to try again to give memory back that the driver would not take.
constexpr std::int64_t kShrinkRetryNs = 50'000'000;
/// How often to look for memory that is missing, or whether others still ask for ours.
constexpr std::int64_t kPursuitNs = 20'000'000;
/// How often to look what others hold of a GPU.
constexpr std::int64_t kDeviceLookNs = 1'000'000'000;
constexpr std::int64_t kNever = -1;

}  // namespace

std::unique_ptr<Keeper> Keeper::start(std::shared_ptr<Pool> pool,
                                      std::shared_ptr<RecordOwner> record,
                                      const KeeperOptions& options) {
  std::unique_ptr<Keeper> keeper(new Keeper(std::move(pool), std::move(record), options));
  keeper->pool_->publish_to(keeper->record_);
  keeper->answer(keeper->pool_->limit_state(), {});
  keeper->pool_->on_wanted([bell = keeper->record_] { bell->ring_bell(); });
  keeper->thread_ = std::thread(&Keeper::run, keeper.get());
  if (keeper->pool_->member()) {
    keeper->bell_thread_ = std::thread(&Keeper::pass_bells_on, keeper.get());
  }
  return keeper;
}

void Keeper::stop() {
  if (!thread_.joinable()) return;
  if (!started_by_.is_this()) {
    // A forked child has inherited this object, but not the thread; pool and record are of no use.
    thread_.detach();
    if (bell_thread_.joinable()) bell_thread_.detach();
    return;
  }
  stopping_ = true;
  record_->ring_bell();
  thread_.join();
  if (bell_thread_.joinable()) {
    pool_->member()->ring();
    bell_thread_.join();
  }
  pool_->on_wanted(nullptr);
  pool_->publish_to(nullptr);
}

/// A round that finds no memory for its own lists is given up, and made again a little later: a
/// thread that let that out would end the process.
void Keeper::run() {
  while (!stopping_) {
    try {
      go_round();
    } catch (const std::bad_alloc&) {
      (void)record_->wait_bell(record_->bell(), kShrinkRetryNs);
    }
  }
}

void Keeper::go_round() {
  const std::uint32_t seen = record_->bell();
  const bool read = read_wish();
  device_is_shared_ = pool_->see_device();
  if (pool_->failed() && !failure_told_) answer(pool_->limit_state(), {});
  serve_asks();
  finish_shrinking();
  const bool missing = pool_->pursue();
  pursuing_ = pool_->expire_squeeze() || missing;
  (void)pool_->provision();  // out of memory: demand will say so when it comes
  decay();
  (void)record_->wait_bell(seen, sleep_ns(!read));
}

bool Keeper::read_wish() {
  if (record_->wish_revision() == revision_) return true;
  const std::optional<Wish> wish = record_->read_wish();
  if (!wish) return false;
  const std::uint64_t before = std::exchange(revision_, wish->revision);
  try {
    carry_out(*wish, before);
  } catch (const std::bad_alloc&) {
    revision_ = before;  // the next round carries it out again, and answers it
    throw;
  }
  return true;
}

/// Rings the instance's bell whenever the ledger's has been rung.
void Keeper::pass_bells_on() {
  const LedgerMember& member = *pool_->member();
  std::uint32_t heard = member.bell();
  record_->ring_bell();  // for what was asked before this thread listened
  while (!stopping_) {
    member.wait(heard, kForever);
    const std::uint32_t now = member.bell();
    if (std::exchange(heard, now) != now) record_->ring_bell();
  }
}

/// Gives others what they ask of this instance, as far as there is something to give.
void Keeper::serve_asks() {
  const std::shared_ptr<LedgerMember>& member = pool_->member();
  if (!member) return;
  const std::uint64_t page_bytes = pool_->page_cost_bytes();
  for (LedgerMember::Wanted wanted = member->wanted(); wanted.bytes > 0 && !stopping_;
       wanted = member->wanted()) {
    const std::uint64_t pages = (wanted.bytes + page_bytes - 1) / page_bytes;
    (void)pool_->give_up(pages, wanted.depth, member->min_bytes());
    member->handled(wanted.bytes);
  }
}

/// Guarantee and priority, all or nothing. Without a ledger there is nobody to be guarded from.
Status Keeper::change_standing(const Wish& wish, std::uint64_t seen) {
  const std::shared_ptr<LedgerMember>& member = pool_->member();
  if (std::max(wish.min_revision, wish.priority_revision) <= seen) return ok();
  if (!member) return Error{Errc::kInvalidArgument, "this instance shares its device with nobody"};
  if (wish.min_revision > seen) {
    if (Status set = member->set_min(wish.min_bytes); !set) return set;
  }
  if (wish.priority_revision > seen) member->set_priority(wish.priority);
  return ok();
}

/// `seen` is the revision of the wish before: only what was wished for since then is done.
void Keeper::carry_out(const Wish& wish, std::uint64_t seen) {
  if (Status standing = change_standing(wish, seen); !standing) {
    trims_done_ = wish.trim_requests;
    refuse(standing.error().message);
    return;
  }
  if (wish.asleep_revision > seen) pool_->set_asleep(wish.asleep != 0);
  // Two answers where memory has to be given back: that the wish was seen, then that it holds. What
  // is to be trimmed is not called applied before it is.
  const LimitState state =
      wish.limit_revision > seen ? pool_->set_limit(wish.limit_bytes) : pool_->limit_state();
  const bool trim = std::exchange(trims_done_, wish.trim_requests) != wish.trim_requests;
  if (!trim || state.over_bytes > 0) answer(state, {});
  if (trim) {
    Result<std::uint64_t> trimmed = pool_->trim();
    answer(pool_->limit_state(), trimmed ? std::string() : trimmed.error().message);
  }
  finish_shrinking();
  record_->add(Counter::kWishesApplied);
}

void Keeper::finish_shrinking() {
  shrink_again_ = false;
  if (answered_over_bytes_ == 0 && pool_->limit_state().over_bytes == 0) return;
  Result<LimitState> state = pool_->enforce_limit();
  const LimitState now = state ? *state : pool_->limit_state();
  const std::string reason = state ? std::string() : state.error().message;
  shrink_again_ = !state && !pool_->failed();
  if (now.over_bytes != answered_over_bytes_ || !reason.empty()) answer(now, reason);
}

/// The wish changes nothing, as a whole.
void Keeper::refuse(const std::string& reason) {
  answer(pool_->limit_state(), reason, AnswerState::kRefused);
}

void Keeper::answer(const LimitState& state, std::string reason,
                    std::optional<AnswerState> outcome) {
  if (const std::optional<Error> failure = pool_->failure()) {
    failure_told_ = true;
    outcome = AnswerState::kFailed;
    reason = failure->message;
  }
  if (reason.empty() && state.effective_bytes > state.limit_bytes) {
    reason = "one page is always held, for the null block";
  }
  Answer answer;
  answer.revision = revision_;
  answer.effective_limit_bytes = state.effective_bytes;
  answer.mapped_bytes = state.mapped_bytes;
  answer.over_bytes = state.over_bytes;
  answer.state =
      outcome.value_or(state.over_bytes == 0 ? AnswerState::kApplied : AnswerState::kShrinking);
  if (const std::shared_ptr<LedgerMember>& member = pool_->member()) {
    answer.min_bytes = member->min_bytes();
    answer.priority = member->priority();
  }
  answered_over_bytes_ = state.over_bytes;
  record_->answer(answer, reason);
}

/// Once an interval while pages are parked: those that the whole interval did not need go back. A
/// pool that did nothing at all in it keeps none.
void Keeper::decay() {
  if (options_.idle_trim.count() < 0) return;
  const Clock::time_point now = Clock::now();
  if (next_decay_ == Clock::time_point::max()) {
    if (!pool_->arm_decay()) return;
    (void)pool_->take_idle_parked();
    seen_activity_ = pool_->activity();
  } else if (now < next_decay_) {
    return;
  } else {
    const std::uint64_t activity = pool_->activity();
    const bool idle = std::exchange(seen_activity_, activity) == activity;
    // Page by page: an engine that wakes waits for one of them at most.
    while (idle && pool_->activity() == activity && !stopping_) {
      Result<std::uint64_t> moved = pool_->compact();
      if (!moved || *moved == 0) break;
    }
    const std::uint64_t unneeded = pool_->take_idle_parked();
    (void)pool_->trim(idle ? unneeded : unneeded / 2);
    if (options_.sanity_check && idle) {
      if (Status sound = pool_->check_integrity(); !sound) {
        std::fprintf(stderr, "kvelastic: sanity check failed: %s\n", sound.error().message.c_str());
      }
    }
  }
  next_decay_ = pool_->arm_decay() ? now + options_.idle_trim : Clock::time_point::max();
}

std::int64_t Keeper::sleep_ns(bool wish_unreadable) {
  if (wish_unreadable) return kWishRetryNs;
  if (pursuing_) return kPursuitNs;
  const std::int64_t look = device_is_shared_ ? kDeviceLookNs : kNever;
  const std::int64_t retry = shrink_again_ ? kShrinkRetryNs : look;
  if (next_decay_ == Clock::time_point::max()) return retry;
  const auto left = std::chrono::nanoseconds(next_decay_ - Clock::now()).count();
  return std::clamp<std::int64_t>(left, 0, retry < 0 ? kForever.count() : retry);
}

}  // namespace kvelastic
