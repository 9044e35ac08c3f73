// The ledger: one file per device in shared memory that states how many bytes each instance may
// hold. An instance creates no page without a grant.
//
//   header     identity of the device, written once before the file is visible; under a CRC
//   capacity   limit for the members together, and the memory that other processes use
//   slots      one per member: granted and claimed bytes, guarantee, reserve, priority, memory
//              request, facts, mailbox
//
// No sum is stored, so no sum can be wrong. To take a grant, a member writes a claim into its slot,
// adds up all slots, and keeps or withdraws the claim. All accesses are sequentially consistent, so
// of two members that claim the last page at least the later one sees the other's claim. The member
// in the lower slot proceeds; the other withdraws and retries. The bytes of a dead member are only
// in its slot: any process frees them all with one compare-and-swap on the slot. No member waits
// for another. A member that is stopped half-way keeps only its claim.
//
// A member also states its memory on the device besides grants: its *reserve* (device_account.h has
// the rules of the sums). Reserve and guarantee count while the member is awake:
//
// clang-format off
//            fall_asleep                  claim_wake: refused if the sums do not allow it
//   awake  ------------->  asleep  -----------------------------------------+
//     ^                      ^   min, pledged: 0                            |
//     |                      |                                              v
//     |                      +----------------- give_up_claim ----------  waiting
//     +---------- all pledged memory is available: reserved ------------  min and pledged count:
//                                             other members get no grant of the pledged memory and
//                                             are requested to release their part of it
// clang-format on
//
// To increase its reserve, an awake member uses the same steps, from `reserved` to `pledged`. A
// guarantee or reserve is claimed like a grant: it is written, all slots are added up, and it is
// withdrawn if the sum is too large. Of two simultaneous claims the lower slot's stays.
//
// The memory of other processes on a GPU is the used memory that is neither granted nor reserved.
// Usage and sums must belong to the same moment, but drivers are queried without any lock. So each
// slot counts its changes and states which part of its grant is in transit. An observer reads all
// slots, queries the driver, and reads the slots again:
//
// clang-format off
//   grant                 arrived              leaving              give_back
//   -----> granted, in transit -----> granted ------> granted, in transit ------> neither
//          may be mapped              is mapped       may be unmapped
// clang-format on
//
// If the slots differ, the observation is discarded. If they are equal, the members hold the
// granted memory, minus at most the part in transit.
//
// Joining needs no lock that another process could keep. A joiner claims a slot by locking its byte
// of the file (liveness_lock.h); the lock ends with the joiner. Each membership has separate bytes,
// so a reused slot is not mistaken for that of its former member:
//
//   byte = generation of the slot | slot (7 bits) | process (7 bits)
//                                            process: 0 the scheduler, 1 + r the worker of rank r
//
// A process that finds the file without members shuts its door and removes it. A joiner at the same
// time either makes the shut fail, or sees the shut door and creates a new file.
//
// Every process of the user can truncate the file. The members then get SIGBUS and their engines
// end. tmpfs cannot prevent that: one user's shared memory is only as safe as that user's
// processes.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/futex.h"
#include "base/liveness_lock.h"
#include "base/own_process.h"
#include "base/status.h"
#include "ledger/device_account.h"
#include "ledger/reclaim.h"
#include "pages/page_grant.h"

namespace kvelastic {

inline constexpr std::uint64_t kLedgerMagic = 0x5245'4744'454c'564bULL;  ///< "KVLEDGER" in memory
inline constexpr std::uint32_t kLedgerAbiVersion = 6;
inline constexpr std::size_t kLedgerSlots = 128;
inline constexpr std::size_t kLedgerWorkers = 64;  ///< per member
static_assert(kLedgerSlots <= 128 && kLedgerWorkers < 128,
              "a incarnation byte has 7 bits for each");
/// Grants are multiples of this unit: a page's bytes are rounded up.
inline constexpr std::uint64_t kGrantUnitBytes = std::uint64_t{64} << 10;

// ---------------------------------------------------------------------------- the shared layout

using SharedWord = std::atomic<std::uint64_t>;
static_assert(sizeof(SharedWord) == 8 && SharedWord::is_always_lock_free);

struct LedgerHeader {
  std::uint64_t magic;
  std::uint32_t abi_version;
  std::uint32_t header_bytes;  ///< bytes under the CRC
  std::uint64_t total_bytes;
  std::uint32_t crc32;  ///< of the header with this field zero
  std::uint32_t owner_uid;
  std::array<std::uint8_t, 16> boot_id;
  std::uint64_t created_realtime_ns;
  std::array<std::uint64_t, 1> reserved0;
  std::array<char, 64> device;
  std::array<char, 64> group;
  std::array<std::uint64_t, 8> reserved1;
};
static_assert(sizeof(LedgerHeader) == 256);

/// The owner of a slot; written before the slot is alive.
struct LedgerIdentity {
  std::uint32_t pid = 0;
  std::uint32_t uid = 0;
  std::uint64_t start_ticks = 0;
  std::uint64_t pid_namespace = 0;
  std::array<std::uint8_t, 16> uuid{};  ///< of the instance's segment
  std::array<char, 64> name{};          ///< of the instance's segment
};

/// A process that maps an instance's pages; pid 0: unused entry.
struct LedgerWorker {
  std::atomic<std::uint32_t> pid;
  SharedWord start_ticks;
};

struct LedgerSlot {
  // Used by every grant, so in one cache line.
  alignas(64) SharedWord incarnation;  ///< generation * 2, + 1 while alive
  SharedWord units;                    ///< granted * 2^32 + claimed, in units of kGrantUnitBytes
  SharedWord min_bytes;                ///< the guarantee as it counts now; 0 while asleep
  SharedWord pledged_bytes;   ///< at least `reserved_bytes`: memory that no other member is granted
  SharedWord reserved_bytes;  ///< its memory besides grants; 0 while asleep
  std::atomic<std::int64_t> priority;
  SharedWord request_bytes;    ///< the memory request; 0: none
  SharedWord request_seen_ns;  ///< when it was last renewed; CLOCK_MONOTONIC, as all times here

  alignas(64) SharedWord request_since_ns;
  SharedWord active_ns;  ///< last alloc or free
  SharedWord limit_bytes;
  SharedWord in_use_bytes;
  SharedWord evictable_bytes;  ///< whole pages of cached blocks, which others may reclaim
  SharedWord parked_bytes;
  SharedWord page_bytes;

  SharedWord request_keeps;  ///< 1: released memory is kept for the request, see Contender::keeps
  SharedWord own_min_bytes;  ///< the guarantee while awake
  SharedWord own_reserve_bytes;  ///< the reserve while awake
  SharedWord asleep;             ///< 1: asleep or waking
  SharedWord checking;  ///< 1: a claim of min and pledged is being checked and may be withdrawn
  SharedWord moves;     ///< changes of the grant * 2^32 + units in transit
  SharedWord reported;  ///< a `Reported`

  // The mailbox, one pair of counters per depth. Requesters add to `reclaim`, the member to
  // `handled`; both only increase.
  alignas(64) std::array<SharedWord, kDepths> reclaim_bytes;
  SharedWord reclaim_since_ns;  ///< since when a reclaim request has been open
  FutexWord bell;               ///< rung for reclaim requests, and when memory becomes available
  alignas(64) std::array<SharedWord, kDepths> handled_bytes;

  alignas(64) LedgerIdentity identity;
  // The processes that map the pages, if the scheduler does not. The memory stays the instance's
  // while one of them lives, even if the scheduler is dead.
  std::array<LedgerWorker, kLedgerWorkers> workers;
};

struct LedgerLayout {
  LedgerHeader header;
  alignas(64) SharedWord capacity_bytes;
  SharedWord most_bytes;    ///< the largest capacity so far, which limited the grants
  SharedWord total_bytes;   ///< as DeviceMemorySize has it
  SharedWord others_bytes;  ///< the device's memory used by processes that are not members
  SharedWord others_at_ns;  ///< when that was last measured; 0: never
  std::atomic<std::uint32_t> slots_used;  ///< slots from here on were never taken
  SharedWord door;                        ///< joins * 2, + 1 when the door is shut
  SharedWord excess_request_ns;  ///< when the excess over the capacity was last requested; 0: never
  SharedWord page_bytes;         ///< the device's default page size; 0: not decided yet
  std::array<LedgerSlot, kLedgerSlots> slots;
};
static_assert(std::is_standard_layout_v<LedgerLayout>);
inline constexpr std::size_t kLedgerBytes = sizeof(LedgerLayout);

// ------------------------------------------------------------------------------------- readers

/// The byte of a process of the member that has `incarnation` in `slot`: 0 for its scheduler, 1 +
/// rank for a worker.
constexpr std::uint64_t ledger_liveness_byte(std::size_t slot, std::uint64_t incarnation,
                                             std::size_t process) {
  return (incarnation >> 1) << 14 | std::uint64_t{slot} << 7 | process;
}

/// A snapshot of one member.
struct LedgerEntry {
  std::size_t slot;
  std::uint64_t incarnation;
  LedgerIdentity identity;
  std::vector<ProcessStart> workers;
  Liveness alive;   ///< dead: neither its scheduler nor any worker lives
  Contender facts;  ///< min_bytes is the guarantee as it counts now
  std::uint64_t limit_bytes, in_use_bytes, page_bytes;
  std::uint64_t own_min_bytes, own_reserve_bytes;  ///< while awake
  std::uint64_t pledged_bytes, reserved_bytes;     ///< as they count now (see LedgerSlot)
  bool asleep;                                     ///< asleep or waking
};

/// Returns the ABI version if the bytes start like a ledger of any version; otherwise empty.
std::optional<std::uint32_t> ledger_version(std::span<const std::byte> bytes);

/// Reads a ledger and never writes, so the bytes may be mapped PROT_READ. Any thread, any process.
/// The bytes must outlive the view.
class LedgerView {
 public:
  /// Fails with kSegmentFormat if the size, magic, version or CRC is wrong.
  static Result<LedgerView> open(std::span<const std::byte> bytes);

  const LedgerHeader& header() const { return layout_->header; }
  std::uint64_t capacity_bytes() const { return layout_->capacity_bytes; }
  std::uint64_t others_bytes() const { return layout_->others_bytes; }
  std::uint64_t total_bytes() const { return layout_->total_bytes; }
  /// Fails with kIntegrity if grants, guarantees and reserves break a rule of device_account.h.
  /// Returns ok if members change during the check. After the capacity was lowered, grants may
  /// exceed it.
  Status check_integrity() const;
  /// Returns all members, alive or dead; queries the liveness of each.
  std::vector<LedgerEntry> members(const LivenessCheck& check) const;

 private:
  friend class LedgerMember;
  explicit LedgerView(const LedgerLayout* layout) : layout_(layout) {}
  const LedgerLayout* layout_;
};

// ------------------------------------------------------------------------------------- writers

struct LedgerOrigin {
  std::uint32_t owner_uid = 0;
  std::array<std::uint8_t, 16> boot_id{};
  std::uint64_t created_realtime_ns = 0;
  std::uint64_t capacity_bytes = 0;
  std::uint64_t total_bytes = 0;  ///< as DeviceMemorySize has it
  std::string device;
  std::string group;
};

/// Fills the bytes, which other processes must not see yet. Fails with kInvalidArgument for too few
/// bytes or a text that does not fit.
Status ledger_create(std::span<std::byte> bytes, const LedgerOrigin& origin);

/// Frees the slots of dead members and returns their number. Any process; about 1 us per member.
Result<std::uint64_t> ledger_reap(std::span<std::byte> bytes, const LivenessCheck& check);

/// Shuts the door if there is no member. Returns true if the door is shut. Dead members count until
/// they are reaped.
Result<bool> ledger_shut(std::span<std::byte> bytes);

/// Sets the device's default page size unless it is set, and returns it. It stays for the
/// incarnation of the ledger. Any process.
Result<std::uint64_t> ledger_decide_page_bytes(std::span<std::byte> bytes,
                                               std::uint64_t page_bytes);

/// What an observation of a device shows of other processes' memory, least certain first.
enum class Sight : std::uint8_t {
  kNone,     ///< nothing: no driver can report it
  kChanged,  ///< nothing: grants or reserves changed during the observation
  kBounded,  ///< a lower and an upper bound: memory was in transit
  kExact,
};

/// Parameters of LedgerMember::join.
struct LedgerJoin {
  LedgerIdentity identity;
  std::uint64_t min_bytes = 0;
  std::uint64_t reserve_bytes = 0;
  std::int64_t priority = 0;
  /// The ledger's file. If it is empty or its file system has no locks, the liveness of this member
  /// is unknown, and the caller must serialise joins.
  LivenessFile file{};
  LivenessLock::Children children = LivenessLock::Children::kDrop;
  ReclaimRules rules{};  ///< other than the defaults in tests only
};

/// Changes the limit for the members together and returns the old one. The caller holds the file's
/// lock. Grants use the new limit at once; memory beyond it is released over time
/// (LedgerMember::request_excess). Fails without a change: kGuarantee if the members' guarantees
/// and reserves exceed it, kInvalidArgument below kGrantUnitBytes, kSegmentFormat as
/// LedgerView::open.
Result<std::uint64_t> ledger_set_capacity(std::span<std::byte> bytes, std::uint64_t capacity_bytes,
                                          const LivenessCheck& check);

/// One instance's membership. Any thread of the process that joined. Only wait(), wait_for_claim()
/// and a join with a reserve block. In a forked child no call changes anything. The bytes must
/// outlive this object; `keep` is held as long.
class LedgerMember final : public PageGrant {
 public:
  /// Takes a slot. Returns null if the door is shut, that is, the file is or will be removed. Fails
  /// with kSegmentFormat as LedgerView::open, kPoolExhausted if all slots are taken, kGuarantee as
  /// set_min, kReserve as wait_for_claim, kInvalidArgument as set_priority, kSegment as
  /// LivenessLock::hold.
  static Result<std::unique_ptr<LedgerMember>> join(std::span<std::byte> bytes, LedgerJoin how,
                                                    std::shared_ptr<void> keep);
  ~LedgerMember() override {
    if (!lingers_) {
      leave();
    } else if (liveness_lock_) {
      liveness_lock_->keep();  // or others would take its grant for that of a dead process
    }
  }
  LedgerMember(const LedgerMember&) = delete;
  LedgerMember& operator=(const LedgerMember&) = delete;

  /// Memory could not be released: the destructor keeps the grant. A reaper returns it once this
  /// member's processes have ended.
  void linger() override { lingers_ = true; }

  /// Returns the whole grant to the device. Idempotent; later calls grant nothing.
  void leave() override;

  /// kDeviceUnavailable in a forked child: the slot and its grant are the parent's.
  Status refuse_in_a_child() const;

  // --- bytes ---------------------------------------------------------------------------------

  /// Takes up to `pages` pages of `page_bytes` and returns how many: as many as are free, except
  /// memory kept for requests that outrank this instance.
  std::uint64_t grant(std::uint64_t pages, std::uint64_t page_bytes);
  /// Reports that pages in transit are on the device now.
  void arrived(std::uint64_t pages, std::uint64_t page_bytes);
  /// Reports that pages are about to leave the device. Call it before the driver gets their memory.
  void leaving(std::uint64_t pages, std::uint64_t page_bytes) override;
  /// Returns granted pages that are not on the device, and wakes the members that wait for memory.
  void give_back(std::uint64_t pages, std::uint64_t page_bytes);
  /// Pages that could become available: room() plus what others would have to release on request.
  std::uint64_t reach(std::uint64_t page_bytes) const;
  /// Pages that grant() would return now.
  std::uint64_t room(std::uint64_t page_bytes) const;
  std::uint64_t granted_bytes() const;
  std::uint64_t capacity_bytes() const { return layout_->capacity_bytes; }
  /// The name of the ledger's device.
  std::string_view device() const;
  /// Sets the device's memory used by other processes, as a driver reported it.
  void set_others(std::uint64_t bytes);
  /// The memory account of every slot at one moment.
  using Moment = std::vector<std::array<std::uint64_t, 4>>;
  /// Takes a snapshot, after freeing the slots of dead members.
  Moment moment() const;
  /// Computes others' memory from a driver's report made since `before`: used, but neither granted
  /// nor reserved. Never returns kNone.
  Sight see_device(const Moment& before, std::uint64_t total_bytes, std::uint64_t free_bytes);

  // --- guarantee and priority ----------------------------------------------------------------

  /// Sets the guarantee. Fails with kGuarantee, naming the holders, if the awake members'
  /// guarantees exceed the capacity minus reserves. While asleep the value counts from the next
  /// wake. kDeviceUnavailable in a forked child.
  Status set_min(std::uint64_t min_bytes);
  /// Fails with kInvalidArgument outside the bounds, and with kDeviceUnavailable in a forked child.
  Status set_priority(std::int64_t priority);
  /// The guarantee while awake.
  std::uint64_t min_bytes() const { return slot().own_min_bytes; }
  std::int64_t priority() const { return slot().priority; }
  void set_limit(std::uint64_t bytes) {
    if (is_member()) slot().limit_bytes.store(bytes, std::memory_order_relaxed);
  }

  // --- reserve, sleep ------------------------------------------------------------------------

  /// Guarantee and reserve no longer count. Call it after the reserved memory has been released.
  void fall_asleep();
  /// Claims guarantee and reserve again. Fails with kGuarantee, naming the holders, if the sums do
  /// not allow it; the member then stays asleep. The memory is available once wait_for_claim() or
  /// claim_is_met() succeeds. No effect while awake.
  Status claim_wake();
  /// Claims a new reserve. A smaller one holds at once; a larger one works as claim_wake(). While
  /// asleep it counts from the next wake. Replaces an open claim.
  Status claim_reserve(std::uint64_t bytes);
  /// True if no claim is open. Requests missing memory from others; if false, call it again soon
  /// and when the bell rings.
  bool claim_is_met();
  /// True if a claim was still open at the last claim_is_met().
  bool is_claiming() const;
  /// Withdraws an open claim. No effect without one.
  void give_up_claim();
  /// Withdraws the claim and returns kReserve, naming the holders; ok if the claim is met.
  Status fail_claim();
  /// Blocks until the claim is met; fails as fail_claim() after the timeout.
  Status wait_for_claim(std::chrono::nanoseconds timeout);
  /// The reserve while awake.
  std::uint64_t reserve_bytes() const { return slot().own_reserve_bytes; }
  bool is_asleep() const { return is_member() && slot().asleep != 0; }

  /// Registers another process that maps this instance's pages, for diagnostics and for a check's
  /// second check. That process locks its byte itself (ledger_liveness_byte). Fails with
  /// kInvalidArgument for more than kLedgerWorkers, and with kDeviceUnavailable in a forked child.
  Status add_worker(std::uint32_t pid, std::uint64_t start_ticks);

  /// Publishes the facts that other members plan with. A few stores.
  void publish(std::uint64_t in_use_bytes, std::uint64_t evictable_bytes,
               std::uint64_t parked_bytes, std::uint64_t page_bytes, bool active);

  /// Reports whether the engine has unfinished requests. Without any the instance is idle at once,
  /// and waiting members are woken. Before the first report, idleness is derived from the time
  /// since `active`.
  void report_busy(bool busy);
  /// is_busy() of reclaim.h for this member; false if it is none.
  bool is_busy() const;

  // --- memory requests of this member --------------------------------------------------------

  /// Terms of a memory request that is made in several ledgers.
  struct RequestTerms {
    std::uint64_t since_ns = 0;  ///< when the first of them was made; 0: there is only this one
    bool keeps = true;           ///< as Contender::keeps
  };
  /// Publishes that `bytes` are missing and sends reclaim requests to members that must release
  /// memory (see reclaim.h). Renew it every rules().request_expiry_ns while memory is missing.
  /// Returns false if no member has to release any.
  bool request_memory(std::uint64_t bytes) { return request_memory_with(RequestTerms{}, bytes); }
  bool request_memory_with(RequestTerms terms, std::uint64_t bytes);
  /// is_memory_coming() of reclaim.h for this ledger.
  bool is_memory_coming(std::chrono::nanoseconds patience) const;
  /// True while this member has a memory request.
  bool has_memory_request() const { return is_member() && slot().request_bytes > 0; }
  void end_memory_request();
  /// After the capacity was lowered: requests the excess from the members that must release it,
  /// this one included, as a requester that outranks all. Returns false without excess; otherwise
  /// call it again soon. One member requests for all, once in rules().patience_ns.
  bool request_excess();
  /// The bell of reclaim requests and available memory: seen = bell(); check; wait(seen, timeout).
  std::uint32_t bell() const { return slot().bell.load(std::memory_order_acquire); }
  void wait(std::uint32_t seen, std::chrono::nanoseconds timeout) const;
  /// Wakes waiters in every process.
  void ring() { ring_bell(slot().bell); }
  const ReclaimRules& rules() const { return rules_; }

  // --- reclaim requests of other members -----------------------------------------------------

  struct OpenReclaim {
    std::uint64_t bytes = 0;  ///< 0: nothing
    Depth depth = Depth::kParked;
  };
  /// The open reclaim request of the shallowest depth.
  OpenReclaim open_reclaim() const;
  /// Reports `bytes` as handled, released or not available; the shallowest depth first.
  void handled(std::uint64_t bytes);

  /// Fails with kIntegrity if the granted bytes differ from the pages' (rounded to grant units),
  /// and as LedgerView::check_integrity.
  Status check_integrity(std::uint64_t pages, std::uint64_t page_bytes) const;

 private:
  LedgerMember(LedgerLayout* layout, std::size_t index, std::uint64_t incarnation,
               LivenessFile file, const ReclaimRules& rules,
               std::unique_ptr<LivenessLock> liveness_lock, std::shared_ptr<void> keep)
      : layout_(layout),
        index_(index),
        incarnation_(incarnation),
        file_(std::move(file)),
        keep_(std::move(keep)),
        rules_(rules),
        liveness_lock_(std::move(liveness_lock)) {}

  struct Sums;
  struct Pledges;
  struct Everybody;
  Everybody look_around(std::uint64_t now_ns) const;
  LedgerSlot& slot() const { return layout_->slots[index_]; }
  /// The part of the capacity available for grants: without others' memory and all pledges.
  std::uint64_t usable_bytes() const { return usable_bytes(pledged_bytes()); }
  std::uint64_t usable_bytes(std::uint64_t pledged_bytes) const;
  std::uint64_t pledged_bytes() const;
  Pledges add_up_pledges() const;
  Status pledge(std::uint64_t min_bytes, std::uint64_t reserve_bytes);
  Error pledge_refusal(std::uint64_t min_bytes, std::uint64_t reserve_bytes) const;
  std::string holders(bool of_grants) const;
  bool is_there() const;
  void settle_claim(bool met);
  bool is_member() const {
    return slot().incarnation.load() == incarnation_ && joined_by_.is_this();
  }
  Sums add_up(std::uint64_t claim_units) const;
  void wake_requesters() const;
  std::uint64_t take_grant(std::uint64_t pages, std::uint64_t page_bytes);
  bool keep_claim(std::uint64_t claim, std::uint64_t seen_capacity_bytes);
  void begin_move(std::uint64_t units);
  void end_move(std::uint64_t units);
  /// Writes reclaim requests into mailboxes and rings the bells. Returns whether there were any.
  bool send_requests(const std::vector<ReclaimRequest>& plan, const Everybody& everybody,
                     std::uint64_t now_ns);

  LedgerLayout* const layout_;
  const std::size_t index_;
  const std::uint64_t incarnation_;
  const LivenessFile file_;
  const OwnProcess joined_by_;
  const std::shared_ptr<void> keep_;
  std::atomic<bool> lingers_{false};
  const ReclaimRules rules_;
  mutable std::atomic<std::uint64_t> reaped_ns_{0};  // when reach() last reaped dead members
  std::uint64_t claim_ = 0, met_claim_ = 0;          // the newest claim, and the last met one
  bool is_claiming_ = false;  // `pledged` contains a claim that is not met yet
  mutable std::mutex mutex_;  // a leaf lock of this process's threads: grants, claims, incarnation
  std::unique_ptr<LivenessLock> liveness_lock_;  // null: left, or liveness is unknown here
};

}  // namespace kvelastic
