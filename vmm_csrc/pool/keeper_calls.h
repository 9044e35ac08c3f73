// What the keeper has been called for, so that it is called once for each thing, and for none of
// them never. Its owner says after every change what is due; *what* is due is a state of the pool,
// so it does not matter in which order changes come. Whoever owns this holds the lock.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>

namespace kvelastic {

/// What the pool has for its keeper to do.
struct KeeperWork {
  bool enforce = false;          ///< enforcing the limit would give something back
  bool provision = false;        ///< pages should be mapped ahead of demand
  bool decay = false;            ///< something to trim or compact once the pool is idle
  bool cache_idle = false;       ///< cached blocks that will have been idle for long
  bool watch = false;            ///< pages that could be given back where memory runs short
  bool pursue = false;           ///< others have to be asked for pages
  bool look = false;             ///< so much has come or gone that a GPU is to be looked at
  bool failed = false;           ///< the backing has failed for good
  std::uint64_t over_pages = 0;  ///< above the limit: what the keeper answers to the operator
};

class KeeperCalls {
 public:
  /// `wake` must neither block nor call back; null: there is no keeper.
  void on_work(std::function<void()> wake) {
    wake_ = std::move(wake);
    enforce_ = provision_ = decay_ = cache_idle_ = watch_ = pursue_ = look_ = false;
  }
  bool has_keeper() const { return static_cast<bool>(wake_); }

  /// Calls the keeper if there is work that it has not been called for. Pre: has_keeper().
  void see(const KeeperWork& work) {
    // While a thread enforces the limit, it finds by itself what there is to give. Where it failed,
    // the keeper has been called and tries again in its own time.
    const bool enforce = enforcing_ == 0 && work.enforce && !enforce_;
    if (enforcing_ == 0) enforce_ = work.enforce;
    const bool provision = work.provision && !provision_;
    const bool decay = work.decay && !decay_;
    const bool cache_idle = work.cache_idle && !cache_idle_;
    const bool watch = work.watch && !watch_;
    const bool pursue = work.pursue && !pursue_;
    const bool look = work.look && !look_;
    const bool answer = work.over_pages != answered_over_pages_;
    const bool failed = work.failed && !std::exchange(failed_, true);
    if (!enforce && !provision && !decay && !cache_idle && !watch && !pursue && !look && !answer &&
        !failed)
      return;
    provision_ = provision_ || provision;
    decay_ = decay_ || decay;
    cache_idle_ = cache_idle_ || cache_idle;
    watch_ = watch_ || watch;
    pursue_ = pursue_ || pursue;
    look_ = look_ || look;
    answered_over_pages_ = work.over_pages;
    wake_();
  }

  /// Whether the keeper was called to provision since it last took that up; it does so now.
  bool take_provision() { return std::exchange(provision_, false); }
  /// Whether it was called to provision and has not taken that up yet.
  bool is_called_to_provision() const { return provision_; }
  /// Whether the keeper's decay timer runs.
  bool is_decay_armed() const { return decay_; }
  bool arm_decay(bool armed) { return decay_ = armed; }
  /// Whether the keeper's timer for idle cached blocks runs.
  bool arm_cache_idle(bool armed) { return cache_idle_ = armed; }
  /// Whether the keeper looks what the machine has left, until it finds no page to give back.
  bool arm_watch(bool armed) { return watch_ = armed; }
  /// The keeper no longer asks others for pages: it is to be called for the next that are missing.
  void end_pursuit() { pursue_ = false; }
  /// The keeper looks at the devices now.
  void end_look() { look_ = false; }

  /// A thread enforces the limit as long as this lives; several may, each in its turn.
  class Enforcing {
   public:
    explicit Enforcing(KeeperCalls& calls) : calls_(calls) { ++calls_.enforcing_; }
    ~Enforcing() { --calls_.enforcing_; }
    Enforcing(const Enforcing&) = delete;
    Enforcing& operator=(const Enforcing&) = delete;

   private:
    KeeperCalls& calls_;
  };

 private:
  std::function<void()> wake_;
  unsigned enforcing_ = 0;  // threads
  bool enforce_ = false;    // called for, and still due
  bool provision_ = false;
  bool decay_ = false;
  bool cache_idle_ = false;
  bool watch_ = false;
  bool pursue_ = false;
  bool look_ = false;
  bool failed_ = false;
  std::uint64_t answered_over_pages_ = 0;
};

}  // namespace kvelastic
