// Between who shrinks a pool and who copies its blocks to a tier: the one says what it is about to
// evict and waits a bounded while, the other copies what would be lost.
//
//   shrinking (keeper, set_limit, sleep)          demoting (a thread of kvelastic/tiers)
//   want, wait, evict what is clean       =>      next(), begin_leaving, copy, store
//          ^------------ progressed() <=          end_leaving
//
// The owner holds the pool's lock for every call; those that wait let go of it.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <mutex>
#include <optional>

namespace kvelastic {

/// Why blocks are to be demoted.
enum class DemotionReason : std::uint8_t { kReclaim, kLimit, kSleep };

/// How long who shrinks waits for copies: others who ask for memory are not kept waiting, a person
/// who lowers a limit would rather keep what is cached.
struct DemotionWaits {
  std::chrono::nanoseconds reclaim = std::chrono::milliseconds(20);
  std::chrono::nanoseconds limit = std::chrono::seconds(2);
  std::chrono::nanoseconds sleep = std::chrono::seconds(30);

  std::chrono::nanoseconds of(DemotionReason reason) const {
    return reason == DemotionReason::kReclaim ? reclaim
           : reason == DemotionReason::kLimit ? limit
                                              : sleep;
  }
};

class Demotions {
 public:
  using Clock = std::chrono::steady_clock;
  using Lock = std::unique_lock<std::mutex>;

  struct Want {
    DemotionReason reason;
    Clock::time_point until;
    bool given_up = false;  ///< nothing more can be copied: waiting is for nothing
  };

  /// Who lacks memory asks again and again: in so long a time all asks together wait as long as one
  /// may (a token bucket).
  static constexpr std::chrono::seconds kReclaimRefill{1};

  void use(const DemotionWaits& waits) {
    waits_ = waits;
    reclaim_left_ = waits.reclaim;
  }
  /// Whether a thread serves next(): without one nobody waits.
  bool is_attended() const { return attended_; }
  /// Whether dirty blocks can be expected to be copied: a thread serves next(), and the newest
  /// batch that it began was stored.
  bool takes_blocks() const { return attended_ && stored_; }
  /// Whether somebody waits for copies just now: what is dirty is not to be evicted meanwhile.
  bool is_awaited() const { return !wants_.empty(); }

  // --- who shrinks ---------------------------------------------------------------------------

  /// A want, as long as it lives.
  class Wanting {
   public:
    Wanting(Demotions& demotions, DemotionReason reason)
        : Wanting(demotions, reason, demotions.waits_.of(reason)) {}
    Wanting(Demotions& demotions, DemotionReason reason, std::chrono::nanoseconds wait)
        : demotions_(demotions),
          want_(demotions.wants_.insert(demotions.wants_.end(),
                                        {reason, Clock::now() + wait, false})) {
      demotions_.changed_.notify_all();
    }
    Wanting(const Wanting&) = delete;
    Wanting& operator=(const Wanting&) = delete;
    ~Wanting() { demotions_.wants_.erase(want_); }

    /// Whether there is still time, and somebody who uses it.
    bool goes_on() const {
      return demotions_.attended_ && !want_->given_up && Clock::now() < want_->until;
    }
    /// Waits for progress, `most` at most.
    void wait(Lock& lock, std::chrono::nanoseconds most) const {
      const Clock::time_point until = std::min(want_->until, Clock::now() + most);
      const std::uint64_t seen = demotions_.progress_;
      (void)demotions_.changed_.wait_until(
          lock, until, [&] { return demotions_.progress_ != seen || !demotions_.attended_; });
    }

   private:
    Demotions& demotions_;
    const std::list<Want>::iterator want_;
  };

  /// How long others who ask may be kept waiting now.
  std::chrono::nanoseconds reclaim_wait(Clock::time_point now) {
    const auto passed = std::min<std::chrono::nanoseconds>(now - reclaim_seen_, kReclaimRefill);
    reclaim_seen_ = now;
    reclaim_left_ = std::min(waits_.reclaim,
                             reclaim_left_ + waits_.reclaim * passed.count() /
                                                 std::chrono::nanoseconds(kReclaimRefill).count());
    return reclaim_left_;
  }
  /// They have been kept waiting so long.
  void note_reclaim(std::chrono::nanoseconds waited) {
    reclaim_left_ -= std::min(waited, reclaim_left_);
  }

  // --- who demotes ---------------------------------------------------------------------------

  /// Waits for a want, `timeout` at most; the most pressing one. None: none came, or stop().
  std::optional<Want> next(Lock& lock, std::chrono::nanoseconds timeout) {
    attended_ = true;
    stopped_ = false;
    (void)changed_.wait_for(lock, timeout, [this] { return stopped_ || pressing() != nullptr; });
    const Want* want = pressing();
    return want != nullptr && !stopped_ ? std::optional(*want) : std::nullopt;
  }
  /// Blocks have been copied, or could not be.
  void progressed(bool any) {
    stored_ = any;
    all_leaving_ = false;
    if (!any) give_up();
    note_progress();
  }
  /// There was nothing to begin with; `leaving`: because all of it is being copied already.
  void found_nothing(bool leaving) {
    all_leaving_ = leaving;
    if (!leaving) give_up();
    note_progress();
  }
  /// Nobody serves next() any more; who waits there returns.
  void stop() {
    attended_ = false;
    stopped_ = true;
    note_progress();
  }

 private:
  const Want* pressing() const {
    const Want* first = nullptr;
    for (const Want& want : wants_) {
      if (!want.given_up && !all_leaving_ && (first == nullptr || want.until < first->until)) {
        first = &want;
      }
    }
    return first;
  }
  void give_up() {
    for (Want& want : wants_) want.given_up = true;
  }
  void note_progress() {
    ++progress_;
    changed_.notify_all();
  }

  DemotionWaits waits_;
  std::list<Want> wants_;
  std::condition_variable changed_;
  std::uint64_t progress_ = 0;
  std::chrono::nanoseconds reclaim_left_ = waits_.reclaim;
  Clock::time_point reclaim_seen_ = Clock::now();
  bool attended_ = false;
  bool stored_ = true;
  bool stopped_ = false;
  bool all_leaving_ = false;
};

}  // namespace kvelastic
