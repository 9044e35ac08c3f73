// Coordinates a shrinking pool with the tier that copies its blocks. The shrinking thread announces
// an eviction and waits for a bounded time; the demoting thread copies blocks that would be lost.
//
// clang-format off
//   shrinking (maintenance, set_limit, sleep)       demoting (a thread of kvelastic/tiers)
//   announce, wait, evict clean blocks        =>    next(), begin_writeback, copy, store
//          ^-------------- progressed()       <=    end_writeback
// clang-format on
//
// The caller holds the pool's lock; calls that wait release it while waiting.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <mutex>
#include <optional>

namespace kvelastic {

/// Why blocks are demoted.
enum class DemotionReason : std::uint8_t { kReclaim, kLimit, kSleep };

/// How long a shrinking pool waits for write-back. Reclaim must be fast; an operator who lowers a
/// limit would rather keep the cache.
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
    bool given_up = false;  ///< no further block can be copied, so waiting is useless
  };

  /// Memory requests repeat, so all of them share one waiting budget, which refills over this time
  /// (a token bucket).
  static constexpr std::chrono::seconds kReclaimRefill{1};

  /// How often a call that waits for copies checks for interruption and releases clean pages.
  static constexpr std::chrono::milliseconds kLookInterval{5};

  void use(const DemotionWaits& waits) {
    waits_ = waits;
    reclaim_left_ = waits.reclaim;
  }
  /// True if a thread serves next(). Without one no call waits.
  bool is_attended() const { return attended_; }
  /// True if dirty blocks are expected to be copied: a thread serves next(), and its last batch was
  /// stored.
  bool takes_blocks() const { return attended_ && stored_; }
  /// True while a call waits for copies; dirty blocks must not be evicted then.
  bool is_awaited() const { return !wants_.empty(); }

  // --- shrinking side -------------------------------------------------------------------------

  /// A request for copies, for the lifetime of this object.
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

    /// True while there is time left and a thread that copies.
    bool goes_on() const {
      return demotions_.attended_ && !want_->given_up && Clock::now() < want_->until;
    }
    /// Waits for progress, at most for kLookInterval.
    void wait(Lock& lock) const {
      const Clock::time_point until = std::min(want_->until, Clock::now() + kLookInterval);
      const std::uint64_t seen = demotions_.progress_;
      (void)demotions_.changed_.wait_until(
          lock, until, [&] { return demotions_.progress_ != seen || !demotions_.attended_; });
    }

   private:
    Demotions& demotions_;
    const std::list<Want>::iterator want_;
  };

  /// How long a memory request of another instance may wait now.
  std::chrono::nanoseconds reclaim_wait(Clock::time_point now) {
    const auto passed = std::min<std::chrono::nanoseconds>(now - reclaim_seen_, kReclaimRefill);
    reclaim_seen_ = now;
    reclaim_left_ = std::min(waits_.reclaim,
                             reclaim_left_ + waits_.reclaim * passed.count() /
                                                 std::chrono::nanoseconds(kReclaimRefill).count());
    return reclaim_left_;
  }
  /// Charges the waiting budget.
  void note_reclaim(std::chrono::nanoseconds waited) {
    reclaim_left_ -= std::min(waited, reclaim_left_);
  }

  // --- demoting side --------------------------------------------------------------------------

  /// Waits for a request, at most for `timeout`, and returns the most urgent one. Empty after a
  /// timeout or stop().
  std::optional<Want> next(Lock& lock, std::chrono::nanoseconds timeout) {
    attended_ = true;
    stopped_ = false;
    (void)changed_.wait_for(lock, timeout, [this] { return stopped_ || pressing() != nullptr; });
    const Want* want = pressing();
    return want != nullptr && !stopped_ ? std::optional(*want) : std::nullopt;
  }
  /// Reports that blocks were copied, or that none could be.
  void progressed(bool any) {
    stored_ = any;
    all_under_writeback_ = false;
    if (!any) give_up();
    note_progress();
  }
  /// Reports that there were no blocks to begin with; `under_writeback`: all are under writeback
  /// already.
  void found_nothing(bool under_writeback) {
    all_under_writeback_ = under_writeback;
    if (!under_writeback) give_up();
    note_progress();
  }
  /// No thread serves next() any longer; a waiting one returns.
  void stop() {
    attended_ = false;
    stopped_ = true;
    note_progress();
  }

 private:
  const Want* pressing() const {
    const Want* first = nullptr;
    for (const Want& want : wants_) {
      if (!want.given_up && !all_under_writeback_ &&
          (first == nullptr || want.until < first->until)) {
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
  bool all_under_writeback_ = false;
};

}  // namespace kvelastic
