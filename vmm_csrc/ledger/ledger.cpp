#include "ledger/ledger.h"

#include <algorithm>
#include <cstring>

#include "base/checksum.h"
#include "ledger/ledger_slots.h"
#include "segment/control_block.h"

namespace kvelastic {
namespace {

std::uint32_t header_crc(LedgerHeader header) {
  header.crc32 = 0;
  return crc32_of(std::as_bytes(std::span(&header, 1)));
}

template <std::size_t N>
bool copy_text(std::array<char, N>& field, const std::string& text) {
  if (text.size() > N || text.find('\0') != std::string::npos) return false;
  std::memcpy(field.data(), text.data(), text.size());
  return true;
}

std::vector<ProcessStart> workers_of(const LedgerSlot& slot) {
  std::vector<ProcessStart> found;
  for (const LedgerWorker& worker : slot.workers) {
    const std::uint32_t pid = worker.pid.load();
    if (pid == 0) break;
    found.push_back({pid, worker.start_ticks.load()});
  }
  return found;
}

/// Whether a process of that membership is alive: its scheduler or a worker.
Liveness liveness_of(const LivenessCheck& check, std::size_t index, std::uint64_t incarnation,
                     const LedgerIdentity& who, std::vector<ProcessStart> processes) {
  processes.push_back({who.pid, who.start_ticks});
  return check.query(ledger_liveness_byte(index, incarnation, 0), 1 + kLedgerWorkers,
                     who.pid_namespace, processes);
}

}  // namespace

Status validate_ledger(std::span<const std::byte> bytes) {
  const auto malformed = [](const std::string& why) {
    return Error{Errc::kSegmentFormat, "not a ledger that this kvelastic can read: " + why};
  };
  const auto version = ledger_version(bytes);
  if (!version) return malformed("it does not start with the mark of a ledger");
  if (*version != kLedgerAbiVersion) {
    return malformed("it has version " + std::to_string(*version) + ", this build reads version " +
                     std::to_string(kLedgerAbiVersion));
  }
  LedgerHeader header{};
  if (bytes.size() < kLedgerBytes) {
    return malformed("it has " + std::to_string(bytes.size()) + " bytes, a ledger has " +
                     std::to_string(kLedgerBytes));
  }
  std::memcpy(&header, bytes.data(), sizeof(header));
  if (header.header_bytes != sizeof(LedgerHeader) || header.total_bytes != kLedgerBytes ||
      header_crc(header) != header.crc32) {
    return malformed("its header does not match its checksum");
  }
  if (reinterpret_cast<std::uintptr_t>(bytes.data()) % alignof(LedgerLayout) != 0) {
    return Error{Errc::kInvalidArgument, "a ledger's bytes must be mapped from its file"};
  }
  return ok();
}

std::uint64_t open_requests(const LedgerSlot& slot) {
  std::uint64_t bytes = 0;
  for (std::size_t depth = 0; depth < kDepths; ++depth) bytes += open_at(slot, depth);
  return bytes;
}

/// An unknown value counts as kNothing.
Reported reported_of(const LedgerSlot& slot) {
  const auto reported = static_cast<Reported>(slot.reported.load());
  const bool is_known = reported == Reported::kBusy || reported == Reported::kIdle;
  return is_known ? reported : Reported::kNothing;
}

Contender contender_of(const LedgerSlot& slot, std::uint64_t now_ns, const ReclaimRules& rules) {
  Contender c;
  c.granted_bytes = granted_of(slot.units.load()) * kGrantUnitBytes;
  c.min_bytes = slot.min_bytes.load();
  c.priority = slot.priority.load();
  c.parked_bytes = slot.parked_bytes.load(std::memory_order_relaxed);
  c.cached_bytes = slot.evictable_bytes.load(std::memory_order_relaxed);
  c.page_bytes = slot.page_bytes.load(std::memory_order_relaxed);
  c.idle_ns = saturating_sub(now_ns, slot.active_ns.load(std::memory_order_relaxed));
  c.reported = reported_of(slot);
  if (saturating_sub(now_ns, slot.request_seen_ns.load()) < rules.request_expiry_ns) {
    c.request_bytes = slot.request_bytes.load();
    c.keeps = slot.request_keeps.load() != 0;
    c.request_ns = saturating_sub(now_ns, slot.request_since_ns.load());
  }
  c.reclaim_bytes = open_requests(slot);
  c.reclaim_ns = saturating_sub(now_ns, slot.reclaim_since_ns.load());
  return c;
}

std::optional<std::uint32_t> ledger_version(std::span<const std::byte> bytes) {
  std::uint64_t magic = 0;
  std::uint32_t version = 0;
  if (bytes.size() < sizeof(magic) + sizeof(version)) return std::nullopt;
  std::memcpy(&magic, bytes.data(), sizeof(magic));
  std::memcpy(&version, bytes.data() + offsetof(LedgerHeader, abi_version), sizeof(version));
  if (magic != kLedgerMagic) return std::nullopt;
  return version;
}

Result<LedgerView> LedgerView::open(std::span<const std::byte> bytes) {
  if (Status valid = validate_ledger(bytes); !valid) return valid.error();
  return LedgerView(reinterpret_cast<const LedgerLayout*>(bytes.data()));
}

std::vector<LedgerEntry> LedgerView::members(const LivenessCheck& check) const {
  std::vector<LedgerEntry> found;
  const std::uint64_t now_ns = monotonic_ns();
  for (std::size_t i = 0; i < slots_used(*layout_); ++i) {
    const LedgerSlot& slot = layout_->slots[i];
    const std::uint64_t incarnation = slot.incarnation.load();
    if (!is_alive(incarnation)) continue;
    LedgerEntry entry{i,
                      incarnation,
                      slot.identity,
                      workers_of(slot),
                      Liveness::kUnknown,
                      contender_of(slot, now_ns, ReclaimRules{}),
                      slot.limit_bytes.load(std::memory_order_relaxed),
                      slot.in_use_bytes.load(std::memory_order_relaxed),
                      slot.page_bytes.load(std::memory_order_relaxed),
                      slot.own_min_bytes.load(),
                      slot.own_reserve_bytes.load(),
                      slot.pledged_bytes.load(),
                      slot.reserved_bytes.load(),
                      slot.asleep.load() != 0};
    // The slot was released, and perhaps taken again, while it was copied.
    if (slot.incarnation.load() != incarnation) continue;
    entry.alive = liveness_of(check, i, incarnation, entry.identity, entry.workers);
    found.push_back(std::move(entry));
  }
  return found;
}

Status ledger_create(std::span<std::byte> bytes, const LedgerOrigin& origin) {
  if (bytes.size() < kLedgerBytes) {
    return Error{Errc::kInvalidArgument, "a ledger needs " + std::to_string(kLedgerBytes) +
                                             " bytes, not " + std::to_string(bytes.size())};
  }
  std::memset(bytes.data(), 0, kLedgerBytes);
  LedgerHeader header{};
  header.magic = kLedgerMagic;
  header.abi_version = kLedgerAbiVersion;
  header.header_bytes = sizeof(LedgerHeader);
  header.total_bytes = kLedgerBytes;
  header.owner_uid = origin.owner_uid;
  header.boot_id = origin.boot_id;
  header.created_realtime_ns = origin.created_realtime_ns;
  if (!copy_text(header.device, origin.device) || !copy_text(header.group, origin.group)) {
    return Error{Errc::kInvalidArgument,
                 "the names of device and group have 64 bytes at most and no zero byte"};
  }
  header.crc32 = header_crc(header);
  auto* layout = reinterpret_cast<LedgerLayout*>(bytes.data());
  layout->header = header;
  layout->capacity_bytes = origin.capacity_bytes;
  layout->most_bytes = origin.capacity_bytes;
  layout->total_bytes = origin.total_bytes;
  return ok();
}

std::uint64_t reap_dead(LedgerLayout& layout, const LivenessCheck& check) {
  std::uint64_t freed = 0;
  for (std::size_t i = 0; i < slots_used(layout); ++i) {
    LedgerSlot& slot = layout.slots[i];
    std::uint64_t incarnation = slot.incarnation.load();
    const LedgerIdentity who = slot.identity;
    auto workers = workers_of(slot);
    if (!is_alive(incarnation) || slot.incarnation.load() != incarnation) continue;
    if (liveness_of(check, i, incarnation, who, std::move(workers)) != Liveness::kDead) continue;
    if (slot.incarnation.compare_exchange_strong(incarnation, incarnation + 1)) ++freed;
  }
  if (freed > 0) wake_who_waits(layout, kLedgerSlots);
  return freed;
}

void wake_who_waits(LedgerLayout& layout, std::size_t except) {
  for (std::size_t i = 0; i < slots_used(layout); ++i) {
    LedgerSlot& slot = layout.slots[i];
    const bool waits =
        slot.request_bytes.load() > 0 || slot.pledged_bytes.load() != slot.reserved_bytes.load();
    if (i != except && waits && is_alive(slot.incarnation.load())) ring_bell(slot.bell);
  }
}

Result<std::uint64_t> ledger_reap(std::span<std::byte> bytes, const LivenessCheck& check) {
  if (Status valid = validate_ledger(bytes); !valid) return valid.error();
  return reap_dead(*reinterpret_cast<LedgerLayout*>(bytes.data()), check);
}

namespace {

constexpr std::uint64_t kShut = 1;
constexpr std::uint64_t kOneJoin = 2;

}  // namespace

Result<bool> ledger_shut(std::span<std::byte> bytes) {
  if (Status valid = validate_ledger(bytes); !valid) return valid.error();
  auto& layout = *reinterpret_cast<LedgerLayout*>(bytes.data());
  std::uint64_t door = layout.door.load();
  if ((door & kShut) != 0) return true;
  for (std::size_t i = 0; i < slots_used(layout); ++i) {
    if (is_alive(layout.slots[i].incarnation.load())) return false;
  }
  return layout.door.compare_exchange_strong(door, door | kShut);
}

Result<std::uint64_t> ledger_decide_page_bytes(std::span<std::byte> bytes,
                                               std::uint64_t page_bytes) {
  if (Status valid = validate_ledger(bytes); !valid) return valid.error();
  auto& layout = *reinterpret_cast<LedgerLayout*>(bytes.data());
  std::uint64_t decided_bytes = 0;
  return layout.page_bytes.compare_exchange_strong(decided_bytes, page_bytes) ? page_bytes
                                                                              : decided_bytes;
}

// --------------------------------------------------------------------------------------- member

Result<std::unique_ptr<LedgerMember>> LedgerMember::join(std::span<std::byte> bytes, LedgerJoin how,
                                                         std::shared_ptr<void> keep) {
  if (Status valid = validate_ledger(bytes); !valid) return valid.error();
  if (Status bounded = check_priority(how.priority); !bounded) return bounded.error();
  auto* layout = reinterpret_cast<LedgerLayout*>(bytes.data());
  for (std::size_t i = 0; i < kLedgerSlots; ++i) {
    LedgerSlot& slot = layout->slots[i];
    const std::uint64_t incarnation = slot.incarnation.load();
    if (is_alive(incarnation)) continue;
    // Lock first, so that no check sees a member without its lock; the lock also keeps other
    // joiners out of the slot.
    LivenessLock::Attempt claim{LivenessLock::Outcome::kNoLocks, nullptr};
    if (!how.file.path.empty()) {
      auto tried =
          LivenessLock::hold(how.file, ledger_liveness_byte(i, incarnation + 1, 0), how.children);
      if (!tried) return tried.error();
      claim = *std::move(tried);
    }
    if (claim.outcome == LivenessLock::Outcome::kTaken || slot.incarnation.load() != incarnation)
      continue;
    for (SharedWord* word :
         {&slot.units,           &slot.min_bytes,      &slot.request_bytes, &slot.request_since_ns,
          &slot.request_seen_ns, &slot.request_keeps,  &slot.limit_bytes,   &slot.in_use_bytes,
          &slot.evictable_bytes, &slot.parked_bytes,   &slot.page_bytes,    &slot.reclaim_since_ns,
          &slot.pledged_bytes,   &slot.reserved_bytes, &slot.own_min_bytes, &slot.own_reserve_bytes,
          &slot.asleep,          &slot.checking,       &slot.moves,         &slot.reported}) {
      *word = 0;
    }
    for (std::size_t depth = 0; depth < kDepths; ++depth) {
      slot.reclaim_bytes[depth] = 0;
      slot.handled_bytes[depth] = 0;
    }
    for (LedgerWorker& worker : slot.workers) worker.pid = 0;
    slot.priority = how.priority;
    slot.active_ns = monotonic_coarse_ns();
    slot.identity = how.identity;
    slot.incarnation = incarnation + 1;
    std::uint32_t used = layout->slots_used.load();
    while (used <= i &&
           !layout->slots_used.compare_exchange_weak(used, static_cast<std::uint32_t>(i + 1))) {
    }
    std::unique_ptr<LedgerMember> member(new LedgerMember(layout, i, incarnation + 1,
                                                          std::move(how.file), how.rules,
                                                          std::move(claim.lock), std::move(keep)));
    if ((layout->door.fetch_add(kOneJoin) & kShut) != 0) return std::unique_ptr<LedgerMember>();
    // No other member has seen it awake yet, so joining ends with a first wake.
    LedgerSlot& mine = slot;
    mine.asleep = 1;
    mine.own_min_bytes = how.min_bytes;
    mine.own_reserve_bytes = how.reserve_bytes;
    if (Status fits = member->claim_wake(); !fits) return fits.error();
    const std::chrono::nanoseconds timeout(member->rules().reserve_wait_ns);
    if (Status there = member->wait_for_claim(timeout); !there) return there.error();
    return member;
  }
  return Error{Errc::kPoolExhausted,
               "all " + std::to_string(kLedgerSlots) + " slots of the device's ledger are taken"};
}

std::string_view LedgerMember::device() const {
  return text_of(layout_->header.device);
}

void LedgerMember::leave() {
  if (!joined_by_.is_this()) return;   // a forked child must not release its parent's slot
  const std::lock_guard lock(mutex_);  // a grant in progress would go to the slot's next member
  std::uint64_t incarnation = incarnation_;
  if (slot().incarnation.compare_exchange_strong(incarnation, incarnation_ + 1)) wake_requesters();
  liveness_lock_.reset();
}

Status LedgerMember::refuse_in_a_child() const {
  if (joined_by_.is_this()) return ok();
  return Error{Errc::kDeviceUnavailable, "this slot of the device's ledger is that of process " +
                                             std::to_string(joined_by_.pid()) +
                                             "; a forked child has to join for itself"};
}

Status LedgerMember::set_priority(std::int64_t priority) {
  if (Status own = refuse_in_a_child(); !own) return own;
  if (Status bounded = check_priority(priority); !bounded) return bounded;
  if (is_member()) slot().priority = priority;
  return ok();
}

Status LedgerMember::add_worker(std::uint32_t pid, std::uint64_t start_ticks) {
  if (Status own = refuse_in_a_child(); !own) return own;
  const std::lock_guard lock(mutex_);
  if (!is_member()) return ok();
  for (LedgerWorker& worker : slot().workers) {
    if (worker.pid.load() != 0) continue;
    worker.start_ticks = start_ticks;
    worker.pid = pid;
    return ok();
  }
  return Error{Errc::kInvalidArgument,
               "a member of a ledger has at most " + std::to_string(kLedgerWorkers) + " workers"};
}

void LedgerMember::publish(std::uint64_t in_use_bytes, std::uint64_t evictable_bytes,
                           std::uint64_t parked_bytes, std::uint64_t page_bytes, bool active) {
  if (!is_member()) return;
  LedgerSlot& mine = slot();
  mine.in_use_bytes.store(in_use_bytes, std::memory_order_relaxed);
  mine.evictable_bytes.store(evictable_bytes, std::memory_order_relaxed);
  mine.parked_bytes.store(parked_bytes, std::memory_order_relaxed);
  mine.page_bytes.store(page_bytes, std::memory_order_relaxed);
  if (active) mine.active_ns.store(monotonic_coarse_ns(), std::memory_order_relaxed);
}

void LedgerMember::report_busy(bool busy) {
  if (!is_member()) return;
  slot().reported = static_cast<std::uint64_t>(busy ? Reported::kBusy : Reported::kIdle);
  if (!busy) wake_requesters();
}

bool LedgerMember::is_busy() const {
  return is_member() && kvelastic::is_busy(contender_of(slot(), monotonic_ns(), rules_), rules_);
}

}  // namespace kvelastic
