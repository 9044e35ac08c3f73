// The ledger: one record a device in shared memory, which says how many bytes of it each instance
// may hold. Nobody creates a page that it has not granted.
//
//   header     identity of the device, written once before the file is visible; under a CRC
//   capacity   what all members together may hold, and what strangers hold of it
//   slots      one a member: granted and claimed bytes, guarantee, reserve, priority, ask, facts, a
//              mailbox
//
// There is no sum that could be wrong. What is granted to a member stands in its own slot, and a
// grant is: claim it there, add up all slots, and keep the claim or take it back. Of two that claim
// the last page at once the later one sees the claim of the earlier (all of it is sequentially
// consistent), so both cannot have it; the lower slot stays, the other one stands back and looks
// again. A member that dies has its bytes in its slot and nowhere else: freeing the slot, one
// compare-and-swap by whoever looks, gives all of them back. Nobody waits for anybody: a member
// that is stopped between two steps keeps what it has claimed, and no more.
//
// A member also says what it has on the device beside its grants: its *reserve* (device_account.h
// has the rules of the sums). It counts as long as the member is awake, and so does the guarantee:
//
//            fall_asleep                    ask_to_wake: refused, if the sums do not allow it
//   awake  ------------->  asleep  <------------------------------------------+
//     ^                      |  min, pledged: 0                                |
//     |                      v  ask_to_wake                                    | give_up_claim
//     +--------------------  waiting: min and pledged count, so nobody is granted what is to be
//       what is pledged is      reserved; the others are asked for what they have of it
//       there: reserved
//
// A larger reserve of a member that is awake goes the same way, from `reserved` to `pledged`. A
// guarantee or reserve is claimed like a grant: it is written, then all are added up, and it is
// taken back where they are too many; of two who claim at once the lower slot stays.
//
// What strangers hold of a GPU is what is used and neither granted nor reserved. The use and the
// sums must be of one moment, and a driver is asked by processes that take no lock here. So a slot
// also says what of its grant is *on its way*, and counts the changes: who looks reads all slots,
// asks the driver, and reads them again.
//
//   grant              arrived              leaving             give_back
//   -----> granted, on its way -----> granted ------> granted, on its way ------> neither
//          may be mapped by now      is mapped        may be unmapped by now
//
// Slots that differ: something changed meanwhile, and the look counts for nothing. Equal ones: the
// members hold what is granted, or less by what is on its way at most.
//
// Nobody waits for a lock either. A joiner claims a slot by taking the lock on its byte of the file
// (life_lock.h), which a joiner that dies loses. Each membership has bytes of its own, so a slot
// that is given anew is not taken for its former member's:
//
//   byte = generation of the slot | slot (7 bits) | process (7 bits)
//                                            process: 0 the scheduler, 1 + r the worker of rank r
//
// The file is removed by whoever finds it empty and shuts its door; who joins meanwhile sees either
// an open door, which the other one then cannot shut, or a shut one, and makes a new file.
//
// The file may be shortened by any process of its user. The members' next look at it is then a
// SIGBUS, and the engines end: tmpfs has nothing that forbids it, and shared memory of one user is
// only as safe as that user's processes.
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
#include "base/life_lock.h"
#include "base/own_process.h"
#include "base/status.h"
#include "ledger/device_account.h"
#include "ledger/reclaim.h"
#include "pages/page_grant.h"

namespace kvelastic {

inline constexpr std::uint64_t kLedgerMagic = 0x5245'4744'454c'564bULL;  ///< "KVLEDGER" in memory
inline constexpr std::uint32_t kLedgerAbiVersion = 6;
inline constexpr std::size_t kLedgerSlots = 128;
inline constexpr std::size_t kLedgerWorkers = 64;  ///< of one member
static_assert(kLedgerSlots <= 128 && kLedgerWorkers < 128, "a life byte has 7 bits for each");
/// Grants are counted in these: a page takes as many as it needs, rounded up.
inline constexpr std::uint64_t kGrantUnitBytes = std::uint64_t{64} << 10;

// ---------------------------------------------------------------------------- the shared layout

using SharedWord = std::atomic<std::uint64_t>;
static_assert(sizeof(SharedWord) == 8 && SharedWord::is_always_lock_free);

struct LedgerHeader {
  std::uint64_t magic;
  std::uint32_t abi_version;
  std::uint32_t header_bytes;  ///< what the CRC covers
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

/// Who has a slot; written before the slot is alive.
struct LedgerIdentity {
  std::uint32_t pid = 0;
  std::uint32_t uid = 0;
  std::uint64_t start_ticks = 0;
  std::uint64_t pid_namespace = 0;
  std::array<std::uint8_t, 16> uuid{};  ///< of the instance's segment
  std::array<char, 64> name{};          ///< of the instance's segment
};

/// A process that maps pages of an instance; pid 0: none.
struct LedgerWorker {
  std::atomic<std::uint32_t> pid;
  SharedWord start_ticks;
};

struct LedgerSlot {
  // What a grant looks at, in one cache line.
  alignas(64) SharedWord life;  ///< generation * 2, + 1 while alive
  SharedWord units;             ///< granted * 2^32 + claimed, in units of kGrantUnitBytes
  SharedWord min_bytes;         ///< the guarantee, as it counts now: 0 asleep
  SharedWord pledged_bytes;     ///< at least `reserved_bytes`: what nobody else is granted any more
  SharedWord reserved_bytes;    ///< what it has beside its grants; 0 asleep
  std::atomic<std::int64_t> priority;
  SharedWord ask_bytes;    ///< 0: nothing
  SharedWord ask_seen_ns;  ///< when it was last repeated; CLOCK_MONOTONIC, as all times here

  alignas(64) SharedWord ask_since_ns;
  SharedWord active_ns;  ///< last alloc or free
  SharedWord limit_bytes;
  SharedWord in_use_bytes;
  SharedWord evictable_bytes;  ///< whole pages of cached blocks: what others can have
  SharedWord parked_bytes;
  SharedWord page_bytes;

  SharedWord ask_keeps;          ///< 1: what comes free is kept for the ask, see Contender::keeps
  SharedWord own_min_bytes;      ///< the guarantee and
  SharedWord own_reserve_bytes;  ///< the reserve, as they count when it is awake
  SharedWord asleep;             ///< 1: or waking
  SharedWord checking;           ///< 1: min and pledged may be too much, and are taken back then
  SharedWord moves;     ///< changes of the grant * 2^32 + units of it that are on their way
  SharedWord reported;  ///< a `Reported`

  // The mailbox, a pair of words a depth: askers add to `wanted`, the member to `handled`; both
  // only go up.
  alignas(64) std::array<SharedWord, kDepths> wanted_bytes;
  SharedWord wanted_at_ns;  ///< since when something has been asked for and not been dealt with
  FutexWord bell;           ///< rung for a request, and for memory that an ask may take
  alignas(64) std::array<SharedWord, kDepths> handled_bytes;

  alignas(64) LedgerIdentity identity;
  // The processes that map the pages, where those are others. Their memory is the instance's as
  // long as one of them lives, also when the scheduler is dead.
  std::array<LedgerWorker, kLedgerWorkers> workers;
};

struct LedgerLayout {
  LedgerHeader header;
  alignas(64) SharedWord capacity_bytes;
  SharedWord most_bytes;                  ///< the largest capacity so far: what was granted by it
  SharedWord total_bytes;                 ///< as DeviceMemorySize has it
  SharedWord others_bytes;                ///< of the device, used by processes that are not members
  SharedWord others_at_ns;                ///< when that was last looked at; 0: never
  std::atomic<std::uint32_t> slots_used;  ///< no slot from here on was ever taken
  SharedWord door;                        ///< joins * 2, + 1 when nobody joins any more
  SharedWord excess_asked_ns;  ///< when somebody last asked for what is over the capacity
  SharedWord page_bytes;       ///< default page size of the device, decided once; 0: not yet
  std::array<LedgerSlot, kLedgerSlots> slots;
};
static_assert(std::is_standard_layout_v<LedgerLayout>);
inline constexpr std::size_t kLedgerBytes = sizeof(LedgerLayout);

// ------------------------------------------------------------------------------------- readers

/// The byte of process `process` of the member that has `life` in `slot`: 0 its scheduler, 1 + rank
/// a worker.
constexpr std::uint64_t ledger_life_byte(std::size_t slot, std::uint64_t life,
                                         std::size_t process) {
  return (life >> 1) << 14 | std::uint64_t{slot} << 7 | process;
}

/// One member as it was found.
struct LedgerEntry {
  std::size_t slot;
  std::uint64_t life;
  LedgerIdentity identity;
  std::vector<ProcessStart> workers;
  Life alive;       ///< dead: neither its scheduler nor any of its workers lives
  Contender facts;  ///< its min_bytes is what counts now
  std::uint64_t limit_bytes, in_use_bytes, page_bytes;
  std::uint64_t own_min_bytes, own_reserve_bytes;  ///< as they count when it is awake
  std::uint64_t pledged_bytes, reserved_bytes;     ///< what counts now (see LedgerSlot)
  bool asleep;                                     ///< or waking
};

/// The ABI version of bytes that start like a ledger, of whatever version; nothing otherwise.
std::optional<std::uint32_t> ledger_version(std::span<const std::byte> bytes);

/// Reads a ledger; never writes, so the bytes may be mapped PROT_READ. Any thread, any process. The
/// bytes must outlive the view.
class LedgerView {
 public:
  /// kSegmentFormat: bytes too few, magic, version or CRC wrong.
  static Result<LedgerView> open(std::span<const std::byte> bytes);

  const LedgerHeader& header() const { return layout_->header; }
  std::uint64_t capacity_bytes() const { return layout_->capacity_bytes; }
  std::uint64_t others_bytes() const { return layout_->others_bytes; }
  std::uint64_t total_bytes() const { return layout_->total_bytes; }
  /// Fails with kIntegrity where grants, guarantees and reserves break a rule of device_account.h.
  /// Of members that change meanwhile it says nothing; after the capacity was lowered grants may be
  /// what they were before.
  Status check_integrity() const;
  /// Members now, alive or dead; the judge is asked about each.
  std::vector<LedgerEntry> members(const LifeJudge& judge) const;

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

/// Fills the bytes, which must not be visible to others yet. kInvalidArgument: too few bytes, or a
/// text that does not fit.
Status ledger_create(std::span<std::byte> bytes, const LedgerOrigin& origin);

/// Frees the slots of the dead; answers how many. Any process at any time; a microsecond a member.
Result<std::uint64_t> ledger_reap(std::span<std::byte> bytes, const LifeJudge& judge);

/// Lets nobody join any more if there is no member: true, also when that was so before. The dead
/// are members until they are reaped.
Result<bool> ledger_shut(std::span<std::byte> bytes);

/// Decides the device's default page size, unless it is decided; returns what is decided. The first
/// caller decides for as long as the ledger exists. Any process at any time.
Result<std::uint64_t> ledger_decide_page_bytes(std::span<std::byte> bytes,
                                               std::uint64_t page_bytes);

/// What a look at a device has shown of strangers, the least certain first.
enum class Sight : std::uint8_t {
  kNone,     ///< nothing: there is no driver that can say
  kChanged,  ///< nothing: grants or reserves have changed meanwhile
  kBounded,  ///< memory was on its way: at least so much, and at most
  kExact,
};

/// What joining takes.
struct LedgerJoin {
  LedgerIdentity identity;
  std::uint64_t min_bytes = 0;
  std::uint64_t reserve_bytes = 0;
  std::int64_t priority = 0;
  /// The ledger's. Without one, or where its file system has no locks, nobody can tell whether this
  /// member lives, and joiners must keep each other out by other means.
  LifeFile file{};
  LifeLock::Children children = LifeLock::Children::kDrop;
};

/// Changes what all members together may hold; the caller holds the file's lock. Answers what it
/// was. Grants go by it at once, and what is held beyond it is given back by and by
/// (LedgerMember::ask_for_excess). Nothing has changed where it fails: kGuarantee for less than
/// the guarantees and reserves of the members, kInvalidArgument for less than kGrantUnitBytes,
/// kSegmentFormat as LedgerView::open.
Result<std::uint64_t> ledger_set_capacity(std::span<std::byte> bytes, std::uint64_t capacity_bytes,
                                          const LifeJudge& judge);

/// One instance's end of a ledger. All calls from any thread of the process that joined, none
/// blocks but wait(), wait_for_claim() and a join with a reserve; in a forked child none changes
/// anything. The bytes must outlive it; `keep` is held as long.
class LedgerMember final : public PageGrant {
 public:
  /// Takes a slot; null: the door is shut, the file is removed or about to be. kSegmentFormat as
  /// LedgerView::open, kPoolExhausted when all slots are taken, kGuarantee as set_min, kReserve as
  /// wait_for_claim, kInvalidArgument as set_priority, kSegment as LifeLock::hold.
  static Result<std::unique_ptr<LedgerMember>> join(std::span<std::byte> bytes, LedgerJoin how,
                                                    std::shared_ptr<void> keep);
  ~LedgerMember() override {
    if (!lingers_) leave();
  }
  LedgerMember(const LedgerMember&) = delete;
  LedgerMember& operator=(const LedgerMember&) = delete;

  /// Memory that nobody can give back is left behind: this object's end gives its grant back no
  /// more; whoever looks does, once the processes of this member are gone.
  void linger() override { lingers_ = true; }

  /// Everything that was granted is the device's again. Repeatable; later calls grant nothing.
  void leave() override;

  /// kDeviceUnavailable in a forked child: the place, and what was granted to it, is its parent's.
  Status refuse_in_a_child() const;

  // --- bytes ---------------------------------------------------------------------------------

  /// Takes at most `pages` pages of `page_bytes` and answers how many: as many as there is room
  /// for, after what is kept for asks that outrank this instance.
  std::uint64_t grant(std::uint64_t pages, std::uint64_t page_bytes);
  /// Pages that were granted, or leaving, are on the device now.
  void arrived(std::uint64_t pages, std::uint64_t page_bytes);
  /// Pages that are on the device will not be there any more. To be called before their memory is
  /// given to the driver.
  void leaving(std::uint64_t pages, std::uint64_t page_bytes) override;
  /// Gives pages back that grant() gave, and that are not on the device; wakes those who ask for
  /// memory.
  void give_back(std::uint64_t pages, std::uint64_t page_bytes);
  /// Pages that could be had: room(), and what others would have to give up if this one asked.
  std::uint64_t reach(std::uint64_t page_bytes) const;
  /// Pages that grant() would give now.
  std::uint64_t room(std::uint64_t page_bytes) const;
  std::uint64_t granted_bytes() const;
  std::uint64_t capacity_bytes() const { return layout_->capacity_bytes; }
  /// The name of the ledger's device.
  std::string_view device() const;
  /// Sets what strangers hold of the device, as somebody with a driver has seen it.
  void set_others(std::uint64_t bytes);
  /// What all slots say of the device's memory.
  using Moment = std::vector<std::array<std::uint64_t, 4>>;
  /// As it is now; the dead are freed first.
  Moment moment() const;
  /// The same from what a driver has said of the whole device since `before`: what is taken, and
  /// neither granted nor reserved. Never kNone.
  Sight see_device(const Moment& before, std::uint64_t total_bytes, std::uint64_t free_bytes);

  // --- guarantee and priority ----------------------------------------------------------------

  /// kGuarantee: the guarantees of those who are awake would be more than the device has beside
  /// their reserves; with who has what. Asleep it counts from the next wake. kDeviceUnavailable in
  /// a forked child.
  Status set_min(std::uint64_t min_bytes);
  /// kInvalidArgument: beyond the bounds of a priority; kDeviceUnavailable in a forked child.
  Status set_priority(std::int64_t priority);
  /// The guarantee when it is awake.
  std::uint64_t min_bytes() const { return slot().own_min_bytes; }
  std::int64_t priority() const { return slot().priority; }
  void set_limit(std::uint64_t bytes) {
    if (is_member()) slot().limit_bytes.store(bytes, std::memory_order_relaxed);
  }

  // --- reserve, sleep ------------------------------------------------------------------------

  /// Guarantee and reserve count for nothing from now on. To be called after the memory is given
  /// back that was reserved.
  void fall_asleep();
  /// Claims both again. Fails with kGuarantee, with who has what, where the sums do not allow it:
  /// it is asleep as before then. What is claimed is there when wait_for_claim() or claim_is_met()
  /// say so. Does nothing where it is awake.
  Status ask_to_wake();
  /// Claims what this instance has on the device beside its grants. Less holds at once; for more
  /// as ask_to_wake. Asleep it counts from the next wake. Any claim before it is given up.
  Status ask_to_reserve(std::uint64_t bytes);
  /// Whether nothing is claimed that is not there. Asks others for what is missing; where it is
  /// false, call it again soon, and when the bell rings.
  bool claim_is_met();
  /// Whether something is claimed that was not there when claim_is_met() last looked.
  bool is_claiming() const;
  /// Back to what was before the claim. Does nothing where there is none.
  void give_up_claim();
  /// Gives it up, and answers kReserve with who holds what; nothing where it is met.
  Status fail_claim();
  /// Waits until it is met; fails as fail_claim after the timeout. Blocks.
  Status wait_for_claim(std::chrono::nanoseconds timeout);
  /// The reserve when it is awake.
  std::uint64_t reserve_bytes() const { return slot().own_reserve_bytes; }
  bool is_asleep() const { return is_member() && slot().asleep != 0; }

  /// Names one more process that maps this instance's pages, for people and for a judge's second
  /// look; that process holds its byte itself (ledger_life_byte). Fails with kInvalidArgument for
  /// more than kLedgerWorkers, kDeviceUnavailable in a forked child.
  Status add_worker(std::uint32_t pid, std::uint64_t start_ticks);

  /// The facts that others plan by; a few stores.
  void publish(std::uint64_t in_use_bytes, std::uint64_t evictable_bytes,
               std::uint64_t parked_bytes, std::uint64_t page_bytes, bool active);

  /// Whether the engine has unfinished requests. Without any it is idle at once, and those who ask
  /// for memory are woken. Until the first call it is judged by the time since it was `active`.
  void report_busy(bool busy);

  // --- asking --------------------------------------------------------------------------------

  /// What is said of an ask that is one of several, in ledgers of other devices.
  struct AskTerms {
    std::uint64_t since_ns = 0;  ///< when the first of them was made; 0: this is the only one
    bool keeps = true;           ///< as Contender::keeps
  };
  /// Says that `bytes` are missing, and asks those for them who have to give (see reclaim.h). Call
  /// it again every now and then (rules().ask_lease_ns) while it is so. False: nobody has to give.
  bool ask(std::uint64_t bytes) { return ask_with(AskTerms{}, bytes); }
  bool ask_with(AskTerms terms, std::uint64_t bytes);
  /// As is_memory_coming, of this ledger.
  bool is_memory_coming(std::chrono::nanoseconds patience) const;
  /// Whether an ask of this member stands.
  bool is_asking() const { return is_member() && slot().ask_bytes > 0; }
  void stop_asking();
  /// Where more is granted than the capacity, since that was lowered: asks those for the rest who
  /// have to give it, this member among them, as one who outranks all. False: nothing is over it;
  /// true: call again soon. Whichever member calls first asks for all, once in rules().patience_ns.
  bool ask_for_excess();
  /// The bell of requests and of memory come free: seen = bell(); <look>; wait(seen, timeout).
  std::uint32_t bell() const { return slot().bell.load(std::memory_order_acquire); }
  void wait(std::uint32_t seen, std::chrono::nanoseconds timeout) const;
  /// Wakes who waits, in this process too.
  void ring() { ring_bell(slot().bell); }
  const ReclaimRules& rules() const { return rules_; }

  // --- being asked ---------------------------------------------------------------------------

  struct Wanted {
    std::uint64_t bytes = 0;  ///< 0: nothing
    Depth depth = Depth::kParked;
  };
  /// The shallowest request that is open.
  Wanted wanted() const;
  /// `bytes` of what was asked were dealt with, given or not to be had; the shallowest first.
  void handled(std::uint64_t bytes);

  /// Fails with kIntegrity when the bytes granted are not those of the pages (rounded to grant
  /// units), or as LedgerView::check_integrity.
  Status check_integrity(std::uint64_t pages, std::uint64_t page_bytes) const;

 private:
  LedgerMember(LedgerLayout* layout, std::size_t index, std::uint64_t life, LifeFile file,
               std::unique_ptr<LifeLock> life_lock, std::shared_ptr<void> keep)
      : layout_(layout),
        index_(index),
        life_(life),
        file_(std::move(file)),
        keep_(std::move(keep)),
        life_lock_(std::move(life_lock)) {}

  struct Sums;
  struct Pledges;
  struct Everybody;
  Everybody look_around(std::uint64_t now_ns) const;
  LedgerSlot& slot() const { return layout_->slots[index_]; }
  /// What of the capacity is for grants: without what strangers hold and all have pledged.
  std::uint64_t usable_bytes() const { return usable_bytes(pledged_bytes()); }
  std::uint64_t usable_bytes(std::uint64_t pledged_bytes) const;
  std::uint64_t pledged_bytes() const;
  Pledges add_up_pledges() const;
  Status pledge(std::uint64_t min_bytes, std::uint64_t reserve_bytes);
  Error pledge_refusal(std::uint64_t min_bytes, std::uint64_t reserve_bytes) const;
  std::string holders(bool of_grants) const;
  bool is_there() const;
  void settle_claim(bool met);
  bool is_member() const { return slot().life.load() == life_ && joined_by_.is_this(); }
  Sums add_up(std::uint64_t wanted_units) const;
  void wake_askers() const;
  std::uint64_t take_grant(std::uint64_t pages, std::uint64_t page_bytes);
  bool keep_claim(std::uint64_t claim, std::uint64_t seen_capacity_bytes);
  void begin_move(std::uint64_t units);
  void end_move(std::uint64_t units);
  /// Writes demands into the mailboxes, and rings. Answers whether there was one to write.
  bool demand(const std::vector<Demand>& plan, const Everybody& everybody, std::uint64_t now_ns);

  LedgerLayout* const layout_;
  const std::size_t index_;
  const std::uint64_t life_;
  const LifeFile file_;
  const OwnProcess joined_by_;
  const std::shared_ptr<void> keep_;
  std::atomic<bool> lingers_{false};
  const ReclaimRules rules_;
  mutable std::atomic<std::uint64_t> reaped_ns_{0};  // when reach() last looked for the dead
  std::uint64_t claim_ = 0, met_claim_ = 0;          // the newest one, and the last that was met
  bool is_claiming_ = false;  // `pledged` is what is claimed, and not there yet
  mutable std::mutex mutex_;  // between threads of this process only: grants, claims, life; a leaf
  std::unique_ptr<LifeLock> life_lock_;  // null: left, or nobody can be asked here
};

}  // namespace kvelastic
