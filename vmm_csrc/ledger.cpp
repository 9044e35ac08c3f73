#include "ledger.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "checksum.h"
#include "debug_log.h"
#include "record.h"
#include "size_text.h"

namespace kvelastic {
namespace {

constexpr unsigned kGrantedShift = 32;
constexpr std::uint64_t kClaimMask = (std::uint64_t{1} << kGrantedShift) - 1;
/// Looks at another one's claim before it counts as a grant: its owner was stopped in between.
constexpr int kClaimLooks = 2000;
/// Looks without giving the processor away; a claim stands for a few hundred nanoseconds.
constexpr int kClaimSpins = 200;

constexpr std::uint64_t granted_of(std::uint64_t units) {
  return units >> kGrantedShift;
}
constexpr std::uint64_t claimed_of(std::uint64_t units) {
  return units & kClaimMask;
}
constexpr bool is_alive(std::uint64_t life) {
  return (life & 1) != 0;
}
constexpr std::uint64_t units_of(std::uint64_t bytes) {
  return (bytes + kGrantUnitBytes - 1) / kGrantUnitBytes;
}
constexpr std::uint64_t less(std::uint64_t value, std::uint64_t what) {
  return value > what ? value - what : 0;
}

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

Status validate(std::span<const std::byte> bytes) {
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

std::size_t slots_used(const LedgerLayout& layout) {
  return std::min<std::size_t>(layout.slots_used.load(), kLedgerSlots);
}

std::uint64_t open_at(const LedgerSlot& slot, std::size_t depth) {
  return less(slot.wanted_bytes[depth].load(), slot.handled_bytes[depth].load());
}

std::uint64_t open_requests(const LedgerSlot& slot) {
  std::uint64_t bytes = 0;
  for (std::size_t depth = 0; depth < kDepths; ++depth) bytes += open_at(slot, depth);
  return bytes;
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

/// Whether the member with that life has a process left: its scheduler, or one with its pages.
Life life_of(const LifeJudge& judge, std::size_t index, std::uint64_t life,
             const LedgerIdentity& who, std::vector<ProcessStart> processes) {
  processes.push_back({who.pid, who.start_ticks});
  return judge.ask(ledger_life_byte(index, life, 0), 1 + kLedgerWorkers, who.pid_namespace,
                   processes);
}

/// What the ledger says of one member; times become ages.
Contender contender_of(const LedgerSlot& slot, std::uint64_t now_ns, const ReclaimRules& rules) {
  Contender c;
  c.granted_bytes = granted_of(slot.units.load()) * kGrantUnitBytes;
  c.min_bytes = slot.min_bytes.load();
  c.priority = slot.priority.load();
  c.parked_bytes = slot.parked_bytes.load(std::memory_order_relaxed);
  c.cached_bytes = slot.cached_bytes.load(std::memory_order_relaxed);
  c.page_bytes = slot.page_bytes.load(std::memory_order_relaxed);
  c.idle_ns = less(now_ns, slot.active_ns.load(std::memory_order_relaxed));
  if (less(now_ns, slot.ask_seen_ns.load()) < rules.ask_lease_ns) {
    c.ask_bytes = slot.ask_bytes.load();
    c.ask_ns = less(now_ns, slot.ask_since_ns.load());
  }
  c.wanted_bytes = open_requests(slot);
  c.wanted_ns = less(now_ns, slot.wanted_at_ns.load());
  return c;
}

}  // namespace

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
  if (Status valid = validate(bytes); !valid) return valid.error();
  return LedgerView(reinterpret_cast<const LedgerLayout*>(bytes.data()));
}

std::vector<LedgerEntry> LedgerView::members(const LifeJudge& judge) const {
  std::vector<LedgerEntry> found;
  const std::uint64_t now_ns = monotonic_ns();
  for (std::size_t i = 0; i < slots_used(*layout_); ++i) {
    const LedgerSlot& slot = layout_->slots[i];
    const std::uint64_t life = slot.life.load();
    if (!is_alive(life)) continue;
    LedgerEntry entry{i,
                      life,
                      slot.identity,
                      workers_of(slot),
                      Life::kUnknown,
                      contender_of(slot, now_ns, ReclaimRules{}),
                      slot.limit_bytes.load(std::memory_order_relaxed),
                      slot.in_use_bytes.load(std::memory_order_relaxed),
                      slot.page_bytes.load(std::memory_order_relaxed)};
    // Left, and perhaps taken by another one, while it was copied: it is not what was looked for.
    if (slot.life.load() != life) continue;
    entry.alive = life_of(judge, i, life, entry.identity, entry.workers);
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
  return ok();
}

namespace {

std::uint64_t reap_dead(LedgerLayout& layout, const LifeJudge& judge) {
  std::uint64_t freed = 0;
  for (std::size_t i = 0; i < slots_used(layout); ++i) {
    LedgerSlot& slot = layout.slots[i];
    std::uint64_t life = slot.life.load();
    const LedgerIdentity who = slot.identity;
    auto workers = workers_of(slot);
    if (!is_alive(life) || slot.life.load() != life) continue;
    if (life_of(judge, i, life, who, std::move(workers)) != Life::kDead) continue;
    if (slot.life.compare_exchange_strong(life, life + 1)) ++freed;
  }
  if (freed > 0) {
    for (std::size_t i = 0; i < slots_used(layout); ++i) {
      if (layout.slots[i].ask_bytes.load() > 0) ring_bell(layout.slots[i].bell);
    }
  }
  return freed;
}

std::uint64_t guaranteed_bytes(const LedgerLayout& layout) {
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < slots_used(layout); ++i) {
    const LedgerSlot& slot = layout.slots[i];
    if (is_alive(slot.life.load())) bytes += slot.min_bytes.load();
  }
  return bytes;
}

}  // namespace

Result<std::uint64_t> ledger_set_capacity(std::span<std::byte> bytes, std::uint64_t capacity_bytes,
                                          const LifeJudge& judge) {
  if (Status valid = validate(bytes); !valid) return valid.error();
  if (capacity_bytes < kGrantUnitBytes) {
    return Error{Errc::kInvalidArgument, "a capacity of " + size_text(capacity_bytes) +
                                             " is too small; it must be at least " +
                                             size_text(kGrantUnitBytes)};
  }
  auto& layout = *reinterpret_cast<LedgerLayout*>(bytes.data());
  const auto refusal = [&](std::uint64_t guaranteed) {
    return Error{Errc::kGuarantee, "a capacity of " + size_text(capacity_bytes) +
                                       " is less than what the instances are guaranteed, " +
                                       size_text(guaranteed)};
  };
  (void)reap_dead(layout, judge);
  // Looked at before the change, so that whoever is killed half-way leaves a capacity that holds
  // the guarantees; and after it, for a guarantee that was given meanwhile.
  if (const std::uint64_t sum = guaranteed_bytes(layout); sum > capacity_bytes) return refusal(sum);
  const std::uint64_t before = layout.capacity_bytes.exchange(capacity_bytes);
  const std::uint64_t sum = guaranteed_bytes(layout);
  if (sum > capacity_bytes) layout.capacity_bytes = before;
  for (std::size_t i = 0; i < slots_used(layout); ++i) {
    if (is_alive(layout.slots[i].life.load())) ring_bell(layout.slots[i].bell);
  }
  if (sum > capacity_bytes) return refusal(sum);
  return before;
}

Result<std::uint64_t> ledger_reap(std::span<std::byte> bytes, const LifeJudge& judge) {
  if (Status valid = validate(bytes); !valid) return valid.error();
  return reap_dead(*reinterpret_cast<LedgerLayout*>(bytes.data()), judge);
}

namespace {

constexpr std::uint64_t kShut = 1;
constexpr std::uint64_t kOneJoin = 2;

}  // namespace

Result<bool> ledger_shut(std::span<std::byte> bytes) {
  if (Status valid = validate(bytes); !valid) return valid.error();
  auto& layout = *reinterpret_cast<LedgerLayout*>(bytes.data());
  std::uint64_t door = layout.door.load();
  if ((door & kShut) != 0) return true;
  for (std::size_t i = 0; i < slots_used(layout); ++i) {
    if (is_alive(layout.slots[i].life.load())) return false;
  }
  return layout.door.compare_exchange_strong(door, door | kShut);
}

// --------------------------------------------------------------------------------------- member

struct LedgerMember::Sums {
  std::uint64_t granted = 0;        // units, of all members
  std::uint64_t claimed_lower = 0;  // by slots before this one
  std::uint64_t claimed_higher = 0;
  std::uint64_t kept = 0;  // units that asks wait for which outrank this member

  std::uint64_t claimed() const { return claimed_lower + claimed_higher; }
};

/// All members at one moment; `self` is this one.
struct LedgerMember::Everybody {
  std::vector<Contender> all{};
  std::vector<std::pair<std::size_t, std::uint64_t>> where{};  // slot and its life
  std::size_t self = 0;
  std::uint64_t free_bytes = 0;
};

Result<std::unique_ptr<LedgerMember>> LedgerMember::join(std::span<std::byte> bytes, LedgerJoin how,
                                                         std::shared_ptr<void> keep) {
  if (Status valid = validate(bytes); !valid) return valid.error();
  if (Status bounded = check_priority(how.priority); !bounded) return bounded.error();
  auto* layout = reinterpret_cast<LedgerLayout*>(bytes.data());
  for (std::size_t i = 0; i < kLedgerSlots; ++i) {
    LedgerSlot& slot = layout->slots[i];
    const std::uint64_t life = slot.life.load();
    if (is_alive(life)) continue;
    // The lock is there before the member is, so nobody finds a member without it; and it keeps
    // other joiners out of the slot.
    LifeLock::Attempt claim{LifeLock::Outcome::kNoLocks, nullptr};
    if (!how.file.path.empty()) {
      auto tried = LifeLock::hold(how.file, ledger_life_byte(i, life + 1, 0), how.children);
      if (!tried) return tried.error();
      claim = *std::move(tried);
    }
    if (claim.outcome == LifeLock::Outcome::kTaken || slot.life.load() != life) continue;
    for (SharedWord* word :
         {&slot.units, &slot.min_bytes, &slot.ask_bytes, &slot.ask_since_ns, &slot.ask_seen_ns,
          &slot.limit_bytes, &slot.in_use_bytes, &slot.cached_bytes, &slot.parked_bytes,
          &slot.page_bytes, &slot.wanted_at_ns}) {
      *word = 0;
    }
    for (std::size_t depth = 0; depth < kDepths; ++depth) {
      slot.wanted_bytes[depth] = 0;
      slot.handled_bytes[depth] = 0;
    }
    for (LedgerWorker& worker : slot.workers) worker.pid = 0;
    slot.priority = how.priority;
    slot.active_ns = monotonic_coarse_ns();
    slot.identity = how.identity;
    slot.life = life + 1;
    std::uint32_t used = layout->slots_used.load();
    while (used <= i &&
           !layout->slots_used.compare_exchange_weak(used, static_cast<std::uint32_t>(i + 1))) {
    }
    std::unique_ptr<LedgerMember> member(new LedgerMember(layout, i, life + 1, std::move(how.file),
                                                          std::move(claim.lock), std::move(keep)));
    if ((layout->door.fetch_add(kOneJoin) & kShut) != 0) return std::unique_ptr<LedgerMember>();
    if (Status guaranteed = member->set_min(how.min_bytes); !guaranteed) return guaranteed.error();
    return member;
  }
  return Error{Errc::kPoolExhausted,
               "all " + std::to_string(kLedgerSlots) + " places of the device's ledger are taken"};
}

void LedgerMember::leave() {
  if (!joined_by_.is_this()) return;   // what a forked child drops is not its own
  const std::lock_guard lock(mutex_);  // a grant on its way would go to who has the slot next
  std::uint64_t life = life_;
  if (slot().life.compare_exchange_strong(life, life_ + 1)) wake_askers();
  life_lock_.reset();
}

Status LedgerMember::refuse_in_a_child() const {
  if (joined_by_.is_this()) return ok();
  return Error{Errc::kDeviceUnavailable, "this place in the device's ledger is that of process " +
                                             std::to_string(joined_by_.pid()) +
                                             "; a forked child has to join for itself"};
}

/// One pass over the slots: what is granted and claimed; and what others wait for before us, where
/// somebody does.
LedgerMember::Sums LedgerMember::add_up(std::uint64_t wanted_units) const {
  Sums sums;
  bool somebody_asks = false;
  for (std::size_t i = 0; i < slots_used(*layout_); ++i) {
    const LedgerSlot& other = layout_->slots[i];
    if (!is_alive(other.life.load())) continue;
    const std::uint64_t units = other.units.load();
    sums.granted += granted_of(units);
    if (i == index_) continue;
    (i < index_ ? sums.claimed_lower : sums.claimed_higher) += claimed_of(units);
    somebody_asks |= other.ask_bytes.load() > 0;
  }
  if (somebody_asks && wanted_units > 0 && is_member()) {
    Everybody found = look_around(monotonic_ns());
    found.all[found.self].idle_ns = 0;  // who wants a page works
    sums.kept = units_of(kept_bytes(found.all, found.self, usable_bytes(), rules_));
  }
  return sums;
}

std::uint64_t LedgerMember::grant(std::uint64_t pages, std::uint64_t page_bytes) {
  const std::uint64_t granted = take_grant(pages, page_bytes);
  if (pages > 0 && debug_logging()) {
    debug_log("ledger: granted %s of %s; %s are granted now",
              size_text(granted * page_bytes).c_str(), size_text(pages * page_bytes).c_str(),
              size_text(granted_bytes()).c_str());
  }
  return granted;
}

std::uint64_t LedgerMember::take_grant(std::uint64_t pages, std::uint64_t page_bytes) {
  if (!joined_by_.is_this()) return 0;  // whose mutex may have been taken while it was forked
  const std::uint64_t each = units_of(page_bytes);
  const std::lock_guard lock(mutex_);
  pages = std::min(pages, kClaimMask / each);
  for (int look = 0; pages > 0 && is_member();) {
    std::uint64_t claim = pages * each;
    slot().units.fetch_add(claim);
    for (;; ++look) {
      // A capacity that changes after this look and before the grant stands: look again. One that
      // changes later finds the grant, and rings.
      const std::uint64_t seen_bytes = capacity_bytes();
      const Sums sums = add_up(claim);
      const std::uint64_t capacity = usable_bytes();
      const std::uint64_t free = less(capacity / kGrantUnitBytes, sums.granted + sums.kept);
      if (free >= claim + sums.claimed()) {
        slot().units.fetch_add((claim << kGrantedShift) - claim);
        if (capacity_bytes() == seen_bytes) return pages;
        slot().units.fetch_sub((claim << kGrantedShift) - claim);
        continue;
      }
      if (sums.claimed() == 0 || look >= kClaimLooks) {
        // Others' claims do not matter here, or their owners were stopped with them: less, then.
        pages = less(free, sums.claimed()) / each;
        slot().units.fetch_sub(claim - pages * each);
        claim = pages * each;
        if (pages == 0) return 0;
        slot().units.fetch_add((claim << kGrantedShift) - claim);
        if (capacity_bytes() == seen_bytes) return pages;
        slot().units.fetch_sub((claim << kGrantedShift) - claim);
        continue;
      }
      if (look >= kClaimSpins) std::this_thread::yield();
      if (sums.claimed_lower > 0) break;  // the lower slot stays, this one stands back
    }
    slot().units.fetch_sub(claim);
    for (; look < kClaimLooks && add_up(0).claimed_lower > 0; ++look) {
      if (look >= kClaimSpins) std::this_thread::yield();
    }
    ++look;
  }
  return 0;
}

void LedgerMember::give_back(std::uint64_t pages, std::uint64_t page_bytes) {
  if (!joined_by_.is_this()) return;
  {
    const std::lock_guard lock(mutex_);
    if (pages == 0 || !is_member()) return;
    slot().units.fetch_sub((pages * units_of(page_bytes)) << kGrantedShift);
  }
  wake_askers();
}

void LedgerMember::wake_askers() const {
  for (std::size_t i = 0; i < slots_used(*layout_); ++i) {
    LedgerSlot& other = layout_->slots[i];
    if (i != index_ && other.ask_bytes.load() > 0 && is_alive(other.life.load())) {
      ring_bell(other.bell);
    }
  }
}

std::uint64_t LedgerMember::usable_bytes() const {
  return less(capacity_bytes(), layout_->others_bytes.load());
}

std::uint64_t LedgerMember::room(std::uint64_t page_bytes) const {
  const Sums sums = add_up(1);
  const std::uint64_t capacity = usable_bytes();
  return less(capacity / kGrantUnitBytes, sums.granted + sums.claimed() + sums.kept) /
         units_of(page_bytes);
}

std::uint64_t LedgerMember::granted_bytes() const {
  return is_member() ? granted_of(slot().units.load()) * kGrantUnitBytes : 0;
}

void LedgerMember::set_others(std::uint64_t bytes) {
  if (!joined_by_.is_this()) return;
  layout_->others_at_ns = monotonic_ns();
  if (layout_->others_bytes.exchange(bytes) > bytes) wake_askers();
}

void LedgerMember::see_device(std::uint64_t total_bytes, std::uint64_t free_bytes) {
  const std::uint64_t granted = add_up(0).granted * kGrantUnitBytes;
  set_others(less(less(total_bytes, free_bytes), granted));
}

Status LedgerMember::set_min(std::uint64_t min_bytes) {
  if (Status own = refuse_in_a_child(); !own) return own;
  const std::lock_guard lock(mutex_);
  if (!is_member()) return ok();
  const std::uint64_t before = slot().min_bytes.exchange(min_bytes);
  std::uint64_t sum_bytes = 0;
  // The second look is without the dead, who guarantee nothing.
  for (int look = 0; look < 2; ++look) {
    if (look > 0 && reap_dead(*layout_, LifeJudge(file_)) == 0) break;
    sum_bytes = 0;
    for (std::size_t i = 0; i < slots_used(*layout_); ++i) {
      const LedgerSlot& other = layout_->slots[i];
      if (i != index_ && is_alive(other.life.load())) sum_bytes += other.min_bytes.load();
    }
    if (min_bytes <= before ||
        (min_bytes <= capacity_bytes() && sum_bytes <= capacity_bytes() - min_bytes)) {
      return ok();
    }
  }
  slot().min_bytes = before;
  return Error{Errc::kGuarantee, "a guarantee of " + size_text(min_bytes) +
                                     " and those of the others, " + size_text(sum_bytes) +
                                     ", are more than the device's " + size_text(capacity_bytes())};
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

void LedgerMember::publish(std::uint64_t in_use_bytes, std::uint64_t cached_bytes,
                           std::uint64_t parked_bytes, std::uint64_t page_bytes, bool active) {
  if (!is_member()) return;
  LedgerSlot& mine = slot();
  mine.in_use_bytes.store(in_use_bytes, std::memory_order_relaxed);
  mine.cached_bytes.store(cached_bytes, std::memory_order_relaxed);
  mine.parked_bytes.store(parked_bytes, std::memory_order_relaxed);
  mine.page_bytes.store(page_bytes, std::memory_order_relaxed);
  if (active) mine.active_ns.store(monotonic_coarse_ns(), std::memory_order_relaxed);
}

// ---------------------------------------------------------------------------------------- asking

LedgerMember::Everybody LedgerMember::look_around(std::uint64_t now_ns) const {
  Everybody found;
  std::uint64_t taken_bytes = layout_->others_bytes.load();
  for (std::size_t i = 0; i < slots_used(*layout_); ++i) {
    const std::uint64_t life = layout_->slots[i].life.load();
    if (i == index_) {
      found.self = found.all.size();  // also where it is leaving just now
    } else if (!is_alive(life)) {
      continue;
    }
    found.all.push_back(contender_of(layout_->slots[i], now_ns, rules_));
    found.where.emplace_back(i, life);
    taken_bytes += found.all.back().granted_bytes;
  }
  found.free_bytes = less(capacity_bytes(), taken_bytes);
  return found;
}

std::uint64_t LedgerMember::reach(std::uint64_t page_bytes) const {
  if (!is_member()) return 0;
  const std::uint64_t now_ns = monotonic_ns();
  // An engine that sees nothing available does not alloc, and so would never ask.
  if (less(now_ns, reaped_ns_.load(std::memory_order_relaxed)) >= rules_.patience_ns) {
    reaped_ns_.store(now_ns, std::memory_order_relaxed);
    (void)reap_dead(*layout_, LifeJudge(file_));
  }
  const Everybody found = look_around(now_ns);
  return room(page_bytes) +
         reachable_bytes(found.all, found.self, usable_bytes(), rules_) / page_bytes;
}

bool LedgerMember::ask(std::uint64_t bytes) {
  if (!is_member()) return false;
  const std::uint64_t now_ns = monotonic_ns();
  LedgerSlot& mine = slot();
  const bool lapsed = less(now_ns, mine.ask_seen_ns.load()) >= rules_.ask_lease_ns;
  if (mine.ask_bytes.load() == 0 || lapsed) mine.ask_since_ns = now_ns;
  if (debug_logging() && mine.ask_bytes.load() != bytes) {
    debug_log("ledger: asks others for %s", size_text(bytes).c_str());
  }
  mine.ask_seen_ns = now_ns;
  mine.ask_bytes = bytes;

  (void)reap_dead(*layout_, LifeJudge(file_));
  if (!is_member()) return false;
  const Everybody found = look_around(now_ns);
  const auto& [all, where, self, free_bytes] = found;
  const bool asked =
      demand(plan_reclaim(all, self, free_bytes, usable_bytes(), rules_), found, now_ns);
  return asked || free_bytes >= bytes ||
         std::any_of(all.begin(), all.end(), [&](const Contender& c) {
           return &c != &all[self] && c.wanted_bytes > 0;  // also of who is slow to answer
         });
}

bool LedgerMember::demand(const std::vector<Demand>& plan, const Everybody& everybody,
                          std::uint64_t now_ns) {
  bool any = false;
  for (const Demand& demand : plan) {
    const auto [index, life] = everybody.where[demand.contender];
    LedgerSlot& victim = layout_->slots[index];
    if (victim.life.load() != life) continue;
    if (open_requests(victim) == 0) victim.wanted_at_ns = now_ns;
    victim.wanted_bytes[static_cast<std::size_t>(demand.depth) - 1].fetch_add(demand.bytes);
    if (debug_logging()) {
      debug_log("ledger: asked the instance of process %u for %s", victim.identity.pid,
                size_text(demand.bytes).c_str());
    }
    ring_bell(victim.bell);
    any = true;
  }
  return any;
}

bool LedgerMember::ask_for_excess() {
  const auto excess = [this] {
    return less(add_up(0).granted * kGrantUnitBytes, capacity_bytes());
  };
  if (!is_member() || excess() == 0) return false;
  const std::uint64_t now_ns = monotonic_ns();
  std::uint64_t asked_ns = layout_->excess_asked_ns.load();
  // A time to come is none of this machine's: it counts as long ago.
  if (now_ns - asked_ns < rules_.patience_ns ||
      !layout_->excess_asked_ns.compare_exchange_strong(asked_ns, now_ns)) {
    return true;
  }
  (void)reap_dead(*layout_, LifeJudge(file_));
  if (!is_member()) return false;
  const Everybody found = look_around(now_ns);
  (void)demand(plan_excess(found.all, excess(), capacity_bytes(), rules_), found, now_ns);
  return true;
}

void LedgerMember::stop_asking() {
  if (is_member() && slot().ask_bytes.exchange(0) > 0)
    wake_askers();  // what was kept for this one is theirs
}

void LedgerMember::wait(std::uint32_t seen, std::chrono::nanoseconds timeout) const {
  futex_wait(slot().bell, seen, timeout);
}

LedgerMember::Wanted LedgerMember::wanted() const {
  for (std::size_t depth = 0; depth < kDepths; ++depth) {
    const std::uint64_t bytes = open_at(slot(), depth);
    if (bytes > 0) return {bytes, static_cast<Depth>(depth + 1)};
  }
  return {};
}

void LedgerMember::handled(std::uint64_t bytes) {
  if (!is_member()) return;
  LedgerSlot& mine = slot();
  for (std::size_t depth = 0; depth < kDepths && bytes > 0; ++depth) {
    const std::uint64_t here = std::min(bytes, open_at(mine, depth));
    mine.handled_bytes[depth].fetch_add(here);
    bytes -= here;
  }
  // What is still open is looked at now. Nobody is woken: who gave something has woken the askers,
  // and where there was nothing, asking again at once would go round in a circle.
  mine.wanted_at_ns = monotonic_ns();
}

Status LedgerMember::check_integrity(std::uint64_t pages, std::uint64_t page_bytes) const {
  if (!is_member()) return ok();
  const std::uint64_t granted = granted_of(slot().units.load());
  if (granted == pages * units_of(page_bytes)) return ok();
  return Error{Errc::kIntegrity, "the ledger has granted " +
                                     std::to_string(granted * kGrantUnitBytes) + " bytes, and " +
                                     std::to_string(pages * page_bytes) + " are held"};
}

}  // namespace kvelastic
