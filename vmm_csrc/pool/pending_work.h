// Pending maintenance work. Each kind of work wakes the maintenance thread exactly once
// and is never lost. The owner reports after every change which work is due. That is a state, so
// the order of changes does not matter. The caller holds the pool's lock.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>

namespace kvelastic {

/// The work that is due.
struct DueWork {
  bool enforce = false;          ///< enforcing the limit would release memory
  bool provision = false;        ///< pages should be mapped ahead of demand
  bool decay = false;            ///< trim or compact once the pool is idle
  bool cache_idle = false;       ///< cached blocks will exceed their idle time
  bool watch = false;            ///< the machine's free memory matters
  bool pursue = false;           ///< other instances must be requested to release pages
  bool look = false;             ///< after a large move a GPU must be measured
  bool failed = false;           ///< the backing has failed permanently
  std::uint64_t over_pages = 0;  ///< above the limit, as acknowledged to the operator
};

class PendingWork {
 public:
  /// `wake` must neither block nor call back; null: there is no maintenance thread.
  void on_work(std::function<void()> wake) {
    wake_ = std::move(wake);
    enforce_ = provision_ = decay_ = cache_idle_ = watch_ = pursue_ = look_ = false;
  }
  bool has_thread() const { return static_cast<bool>(wake_); }

  /// Wakes the maintenance thread if new work is due. Pre: has_thread().
  void see(const DueWork& work) {
    // A thread that enforces the limit finds all releasable memory itself. After its failure, the
    // maintenance thread has been woken and retries on its own timer.
    const bool enforce = enforcing_ == 0 && work.enforce && !enforce_;
    if (enforcing_ == 0) enforce_ = work.enforce;
    const bool provision = work.provision && !provision_;
    const bool decay = work.decay && !decay_;
    const bool cache_idle = work.cache_idle && !cache_idle_;
    const bool watch = work.watch && !watch_;
    const bool pursue = work.pursue && !pursue_;
    const bool look = work.look && !look_;
    const bool ack = work.over_pages != acknowledged_over_pages_;
    const bool failed = work.failed && !std::exchange(failed_, true);
    if (!enforce && !provision && !decay && !cache_idle && !watch && !pursue && !look && !ack &&
        !failed)
      return;
    provision_ = provision_ || provision;
    decay_ = decay_ || decay;
    cache_idle_ = cache_idle_ || cache_idle;
    watch_ = watch_ || watch;
    pursue_ = pursue_ || pursue;
    look_ = look_ || look;
    acknowledged_over_pages_ = work.over_pages;
    wake_();
  }

  /// True if provisioning was pending; the caller does it now.
  bool take_provision() { return std::exchange(provision_, false); }
  /// True if provisioning is pending.
  bool is_provision_pending() const { return provision_; }
  /// True while the decay timer runs.
  bool is_decay_armed() const { return decay_; }
  bool arm_decay(bool armed) { return decay_ = armed; }
  /// Starts or stops the timer for idle cached blocks.
  bool arm_cache_idle(bool armed) { return cache_idle_ = armed; }
  /// Starts or stops the checks of the machine's free memory.
  bool arm_watch(bool armed) { return watch_ = armed; }
  /// Requests to other instances have ended; the next missing pages wake the thread again.
  void end_pursuit() { pursue_ = false; }
  /// The devices are being measured.
  void end_look() { look_ = false; }

  /// A thread enforces the limit during this object's lifetime. Several may, one after the other.
  class Enforcing {
   public:
    explicit Enforcing(PendingWork& calls) : calls_(calls) { ++calls_.enforcing_; }
    ~Enforcing() { --calls_.enforcing_; }
    Enforcing(const Enforcing&) = delete;
    Enforcing& operator=(const Enforcing&) = delete;

   private:
    PendingWork& calls_;
  };

 private:
  std::function<void()> wake_;
  unsigned enforcing_ = 0;  // threads
  bool enforce_ = false;    // pending and still due
  bool provision_ = false;
  bool decay_ = false;
  bool cache_idle_ = false;
  bool watch_ = false;
  bool pursue_ = false;
  bool look_ = false;
  bool failed_ = false;
  std::uint64_t acknowledged_over_pages_ = 0;
};

}  // namespace kvelastic
