#include "keeper.h"

#include <algorithm>
#include <cstdio>

namespace kvelastic {
namespace {

/// When to look again at a wish whose writers were faster than the reader.
constexpr std::int64_t kWishRetryNs = 100'000;
/// When to try again to give memory back that the driver would not take.
constexpr std::int64_t kShrinkRetryNs = 50'000'000;
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
  return keeper;
}

void Keeper::stop() {
  if (!thread_.joinable()) return;
  if (::getpid() != started_by_) {
    // A forked child has inherited this object, but not the thread; pool and record are of no use.
    thread_.detach();
    return;
  }
  stopping_ = true;
  record_->ring_bell();
  thread_.join();
  pool_->on_wanted(nullptr);
  pool_->publish_to(nullptr);
}

void Keeper::run() {
  while (!stopping_) {
    const std::uint32_t seen = record_->bell();
    const bool read = read_wish();
    finish_shrinking();
    (void)pool_->provision();  // out of memory: demand will say so when it comes
    decay();
    (void)record_->wait_bell(seen, sleep_ns(!read));
  }
}

bool Keeper::read_wish() {
  if (record_->wish_revision() == revision_) return true;
  const std::optional<Wish> wish = record_->read_wish();
  if (!wish) return false;
  revision_ = wish->revision;
  carry_out(*wish);
  return true;
}

void Keeper::carry_out(const Wish& wish) {
  // Two answers where memory has to be given back: that the wish was seen, then that it holds. What
  // is to be trimmed is not called applied before it is.
  const LimitState state =
      (wish.fields & Wish::kHasLimit) != 0 ? pool_->set_limit(wish.limit_bytes) : pool_->limit_state();
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

void Keeper::answer(const LimitState& state, std::string reason) {
  if (reason.empty() && state.effective_bytes > state.limit_bytes) {
    reason = "one page is always held, for the null block";
  }
  Answer answer;
  answer.revision = revision_;
  answer.effective_limit_bytes = state.effective_bytes;
  answer.mapped_bytes = state.mapped_bytes;
  answer.over_bytes = state.over_bytes;
  answer.state = state.over_bytes == 0 ? AnswerState::kApplied : AnswerState::kShrinking;
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
  const std::int64_t retry = shrink_again_ ? kShrinkRetryNs : kNever;
  if (next_decay_ == Clock::time_point::max()) return retry;
  const auto left = std::chrono::nanoseconds(next_decay_ - Clock::now()).count();
  return std::clamp<std::int64_t>(left, 0, shrink_again_ ? kShrinkRetryNs : kForever.count());
}

}  // namespace kvelastic
