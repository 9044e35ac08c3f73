// The one thread of an instance: it waits on the record's bell and does what need not, or cannot,
// wait for the engine. It never runs Python, so no engine and no GIL can hold it up. For each
// ledger, another thread only passes its bell on: one thread cannot sleep on two futexes (before
// Linux 5.16).
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "pool/memory_watch.h"
#include "pool/parked_decay.h"
#include "pool/pool.h"
#include "segment/record.h"

namespace kvelastic {

struct KeeperOptions {
  /// Parked pages that were not needed for this long are given back, half of them after a fifth of
  /// it; negative: never.
  std::chrono::nanoseconds idle_trim = std::chrono::seconds(5);
  /// Run check_integrity() whenever the pool goes idle, and report what it finds.
  bool sanity_check = false;
  /// The pool's pages are of the machine's own memory: give them back before that runs out.
  bool watch_memory = false;
};

/// Carries out requests (limit, guarantee, priority, sleep, trim) and answers them, provisions
/// pages ahead of demand, gives parked pages back when they are not needed, gives others what they
/// ask for, and goes after what this instance lacks. While the pool has pages to give back it looks
/// every 200 ms to 2 s what the machine has left. Sleeps otherwise, without a timer.
class Keeper {
 public:
  /// Publishes the pool into the record, answers revision 0 with the start limit, starts the
  /// thread.
  static std::unique_ptr<Keeper> start(std::shared_ptr<Pool> pool,
                                       std::shared_ptr<RecordOwner> record,
                                       const KeeperOptions& options);
  ~Keeper() { stop(); }
  Keeper(const Keeper&) = delete;
  Keeper& operator=(const Keeper&) = delete;

  /// How often it has looked what the machine has left.
  std::uint64_t memory_looks() const { return memory_looks_; }

  /// Ends the thread; blocks until what it does is done. Safe to call twice. In a forked child it
  /// does nothing.
  void stop();

 private:
  using Clock = std::chrono::steady_clock;

  Keeper(std::shared_ptr<Pool> pool, std::shared_ptr<RecordOwner> record,
         const KeeperOptions& options)
      : pool_(std::move(pool)),
        record_(std::move(record)),
        options_(options),
        decay_(options.idle_trim) {}

  void run();
  /// One round, and then a wait until the bell is no longer `seen`.
  void go_round(std::uint32_t seen);
  bool read_request();
  void carry_out(const Request& request);
  void apply(const Request& request, std::uint64_t revision);
  void refuse(std::string reason);
  bool finish_waking();
  void refuse_waking(std::string reason);
  Status change_standing(const Request& request);
  void log_request(const Request& request);
  void log_outcome(AnswerState outcome, const LimitState& state, const std::string& reason);
  void look_at_devices();
  void see_capacity();
  void serve_asks();
  void pass_bells_on(const LedgerMember& member);
  void finish_shrinking();
  void watch_memory();
  void answer(const LimitState& state, std::string reason);
  void decay();
  void evict_idle();
  std::int64_t sleep_ns(bool request_unreadable);

  const std::shared_ptr<Pool> pool_;
  const std::shared_ptr<RecordOwner> record_;
  const KeeperOptions options_;
  const OwnProcess started_by_;
  std::uint64_t revision_ = 0;  // of the request that is carried out, or was the last
  std::string refusal_;         // why that one was refused; empty: it was not
  /// A request that came, until the log has said how it ended.
  struct Told {
    std::uint64_t revision;
    std::string what;  // `limit 1.00 GiB, sleep, by process 4711`
    std::uint64_t written_ns;
  };
  std::optional<Told> told_;
  /// A wake that waits until others have given what is to be reserved; it is answered then.
  struct Waking {
    Request request;
    std::uint64_t revision;
    Clock::time_point until;
    std::uint64_t min_before_bytes;  // what comes back where it is refused
    std::int64_t priority_before;
  };
  std::optional<Waking> waking_;
  std::uint64_t answered_revision_ = 0;
  std::uint64_t answered_over_bytes_ = 0;
  std::uint64_t answered_effective_bytes_ = 0;
  bool failure_told_ = false;
  bool shrink_again_ = false;  // the driver refused; nothing else may wake this thread for it
  ParkedDecay decay_;
  Clock::time_point next_eviction_{};
  bool device_is_shared_ = false;  // with those whom no ledger knows: look at it now and then
  Clock::time_point next_device_look_{};
  int unsure_looks_ = 0;   // in a row
  bool pursuing_ = false;  // memory is missing, or others squeeze this pool: look again soon
  std::unique_ptr<MemoryWatch> watch_;  // null: none is wanted
  bool watching_ = false;               // the pool has pages that it could give back
  Clock::time_point next_look_{};
  std::uint64_t looked_at_activity_ = 0;
  std::atomic<std::uint64_t> memory_looks_{0};
  std::atomic<bool> stopping_{false};
  std::thread thread_;
  std::vector<std::thread> bell_threads_;  // one a ledger
};

}  // namespace kvelastic
