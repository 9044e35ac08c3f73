// The maintenance thread of an instance. It waits on the segment's bell and does work that cannot
// or need not wait for the engine. It runs no Python, so neither the engine nor the GIL can delay
// it. One further thread per ledger forwards that ledger's bell, because a thread cannot wait on
// two futexes before Linux 5.16.
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
#include "segment/control_block.h"

namespace kvelastic {

struct MaintenanceOptions {
  /// Parked pages unused for this long are unmapped, half of them after a fifth of it. Negative:
  /// never.
  std::chrono::nanoseconds idle_trim = std::chrono::seconds(5);
  /// Run check_integrity() whenever the pool becomes idle, and print failures.
  bool sanity_check = false;
  /// The pages are host memory: release them before the machine runs out.
  bool watch_memory = false;
};

/// Executes and acknowledges requests (limit, guarantee, priority, sleep, trim), maps pages ahead
/// of demand, unmaps unneeded parked pages, releases memory for other instances, and requests
/// memory that this instance lacks. While the pool holds pages that it could release, it checks the
/// machine's free memory every 200 ms to 2 s. Otherwise it sleeps without a timer.
class MaintenanceThread {
 public:
  /// Publishes the pool into the segment, acknowledges revision 0 with the start limit, and starts
  /// the thread.
  static std::unique_ptr<MaintenanceThread> start(std::shared_ptr<Pool> pool,
                                                  std::shared_ptr<ControlBlockOwner> control_block,
                                                  const MaintenanceOptions& options);
  ~MaintenanceThread() { stop(); }
  MaintenanceThread(const MaintenanceThread&) = delete;
  MaintenanceThread& operator=(const MaintenanceThread&) = delete;

  /// How many times the machine's free memory was checked.
  std::uint64_t memory_looks() const { return memory_looks_; }

  /// Stops the thread and blocks until its current work is done. Idempotent. Does nothing in a
  /// forked child.
  void stop();

 private:
  using Clock = std::chrono::steady_clock;

  MaintenanceThread(std::shared_ptr<Pool> pool, std::shared_ptr<ControlBlockOwner> control_block,
                    const MaintenanceOptions& options)
      : pool_(std::move(pool)),
        control_block_(std::move(control_block)),
        options_(options),
        decay_(options.idle_trim) {}

  void run();
  /// Runs one round, then waits until the bell differs from `seen`.
  void go_round(std::uint32_t seen);
  bool read_request();
  void carry_out(const Request& request);
  void apply(const Request& request, std::uint64_t revision);
  void refuse(std::string reason);
  bool finish_waking();
  void refuse_waking(std::string reason);
  Status change_standing(const Request& request);
  void log_request(const Request& request);
  void log_outcome(AckState outcome, const LimitState& state, const std::string& reason);
  void look_at_devices();
  void see_capacity();
  void serve_reclaim_requests();
  void pass_bells_on(const LedgerMember& member);
  void finish_shrinking();
  void watch_memory();
  void acknowledge(const LimitState& state, std::string reason);
  void decay();
  void evict_idle();
  std::int64_t sleep_ns(bool request_unreadable);

  const std::shared_ptr<Pool> pool_;
  const std::shared_ptr<ControlBlockOwner> control_block_;
  const MaintenanceOptions options_;
  const OwnProcess started_by_;
  std::uint64_t revision_ = 0;  // of the current or last request
  std::string refusal_;         // why that request was refused; empty: it was not
  /// A request, until the log has its result.
  struct LoggedRequest {
    std::uint64_t revision;
    std::string what;  // `limit 1.00 GiB, sleep, by process 4711`
    std::uint64_t written_ns;
  };
  std::optional<LoggedRequest> logged_request_;
  /// A wake that waits for others to release its reserve; acknowledged then.
  struct Waking {
    Request request;
    std::uint64_t revision;
    Clock::time_point until;
    std::uint64_t min_before_bytes;  // restored if the wake is refused
    std::int64_t priority_before;
  };
  std::optional<Waking> waking_;
  std::uint64_t acknowledged_revision_ = 0;
  std::uint64_t acknowledged_over_bytes_ = 0;
  std::uint64_t acknowledged_effective_bytes_ = 0;
  bool failure_reported_ = false;
  bool shrink_again_ = false;  // the driver refused; only a timer wakes this thread for a retry
  ParkedDecay decay_;
  Clock::time_point next_eviction_{};
  bool measures_devices_ = false;  // GPUs, whose memory other processes may use
  Clock::time_point next_device_look_{};
  int unsure_looks_ = 0;   // in a row
  bool pursuing_ = false;  // memory is missing, or the pool is under memory pressure: poll soon
  std::unique_ptr<MemoryWatch> watch_;  // null: not configured
  bool watching_ = false;               // the pool has pages that it could release
  Clock::time_point next_look_{};
  std::uint64_t looked_at_activity_ = 0;
  std::atomic<std::uint64_t> memory_looks_{0};
  std::atomic<bool> stopping_{false};
  std::thread thread_;
  std::vector<std::thread> bell_threads_;  // one per ledger
};

}  // namespace kvelastic
