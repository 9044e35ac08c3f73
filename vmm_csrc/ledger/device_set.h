// The devices of an instance's pages: one placement per device, with a member in that device's
// ledger.
//
// clang-format off
//   rank         0       1       2       3
//   device     GPU-a   GPU-a   GPU-b   GPU-b        a page has one copy per rank
//   placement  [ member, 2 copies ][ member, 2 copies ]
// clang-format on
//
// A page exists only when every rank has its copy, so a grant in one ledger is useless without the
// others. Every operation therefore covers all ledgers and is all or nothing: if one refuses, the
// grants in the others are returned. If the process dies in between, its slots are reaped as usual.
//
// Placements are sorted by device name, and every instance takes grants in this order. If two
// instances want the last page of two devices, the first one at the first device proceeds and the
// other takes nothing. So neither holds a device that the other waits for.
//
// Memory requests follow the same order. A request is made in every ledger that lacks memory, so
// that all devices release memory at once. A device keeps released memory for the request only when
// all earlier devices have a page for it. Otherwise two instances, each first in another ledger,
// could block each other forever. An instance always waits for a later device than those it keeps.
//
// Values in bytes of the whole instance (limit, guarantee) are divided by copies, because all
// copies of a page have the same size.
//
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/own_process.h"
#include "base/status.h"
#include "driver/driver.h"
#include "ledger/ledger.h"

namespace kvelastic {

/// A device that has pages of an instance.
struct Placement {
  std::shared_ptr<LedgerMember> member;
  std::vector<std::uint32_t> ranks;  ///< ranks whose copies are on this device
};

/// Thread-safe. Only wait() and wait_for_claim() block. Its lock is taken before those of its
/// members, and never held while waiting.
class DeviceSet {
 public:
  /// `copy_bytes` is the size of one rank's copy of a page. Fails with kInvalidArgument for no
  /// placement, a duplicate device or rank, or a placement without ranks.
  static Result<std::shared_ptr<DeviceSet>> create(std::vector<Placement> placements,
                                                   std::uint64_t copy_bytes);

  /// In the order in which grants are taken: by device name.
  std::span<const Placement> all() const { return placements_; }
  /// Copies of each page on all devices.
  std::uint64_t copies() const { return copies_; }
  std::uint64_t copy_bytes() const { return copy_bytes_; }
  /// The size of a page with all its copies.
  std::uint64_t page_bytes() const { return copies_ * copy_bytes_; }

  // --- pages ---------------------------------------------------------------------------------

  /// Takes up to `pages` pages and returns how many. Every ledger has then granted exactly their
  /// copies.
  std::uint64_t grant(std::uint64_t pages);
  /// LedgerMember's functions, on all devices.
  void arrived(std::uint64_t pages);
  void leaving(std::uint64_t pages);
  void give_back(std::uint64_t pages);
  /// Pages that grant() would return now.
  std::uint64_t room() const;
  /// Pages that could become available: room() plus what others would have to release.
  std::uint64_t reach() const;
  std::uint64_t granted_bytes() const;
  /// The most that the instance could hold on all devices without other instances.
  std::uint64_t capacity_bytes() const {
    return only_ ? only_->capacity_bytes() : capacity_of_several();
  }
  /// Records other processes' memory in each ledger, from the drivers' reports by rank when `look`
  /// is called; for a device, the least free memory that any of its ranks reports. Retries a few
  /// times if the sums change. Returns the least certain observation.
  Sight see_devices(const std::function<std::vector<std::optional<DeviceMemory>>()>& look);

  // --- guarantee, priority, limit --------------------------------------------------------------

  /// Sets the guarantee of the whole instance: all placements get their parts, or all keep their
  /// old ones. It counts as whole pages, rounded down; at least one if it is not 0.
  Status set_min(std::uint64_t min_bytes);
  std::uint64_t min_bytes() const { return min_bytes_.load(); }  ///< as it was set
  /// Pages that other instances never take while it is awake.
  std::uint64_t min_pages() const { return pages_of(min_bytes_.load()); }
  Status set_priority(std::int64_t priority);
  std::int64_t priority() const { return placements_.front().member->priority(); }
  void set_limit(std::uint64_t bytes);

  // --- reserve, sleep ------------------------------------------------------------------------
  // LedgerMember's functions, on all devices or on none.

  void fall_asleep();
  bool is_asleep() const;
  struct Claim;
  /// One claim, for the threads that wait for it. Another thread may withdraw it at any time.
  using Claimed = std::shared_ptr<const Claim>;
  static constexpr std::nullptr_t kNothingClaimed = nullptr;

  Result<Claimed> claim_wake();
  /// `bytes` are by placement, in the order of `all()`. Decreases take effect once the increases
  /// are available.
  Result<Claimed> claim_reserve(std::vector<std::uint64_t> bytes);
  bool claim_is_met();
  Status fail_claim();
  /// Also fails with kReserve if the claim was withdrawn by sleep or another claim. Later claims do
  /// not affect the result.
  Status wait_for_claim(Claimed claimed, std::chrono::nanoseconds timeout);

  // --- memory requests of this member --------------------------------------------------------

  /// Requests memory for `pages` pages in each ledger that lacks some. Returns false if no instance
  /// has to release memory on one of those devices, so that none will become available.
  bool request_memory(std::uint64_t pages);
  /// True if, on each device without a page for this instance, others were requested to release
  /// memory and are expected to: see LedgerMember.
  bool is_memory_coming(std::chrono::nanoseconds patience) const;
  void end_memory_request();
  /// LedgerMember::request_excess() for each device.
  bool request_excess();
  using Bells = std::vector<std::uint32_t>;
  Bells bells() const;
  /// Waits for the bell of the first ledger without a page for this instance. `seen` are the bells
  /// before the caller's check.
  void wait(const Bells& seen, std::chrono::nanoseconds timeout) const;
  const ReclaimRules& rules() const { return placements_.front().member->rules(); }

  // --- reclaim requests of other members -----------------------------------------------------

  struct OpenReclaim {
    std::uint64_t pages = 0;  ///< 0: nothing
    Depth depth = Depth::kParked;
    std::vector<std::uint64_t> bytes{};  ///< by placement, at that depth
  };
  /// The open reclaim request of the shallowest depth in any ledger, in pages: the largest of that
  /// depth.
  OpenReclaim open_reclaim() const;
  /// Reports the request as handled, with `given` pages released.
  void handled(const OpenReclaim& open, std::uint64_t given);

  // --- facts -----------------------------------------------------------------------------------

  /// Publishes the facts that other instances plan with, summed over the placements.
  void publish(std::uint64_t in_use_bytes, std::uint64_t evictable_bytes,
               std::uint64_t parked_bytes, bool active) {
    if (only_)
      return only_->publish(in_use_bytes, evictable_bytes, parked_bytes, page_bytes(), active);
    publish_parts(in_use_bytes, evictable_bytes, parked_bytes, active);
  }
  /// LedgerMember::report_busy() in all ledgers.
  void report_busy(bool busy);
  /// LedgerMember::is_busy().
  bool is_busy() const { return placements_.front().member->is_busy(); }
  /// Registers a rank's process in the ledger of its device, as LedgerMember::add_worker. Fails
  /// with kInvalidArgument for an unknown rank.
  Status add_worker(std::uint32_t rank, std::uint32_t pid, std::uint64_t start_ticks);
  /// Fails with kIntegrity unless every ledger has granted exactly these pages.
  Status check_integrity(std::uint64_t pages) const;

 private:
  DeviceSet(std::vector<Placement> placements, std::uint64_t copies, std::uint64_t copy_bytes);

  std::uint64_t cost_bytes(const Placement& placement) const {
    return placement.ranks.size() * copy_bytes_;
  }
  std::uint64_t pages_of(std::uint64_t min_bytes) const;
  std::uint64_t capacity_of_several() const;
  void publish_parts(std::uint64_t in_use_bytes, std::uint64_t evictable_bytes,
                     std::uint64_t parked_bytes, bool active);
  Error named(const Placement& placement, Error error) const;
  Status refuse_in_a_child() const { return placements_.front().member->refuse_in_a_child(); }
  void undo(const Claim& claim, std::size_t count);
  void give_up_claim();
  void finish_claim();
  Status fail_open_claim();
  Claimed begin(Claim claim);

  const std::vector<Placement> placements_;
  LedgerMember* const only_;  // set for a single placement: every alloc and free publishes
  const std::uint64_t copies_, copy_bytes_;
  std::atomic<std::uint64_t> min_bytes_{0};
  std::atomic<std::uint64_t> request_since_ns_{0}, request_seen_ns_{0};
  std::mutex mutex_;              // claims, guarantee
  std::shared_ptr<Claim> claim_;  // the open claim, or null
};

}  // namespace kvelastic
