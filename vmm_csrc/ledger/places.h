// Where an instance's pages lie: one place for each device, with a member in that device's ledger.
//
//   rank       0       1       2       3
//   device   GPU-a   GPU-a   GPU-b   GPU-b        a page has one copy for each rank
//   place    [ member, 2 copies ][ member, 2 copies ]
//
// What one ledger grants is of no use without the others: a page is there when every rank has its
// copy. So whatever is asked of ledgers is asked of all of them, and it is all or nothing: where
// one refuses, the others get theirs back. A process that dies in between has what it took in its
// slots, where it goes with the rest.
//
// Places are in the order of their devices' names, and everybody takes them in that order. Of two
// instances that want the last page of two devices the first one at the first device goes on, and
// the other one takes nothing: neither can hold a device that the other one waits for.
//
// Asks follow the same order. An ask stands in every ledger that lacks, so that all devices give at
// once. Memory that comes free is kept for it on a device only when the devices before that one
// have a page for it; else two instances, each first in another ledger, could keep free memory from
// each other for ever. What an instance waits for is always on a later device than what it keeps.
//
// What is given in bytes of the whole instance (limit, guarantee) is divided by copies, since every
// copy of a page is as large as the others.
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

/// A device with pages of an instance.
struct Place {
  std::shared_ptr<LedgerMember> member;
  std::vector<std::uint32_t> ranks;  ///< whose copies of the pages lie there
};

/// Thread-safe. None of the calls blocks but wait() and wait_for_claim(). Its lock is taken before
/// those of its members, and never held while it waits.
class Places {
 public:
  /// `copy_bytes` is what one rank's copy of a page takes. Fails with kInvalidArgument for no
  /// place, a device or a rank named twice, or a place without a rank.
  static Result<std::shared_ptr<Places>> create(std::vector<Place> places,
                                                std::uint64_t copy_bytes);

  /// In the order in which they are taken: of the devices' names.
  std::span<const Place> all() const { return places_; }
  /// Of each page, on all devices together.
  std::uint64_t copies() const { return copies_; }
  std::uint64_t copy_bytes() const { return copy_bytes_; }
  /// What one page costs all devices together.
  std::uint64_t page_bytes() const { return copies_ * copy_bytes_; }

  // --- pages ---------------------------------------------------------------------------------

  /// Takes at most `pages` pages and answers how many: every ledger has granted its copies of
  /// them, and nothing more.
  std::uint64_t grant(std::uint64_t pages);
  /// As of LedgerMember, on all devices.
  void arrived(std::uint64_t pages);
  void leaving(std::uint64_t pages);
  void give_back(std::uint64_t pages);
  /// Pages that grant() would give now.
  std::uint64_t room() const;
  /// The same with what others would have to give up.
  std::uint64_t reach() const;
  std::uint64_t granted_bytes() const;
  /// What the instance could hold on all devices together, if it were alone there.
  std::uint64_t capacity_bytes() const {
    return only_ ? only_->capacity_bytes() : capacity_of_several();
  }
  /// Tells each ledger what strangers hold of its device, from what drivers say by rank when `look`
  /// is called: the least that any rank of the device sees to be free. Looks again a few times
  /// where the sums have changed meanwhile. Answers the least certain of what was seen.
  Sight see_devices(const std::function<std::vector<std::optional<DeviceMemory>>()>& look);

  // --- guarantee, priority, limit --------------------------------------------------------------

  /// As LedgerMember::set_min, of all places together: each has its part, or all what they had.
  Status set_min(std::uint64_t min_bytes);
  std::uint64_t min_bytes() const { return min_bytes_.load(); }
  /// Pages that others never take while it is awake.
  std::uint64_t min_pages() const;
  Status set_priority(std::int64_t priority);
  std::int64_t priority() const { return places_.front().member->priority(); }
  void set_limit(std::uint64_t bytes);

  // --- reserve, sleep ------------------------------------------------------------------------
  // As of LedgerMember, on all devices or on none.

  void fall_asleep();
  bool is_asleep() const;
  struct Claim;
  /// One claim, for the threads that wait for it. Another thread may give it up at any moment.
  using Claimed = std::shared_ptr<const Claim>;
  static constexpr std::nullptr_t kNothingClaimed = nullptr;

  Result<Claimed> ask_to_wake();
  /// `bytes` are by place, in the order of all(). Smaller ones hold when the larger ones are there.
  Result<Claimed> ask_to_reserve(std::vector<std::uint64_t> bytes);
  bool claim_is_met();
  Status fail_claim();
  /// Fails with kReserve too where it was given up: by sleep, or by another claim. The outcome
  /// of a later claim changes nothing.
  Status wait_for_claim(Claimed claimed, std::chrono::nanoseconds timeout);

  // --- asking ----------------------------------------------------------------------------------

  /// Says that `pages` pages are missing, in each ledger that lacks some. False: on one of these
  /// devices nobody has to give, so there will be none.
  bool ask(std::uint64_t pages);
  /// Whether others have been asked on each device that has no page for this instance, and are
  /// counted on: see LedgerMember.
  bool is_memory_coming(std::chrono::nanoseconds patience) const;
  void stop_asking();
  /// As of LedgerMember, for each device.
  bool ask_for_excess();
  using Bells = std::vector<std::uint32_t>;
  Bells bells() const;
  /// Waits for the bell of the first ledger that has no page for this instance; bells are those of
  /// before it looked.
  void wait(const Bells& seen, std::chrono::nanoseconds timeout) const;
  const ReclaimRules& rules() const { return places_.front().member->rules(); }

  // --- being asked -----------------------------------------------------------------------------

  struct Wanted {
    std::uint64_t pages = 0;  ///< 0: nothing
    Depth depth = Depth::kParked;
    std::vector<std::uint64_t> bytes{};  ///< by place, of that depth
  };
  /// The shallowest request that is open in any ledger, in pages: the most that one of them wants.
  Wanted wanted() const;
  /// It was dealt with, and `given` pages were given.
  void handled(const Wanted& wanted, std::uint64_t given);

  // --- facts -----------------------------------------------------------------------------------

  /// The facts that others plan by, of all places together.
  void publish(std::uint64_t in_use_bytes, std::uint64_t evictable_bytes,
               std::uint64_t parked_bytes, bool active) {
    if (only_)
      return only_->publish(in_use_bytes, evictable_bytes, parked_bytes, page_bytes(), active);
    publish_parts(in_use_bytes, evictable_bytes, parked_bytes, active);
  }
  /// As LedgerMember::report_busy, in all ledgers.
  void report_busy(bool busy);
  /// Names the process of a rank, as LedgerMember::add_worker, where its pages lie. Fails with
  /// kInvalidArgument for a rank of no place.
  Status add_worker(std::uint32_t rank, std::uint32_t pid, std::uint64_t start_ticks);
  /// Whether every ledger has granted just these pages; kIntegrity.
  Status check_integrity(std::uint64_t pages) const;

 private:
  Places(std::vector<Place> places, std::uint64_t copies, std::uint64_t copy_bytes);

  std::uint64_t cost_bytes(const Place& place) const { return place.ranks.size() * copy_bytes_; }
  std::uint64_t part_of(std::uint64_t bytes, const Place& place) const;
  std::uint64_t capacity_of_several() const;
  void publish_parts(std::uint64_t in_use_bytes, std::uint64_t evictable_bytes,
                     std::uint64_t parked_bytes, bool active);
  Error named(const Place& place, Error error) const;
  Status refuse_in_a_child() const { return places_.front().member->refuse_in_a_child(); }
  void undo(const Claim& claim, std::size_t count);
  void give_up_claim();
  void finish_claim();
  Status fail_open_claim();
  Claimed begin(Claim claim);

  const std::vector<Place> places_;
  LedgerMember* const only_;  // where there is one place: every alloc and free publishes
  const std::uint64_t copies_, copy_bytes_;
  std::atomic<std::uint64_t> min_bytes_{0};
  std::atomic<std::uint64_t> ask_since_ns_{0}, ask_seen_ns_{0};
  std::mutex mutex_;              // claims, guarantee
  std::shared_ptr<Claim> claim_;  // the open one; null: there is none
};

}  // namespace kvelastic
