// Guarantees, reserves and capacity: what counts for members awake and asleep.
#include <algorithm>
#include <array>
#include <chrono>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "base/size_text.h"
#include "ledger/ledger.h"
#include "ledger/ledger_slots.h"
#include "segment/control_block.h"

namespace kvelastic {
namespace {

/// How many holders an error message names.
constexpr std::size_t kNamedHolders = 2;
/// Tries to read all slots while none of them changes.
constexpr int kSnapshotTries = 16;

struct Counted {
  std::uint64_t guaranteed_bytes = 0, pledged_bytes = 0;
};

Counted count(const LedgerLayout& layout) {
  Counted sum;
  for (std::size_t i = 0; i < slots_used(layout); ++i) {
    const LedgerSlot& slot = layout.slots[i];
    if (!is_alive(slot.incarnation.load())) continue;
    sum.guaranteed_bytes = saturating_add(sum.guaranteed_bytes, slot.min_bytes.load());
    sum.pledged_bytes = saturating_add(sum.pledged_bytes, slot.pledged_bytes.load());
  }
  return sum;
}

std::string guaranteed_and_reserved(std::uint64_t min_bytes, std::uint64_t reserve_bytes) {
  const std::string guaranteed = size_text(min_bytes) + " guaranteed";
  const std::string reserved = size_text(reserve_bytes) + " reserved";
  if (reserve_bytes == 0) return guaranteed;
  return min_bytes == 0 ? reserved : guaranteed + " and " + reserved;
}

/// Replaces unprintable characters: any process may have written the name.
std::string printable(std::string_view name) {
  std::string text(name);
  std::replace_if(text.begin(), text.end(), [](char c) { return c <= ' ' || c > '~'; }, '?');
  return text;
}

/// One slot's part of the account.
using Standing = std::array<std::uint64_t, 6>;

Standing standing_of(const LedgerSlot& slot) {
  return {slot.incarnation.load(),   slot.units.load(),          slot.min_bytes.load(),
          slot.pledged_bytes.load(), slot.reserved_bytes.load(), slot.checking.load()};
}

std::vector<Standing> standings(const LedgerLayout& layout) {
  std::vector<Standing> all;
  for (std::size_t i = 0; i < slots_used(layout); ++i) all.push_back(standing_of(layout.slots[i]));
  return all;
}

}  // namespace

Result<std::uint64_t> ledger_set_capacity(std::span<std::byte> bytes, std::uint64_t capacity_bytes,
                                          const LivenessCheck& check) {
  if (Status valid = validate_ledger(bytes); !valid) return valid.error();
  if (capacity_bytes < kGrantUnitBytes) {
    return Error{Errc::kInvalidArgument, "a capacity of " + size_text(capacity_bytes) +
                                             " is too small; it must be at least " +
                                             size_text(kGrantUnitBytes)};
  }
  auto& layout = *reinterpret_cast<LedgerLayout*>(bytes.data());
  const DeviceMemorySize size{capacity_bytes, layout.total_bytes.load()};
  const auto refusal = [&](const Counted& sum) {
    return Error{Errc::kGuarantee,
                 "a capacity of " + size_text(capacity_bytes) +
                     " is less than the guarantees and reserves" + " of the instances: " +
                     guaranteed_and_reserved(sum.guaranteed_bytes, sum.pledged_bytes)};
  };
  const auto fits = [&](const Counted& sum) {
    return size.has_room_for(sum.guaranteed_bytes, sum.pledged_bytes);
  };
  (void)reap_dead(layout, check);
  // Checked before the change, so that a process killed half-way leaves a valid capacity, and after
  // it, for a guarantee that was set in between.
  if (const Counted sum = count(layout); !fits(sum)) return refusal(sum);
  if (layout.most_bytes.load() < capacity_bytes) layout.most_bytes = capacity_bytes;
  const std::uint64_t before = layout.capacity_bytes.exchange(capacity_bytes);
  const Counted sum = count(layout);
  if (!fits(sum)) layout.capacity_bytes = before;
  for (std::size_t i = 0; i < slots_used(layout); ++i) {
    if (is_alive(layout.slots[i].incarnation.load())) ring_bell(layout.slots[i].bell);
  }
  if (!fits(sum)) return refusal(sum);
  return before;
}

// ------------------------------------------------------------------------- guarantee and reserve

/// The sums of the other members, and whether some are checking a claim.
struct LedgerMember::Pledges {
  Counted others;
  bool lower_checks = false;
  bool higher_checks = false;
};

LedgerMember::Pledges LedgerMember::add_up_pledges() const {
  Pledges sums;
  for (std::size_t i = 0; i < slots_used(*layout_); ++i) {
    const LedgerSlot& other = layout_->slots[i];
    if (i == index_ || !is_alive(other.incarnation.load())) continue;
    sums.others.guaranteed_bytes =
        saturating_add(sums.others.guaranteed_bytes, other.min_bytes.load());
    sums.others.pledged_bytes =
        saturating_add(sums.others.pledged_bytes, other.pledged_bytes.load());
    (i < index_ ? sums.lower_checks : sums.higher_checks) |= other.checking.load() != 0;
  }
  return sums;
}

/// Sets guarantee and pledge, neither less than before; restores the old values if the sums do not
/// allow it. Pre: mutex_ is held.
Status LedgerMember::pledge(std::uint64_t min_bytes, std::uint64_t reserve_bytes) {
  LedgerSlot& mine = slot();
  const std::uint64_t min_before = mine.min_bytes, pledged_before = mine.pledged_bytes;
  if (min_bytes == min_before && reserve_bytes == pledged_before) return ok();
  const auto withdraw = [&] {
    mine.min_bytes = min_before;
    mine.pledged_bytes = pledged_before;
    mine.checking = 0;
  };
  bool has_reaped = false;
  for (int look = 0;; ++look) {
    mine.checking = 1;
    mine.min_bytes = min_bytes;
    mine.pledged_bytes = reserve_bytes;
    const Pledges sums = add_up_pledges();
    if (size_of(*layout_).has_room_for(saturating_add(sums.others.guaranteed_bytes, min_bytes),
                                       saturating_add(sums.others.pledged_bytes, reserve_bytes))) {
      mine.checking = 0;
      return ok();
    }
    if ((sums.lower_checks || sums.higher_checks) && look < kClaimLooks) {
      // Another claim may be withdrawn at any moment. The lower slot stays; the other withdraws
      // until the check has ended.
      if (sums.lower_checks) withdraw();
      do {
        if (look >= kClaimSpins) std::this_thread::yield();
      } while (++look < kClaimLooks && sums.lower_checks && add_up_pledges().lower_checks);
      continue;
    }
    if (!has_reaped &&
        reap_dead(*layout_, LivenessCheck(file_)) > 0) {  // dead members guarantee nothing
      has_reaped = true;
      continue;
    }
    withdraw();
    return pledge_refusal(min_bytes, reserve_bytes);
  }
}

Error LedgerMember::pledge_refusal(std::uint64_t min_bytes, std::uint64_t reserve_bytes) const {
  const Counted others = add_up_pledges().others;
  const DeviceMemorySize size = size_of(*layout_);
  std::uint64_t all_bytes = size.capacity_bytes, held_bytes = others.guaranteed_bytes;
  std::uint64_t left_bytes = saturating_sub(size.left_for_caches(others.pledged_bytes), held_bytes);
  if (reserve_bytes > 0) {
    all_bytes = saturating_add(all_bytes, size.outside_bytes());
    held_bytes = saturating_add(held_bytes, others.pledged_bytes);
    left_bytes = saturating_sub(all_bytes, held_bytes);
  }
  const char* remedy = held_bytes == 0 ? "; ask for less, or raise its capacity (kvctl capacity)"
                                       : "; ask for less, or lower one of these (kvctl set --min)";
  return {Errc::kGuarantee, "no room for " + guaranteed_and_reserved(min_bytes, reserve_bytes) +
                                ": " + size_text(left_bytes) + " of the device's " +
                                size_text(all_bytes) + " are left" + holders(false) + remedy};
}

/// Returns "; NAME has 2.00 GiB guaranteed and 1.00 GiB reserved, NAME ..." of the other members,
/// the largest first. With `of_grants`: their grants instead of their guarantees.
std::string LedgerMember::holders(bool of_grants) const {
  struct Holder {
    std::uint64_t bytes, reserved_bytes;
    std::string name;
  };
  std::vector<Holder> all;
  for (std::size_t i = 0; i < slots_used(*layout_); ++i) {
    const LedgerSlot& other = layout_->slots[i];
    if (i == index_ || !is_alive(other.incarnation.load())) continue;
    const std::uint64_t granted_bytes = granted_of(other.units.load()) * kGrantUnitBytes;
    Holder holder{of_grants ? granted_bytes : other.min_bytes.load(), other.pledged_bytes.load(),
                  printable(text_of(other.identity.name))};
    if (saturating_add(holder.bytes, holder.reserved_bytes) > 0) all.push_back(std::move(holder));
  }
  std::stable_sort(all.begin(), all.end(), [](const Holder& a, const Holder& b) {
    return saturating_add(a.bytes, a.reserved_bytes) > saturating_add(b.bytes, b.reserved_bytes);
  });
  std::string text;
  for (std::size_t i = 0; i < std::min(all.size(), kNamedHolders); ++i) {
    const Holder& holder = all[i];
    const std::string what = of_grants
                                 ? size_text(holder.bytes) + " of cache and " +
                                       size_text(holder.reserved_bytes) + " reserved"
                                 : guaranteed_and_reserved(holder.bytes, holder.reserved_bytes);
    text += (i == 0 ? "; " : ", ") + holder.name + " has " + what;
  }
  if (all.size() > kNamedHolders) {
    text += ", and " + std::to_string(all.size() - kNamedHolders) + " more";
  }
  return text;
}

Status LedgerMember::set_min(std::uint64_t min_bytes) {
  if (Status own = refuse_in_a_child(); !own) return own;
  const std::lock_guard lock(mutex_);
  if (!is_member()) return ok();
  LedgerSlot& mine = slot();
  if (mine.asleep != 0 && !is_claiming_) {
    if (min_bytes > mine.own_min_bytes &&
        !size_of(*layout_).has_room_for(min_bytes, mine.own_reserve_bytes)) {
      return pledge_refusal(min_bytes, mine.own_reserve_bytes);
    }
  } else if (min_bytes <= mine.min_bytes) {
    mine.min_bytes = min_bytes;
  } else if (Status fits = pledge(min_bytes, mine.pledged_bytes); !fits) {
    return fits;
  }
  mine.own_min_bytes = min_bytes;
  return ok();
}

// ------------------------------------------------------------------------------ sleep and claims

std::uint64_t LedgerMember::pledged_bytes() const {
  return count(*layout_).pledged_bytes;
}

void LedgerMember::fall_asleep() {
  if (!joined_by_.is_this()) return;
  const std::lock_guard lock(mutex_);
  if (!is_member()) return;
  LedgerSlot& mine = slot();
  mine.asleep = 1;
  mine.reserved_bytes = 0;
  settle_claim(false);
  wake_requesters();
}

/// Ends a claim: met, or withdrawn. Pre: mutex_ is held.
void LedgerMember::settle_claim(bool met) {
  LedgerSlot& mine = slot();
  is_claiming_ = false;
  if (met) {
    met_claim_ = claim_;
    mine.own_reserve_bytes = mine.pledged_bytes.load();
    mine.reserved_bytes = mine.pledged_bytes.load();
    mine.asleep = 0;
    return;
  }
  if (mine.asleep != 0) mine.min_bytes = 0;
  mine.pledged_bytes = mine.reserved_bytes.load();
}

Status LedgerMember::claim_wake() {
  if (Status own = refuse_in_a_child(); !own) return own;
  const std::lock_guard lock(mutex_);
  LedgerSlot& mine = slot();
  if (!is_member() || mine.asleep == 0 || is_claiming_) return ok();
  if (Status fits = pledge(mine.own_min_bytes, mine.own_reserve_bytes); !fits) return fits;
  ++claim_;
  is_claiming_ = true;
  if (is_there()) settle_claim(true);
  return ok();
}

Status LedgerMember::claim_reserve(std::uint64_t bytes) {
  if (Status own = refuse_in_a_child(); !own) return own;
  const std::lock_guard lock(mutex_);
  if (!is_member()) return ok();
  LedgerSlot& mine = slot();
  if (is_claiming_) settle_claim(false);
  if (mine.asleep != 0) {
    if (bytes > mine.own_reserve_bytes &&
        !size_of(*layout_).has_room_for(mine.own_min_bytes, bytes)) {
      return pledge_refusal(mine.own_min_bytes, bytes);
    }
    mine.own_reserve_bytes = bytes;
    return ok();
  }
  if (bytes <= mine.reserved_bytes) {
    mine.own_reserve_bytes = bytes;
    mine.reserved_bytes = bytes;
    mine.pledged_bytes = bytes;
    wake_requesters();
    return ok();
  }
  if (Status fits = pledge(mine.min_bytes, bytes); !fits) return fits;
  ++claim_;
  is_claiming_ = true;
  if (is_there()) settle_claim(true);
  return ok();
}

/// True if grants and reserves leave room for this member's pledge. Of other waiting members only
/// lower slots count, so that one of two is served first. Pre: mutex_ is held.
bool LedgerMember::is_there() const {
  if (slot().pledged_bytes.load() == slot().reserved_bytes.load()) return true;  // nothing is due
  std::uint64_t units = 0, reserved_bytes = 0;
  for (std::size_t i = 0; i < slots_used(*layout_); ++i) {
    const LedgerSlot& other = layout_->slots[i];
    if (!is_alive(other.incarnation.load())) continue;
    // A grant that did not see this pledge was claimed earlier, and is counted here.
    units += granted_of(other.units.load()) + claimed_of(other.units.load());
    const SharedWord& counts = i <= index_ ? other.pledged_bytes : other.reserved_bytes;
    reserved_bytes = saturating_add(reserved_bytes, counts.load());
  }
  const DeviceMemorySize size = size_of(*layout_);
  return saturating_sub(reserved_bytes, size.outside_bytes()) <= size.capacity_bytes &&
         units * kGrantUnitBytes <= size.left_for_caches(reserved_bytes);
}

bool LedgerMember::claim_is_met() {
  if (!joined_by_.is_this()) return true;
  {
    const std::lock_guard lock(mutex_);
    if (!is_claiming_ || !is_member()) return true;
    if (is_there()) {
      settle_claim(true);
      return true;
    }
  }
  (void)request_excess();
  return false;
}

bool LedgerMember::is_claiming() const {
  if (!joined_by_.is_this()) return false;
  const std::lock_guard lock(mutex_);
  return is_claiming_ && is_member();
}

void LedgerMember::give_up_claim() {
  if (!joined_by_.is_this()) return;
  const std::lock_guard lock(mutex_);
  if (!is_claiming_ || !is_member()) return;
  settle_claim(false);
  wake_requesters();
}

Status LedgerMember::fail_claim() {
  if (Status own = refuse_in_a_child(); !own) return own;
  const std::lock_guard lock(mutex_);
  if (!is_claiming_ || !is_member()) return ok();
  const std::uint64_t bytes = slot().pledged_bytes;
  settle_claim(false);
  wake_requesters();
  return Error{Errc::kReserve, size_text(bytes) + " to be reserved of the device's " +
                                   size_text(capacity_bytes()) + " did not become free" +
                                   holders(true) + "; put one to sleep (kvctl sleep), or wait"};
}

Status LedgerMember::wait_for_claim(std::chrono::nanoseconds timeout) {
  if (Status own = refuse_in_a_child(); !own) return own;
  std::uint64_t claim = 0;
  {
    const std::lock_guard lock(mutex_);
    if (!is_claiming_) return ok();
    claim = claim_;
  }
  // Bounds the timeout so that the clock does not overflow.
  const auto until = std::chrono::steady_clock::now() +
                     std::min<std::chrono::nanoseconds>(timeout, std::chrono::hours(24));
  const std::chrono::nanoseconds patience(rules_.patience_ns);
  for (;;) {
    const std::uint32_t seen = bell();
    if (claim_is_met()) {
      const std::lock_guard lock(mutex_);
      if (met_claim_ >= claim || !is_member()) return ok();
      return Error{Errc::kReserve,
                   "the claim of a reserve was withdrawn: the instance was put to sleep, "
                   "or requested another reserve"};
    }
    const auto now = std::chrono::steady_clock::now();
    if (now >= until) {
      if (Status failed = fail_claim(); !failed) return failed;
      continue;  // met at this moment, or ended by another thread
    }
    wait(seen, std::min<std::chrono::nanoseconds>(until - now, patience));
  }
}

// -------------------------------------------------------------------------------------- integrity

Status LedgerView::check_integrity() const {
  for (int tries = 0; tries < kSnapshotTries; ++tries) {
    const std::uint64_t capacity_bytes = layout_->capacity_bytes.load();
    const std::vector<Standing> all = standings(*layout_);
    if (standings(*layout_) != all || layout_->capacity_bytes.load() != capacity_bytes) continue;
    std::uint64_t granted_bytes = 0, reserved_bytes = 0, pledged_bytes = 0, guaranteed_bytes = 0;
    bool settled = true;
    for (const auto& [incarnation, units, min, pledged, reserved, checking] : all) {
      if (!is_alive(incarnation)) continue;
      if (pledged < reserved && checking == 0) {
        return Error{Errc::kIntegrity, "a member has reserved " + size_text(reserved) +
                                           " and pledged only " + size_text(pledged)};
      }
      granted_bytes += granted_of(units) * kGrantUnitBytes;
      reserved_bytes = saturating_add(reserved_bytes, reserved);
      pledged_bytes = saturating_add(pledged_bytes, pledged);
      guaranteed_bytes = saturating_add(guaranteed_bytes, min);
      settled = settled && checking == 0;
    }
    const DeviceMemorySize most{std::max(capacity_bytes, layout_->most_bytes.load()),
                                layout_->total_bytes.load()};
    if (Status sound = check_account(most, granted_bytes, 0, reserved_bytes); !sound) return sound;
    if (!settled) continue;
    return check_account({capacity_bytes, layout_->total_bytes.load()}, 0, guaranteed_bytes,
                         pledged_bytes);
  }
  return ok();
}

}  // namespace kvelastic
