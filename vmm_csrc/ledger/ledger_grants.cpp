// Grants, and memory requests for what cannot be granted.
#include <algorithm>
#include <chrono>
#include <thread>

#include "base/debug_log.h"
#include "base/size_text.h"
#include "ledger/ledger.h"
#include "ledger/ledger_slots.h"
#include "segment/control_block.h"

namespace kvelastic {
namespace {

constexpr std::uint64_t kOneMove = std::uint64_t{1} << kGrantedShift;

LedgerMember::Moment moment_of(const LedgerLayout& layout) {
  LedgerMember::Moment all;
  for (std::size_t i = 0; i < slots_used(layout); ++i) {
    const LedgerSlot& slot = layout.slots[i];
    all.push_back({slot.incarnation.load(), slot.moves.load(), granted_of(slot.units.load()),
                   slot.reserved_bytes.load()});
  }
  return all;
}

}  // namespace

struct LedgerMember::Sums {
  std::uint64_t granted = 0;        // units, over the members
  std::uint64_t claimed_lower = 0;  // by slots before this one
  std::uint64_t claimed_higher = 0;
  std::uint64_t pledged_bytes = 0;
  std::uint64_t kept = 0;  // units kept for requests that outrank this member

  std::uint64_t claimed() const { return claimed_lower + claimed_higher; }
};

/// A snapshot of the members; `self` is this member's index.
struct LedgerMember::Everybody {
  std::vector<Contender> all{};
  std::vector<std::pair<std::size_t, std::uint64_t>> where{};  // slot and its incarnation
  std::size_t self = 0;
  std::uint64_t free_bytes = 0;
};

/// Adds up grants and claims in one pass over the slots, and the memory kept for requests before
/// this member, if there are any.
LedgerMember::Sums LedgerMember::add_up(std::uint64_t claim_units) const {
  Sums sums;
  bool has_requests = false;
  for (std::size_t i = 0; i < slots_used(*layout_); ++i) {
    const LedgerSlot& other = layout_->slots[i];
    if (!is_alive(other.incarnation.load())) continue;
    const std::uint64_t units = other.units.load();
    sums.granted += granted_of(units);
    sums.pledged_bytes = saturating_add(sums.pledged_bytes, other.pledged_bytes.load());
    if (i == index_) continue;
    (i < index_ ? sums.claimed_lower : sums.claimed_higher) += claimed_of(units);
    has_requests |= other.request_bytes.load() > 0;
  }
  if (has_requests && claim_units > 0 && is_member()) {
    Everybody found = look_around(monotonic_ns());
    found.all[found.self].reported = Reported::kBusy;  // it wants a page
    sums.kept =
        units_of(kept_bytes(found.all, found.self, usable_bytes(sums.pledged_bytes), rules_));
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
  if (!joined_by_.is_this()) return 0;  // a forked child's copy of the mutex may be locked
  const std::uint64_t each = units_of(page_bytes);
  const std::lock_guard lock(mutex_);
  pages = std::min(pages, kClaimMask / each);
  for (int look = 0; pages > 0 && is_member();) {
    std::uint64_t claim = pages * each;
    slot().units.fetch_add(claim);
    for (;; ++look) {
      // If the capacity changes between this read and the grant, look again. If it changes later,
      // the change sees the grant and rings.
      const std::uint64_t seen_bytes = capacity_bytes();
      const Sums sums = add_up(claim);
      const std::uint64_t capacity = usable_bytes(sums.pledged_bytes);
      const std::uint64_t free =
          saturating_sub(capacity / kGrantUnitBytes, sums.granted + sums.kept);
      if (free >= claim + sums.claimed()) {
        if (keep_claim(claim, seen_bytes)) return pages;
        continue;
      }
      if (sums.claimed() == 0 || look >= kClaimLooks) {
        // Others' claims do not matter here, or their owners are stopped: take fewer pages.
        pages = saturating_sub(free, sums.claimed()) / each;
        slot().units.fetch_sub(claim - pages * each);
        claim = pages * each;
        if (pages == 0) return 0;
        if (keep_claim(claim, seen_bytes)) return pages;
        continue;
      }
      if (look >= kClaimSpins) std::this_thread::yield();
      if (sums.claimed_lower > 0) break;  // the lower slot proceeds, this one withdraws
    }
    slot().units.fetch_sub(claim);
    for (; look < kClaimLooks && add_up(0).claimed_lower > 0; ++look) {
      if (look >= kClaimSpins) std::this_thread::yield();
    }
    ++look;
  }
  return 0;
}

/// Turns a claim into a grant unless the capacity has changed. Pre: mutex_ is held.
bool LedgerMember::keep_claim(std::uint64_t claim, std::uint64_t seen_capacity_bytes) {
  begin_move(claim);  // before it is granted, so that it never counts as mapped
  slot().units.fetch_add((claim << kGrantedShift) - claim);
  if (capacity_bytes() == seen_capacity_bytes) return true;
  slot().units.fetch_sub((claim << kGrantedShift) - claim);
  end_move(claim);
  return false;
}

/// Pre: mutex_ is held, as for end_move(). A change of the grant and its count happen under one
/// lock, so equal counts mean equal grants.
void LedgerMember::begin_move(std::uint64_t units) {
  slot().moves.fetch_add(kOneMove + units);
}

void LedgerMember::end_move(std::uint64_t units) {
  // If more is returned than was in transit, the rest was never in transit.
  slot().moves.fetch_add(kOneMove - std::min(units, moving_of(slot().moves.load())));
}

void LedgerMember::arrived(std::uint64_t pages, std::uint64_t page_bytes) {
  if (!joined_by_.is_this()) return;
  const std::lock_guard lock(mutex_);
  if (is_member()) end_move(pages * units_of(page_bytes));
}

void LedgerMember::leaving(std::uint64_t pages, std::uint64_t page_bytes) {
  if (!joined_by_.is_this()) return;
  const std::lock_guard lock(mutex_);
  if (is_member()) begin_move(pages * units_of(page_bytes));
}

void LedgerMember::give_back(std::uint64_t pages, std::uint64_t page_bytes) {
  if (!joined_by_.is_this()) return;
  {
    const std::lock_guard lock(mutex_);
    if (pages == 0 || !is_member()) return;
    const std::uint64_t units = pages * units_of(page_bytes);
    slot().units.fetch_sub(units << kGrantedShift);
    end_move(units);
  }
  wake_requesters();
}

void LedgerMember::wake_requesters() const {
  wake_who_waits(*layout_, index_);
}

std::uint64_t LedgerMember::usable_bytes(std::uint64_t pledged_bytes) const {
  return size_of(*layout_).left_for_caches(
      saturating_add(pledged_bytes, layout_->others_bytes.load()));
}

std::uint64_t LedgerMember::room(std::uint64_t page_bytes) const {
  const Sums sums = add_up(1);
  const std::uint64_t capacity = usable_bytes(sums.pledged_bytes);
  return saturating_sub(capacity / kGrantUnitBytes, sums.granted + sums.claimed() + sums.kept) /
         units_of(page_bytes);
}

std::uint64_t LedgerMember::granted_bytes() const {
  return is_member() ? granted_of(slot().units.load()) * kGrantUnitBytes : 0;
}

void LedgerMember::set_others(std::uint64_t bytes) {
  if (!joined_by_.is_this()) return;
  layout_->others_at_ns = monotonic_ns();
  if (layout_->others_bytes.exchange(bytes) > bytes) wake_requesters();
}

LedgerMember::Moment LedgerMember::moment() const {
  // Grants of dead members would hide others' memory.
  (void)reap_dead(*layout_, LivenessCheck(file_));
  return moment_of(*layout_);
}

Sight LedgerMember::see_device(const Moment& before, std::uint64_t total_bytes,
                               std::uint64_t free_bytes) {
  if (moment_of(*layout_) != before) return Sight::kChanged;
  std::uint64_t accounted_bytes = 0, moving_bytes = 0;
  for (const auto& [incarnation, moves, granted_units, reserved_bytes] : before) {
    if (!is_alive(incarnation)) continue;
    accounted_bytes += granted_units * kGrantUnitBytes;
    accounted_bytes = saturating_add(accounted_bytes, reserved_bytes);
    moving_bytes += moving_of(moves) * kGrantUnitBytes;
  }
  const std::uint64_t used_bytes = saturating_sub(total_bytes, free_bytes);
  // Memory in transit may be on the device or not. Within these bounds the last value stays.
  set_others(std::clamp(layout_->others_bytes.load(), saturating_sub(used_bytes, accounted_bytes),
                        saturating_sub(saturating_add(used_bytes, moving_bytes), accounted_bytes)));
  return moving_bytes > 0 ? Sight::kBounded : Sight::kExact;
}

// ------------------------------------------------------------------------------- memory requests

LedgerMember::Everybody LedgerMember::look_around(std::uint64_t now_ns) const {
  Everybody found;
  std::uint64_t granted_bytes = 0;
  for (std::size_t i = 0; i < slots_used(*layout_); ++i) {
    const std::uint64_t incarnation = layout_->slots[i].incarnation.load();
    if (i == index_) {
      found.self = found.all.size();  // even if it is leaving
    } else if (!is_alive(incarnation)) {
      continue;
    }
    found.all.push_back(contender_of(layout_->slots[i], now_ns, rules_));
    found.where.emplace_back(i, incarnation);
    granted_bytes += found.all.back().granted_bytes;
  }
  found.free_bytes = saturating_sub(usable_bytes(), granted_bytes);
  return found;
}

std::uint64_t LedgerMember::reach(std::uint64_t page_bytes) const {
  if (!is_member()) return 0;
  const std::uint64_t now_ns = monotonic_ns();
  // An engine without available blocks does not allocate, and so would never reap.
  if (saturating_sub(now_ns, reaped_ns_.load(std::memory_order_relaxed)) >= rules_.patience_ns) {
    reaped_ns_.store(now_ns, std::memory_order_relaxed);
    (void)reap_dead(*layout_, LivenessCheck(file_));
  }
  const Everybody found = look_around(now_ns);
  return room(page_bytes) +
         reachable_bytes(found.all, found.self, usable_bytes(), rules_) / page_bytes;
}

bool LedgerMember::request_memory_with(RequestTerms terms, std::uint64_t bytes) {
  if (!is_member()) return false;
  const std::uint64_t now_ns = monotonic_ns();
  LedgerSlot& mine = slot();
  const bool lapsed =
      saturating_sub(now_ns, mine.request_seen_ns.load()) >= rules_.request_expiry_ns;
  if (mine.request_bytes.load() == 0 || lapsed) mine.request_since_ns = now_ns;
  if (debug_logging() && mine.request_bytes.load() != bytes) {
    debug_log("ledger: requests %s from others", size_text(bytes).c_str());
  }
  if (terms.since_ns != 0) mine.request_since_ns = terms.since_ns;
  mine.request_keeps = terms.keeps ? 1 : 0;
  mine.request_seen_ns = now_ns;
  mine.request_bytes = bytes;

  (void)reap_dead(*layout_, LivenessCheck(file_));
  if (!is_member()) return false;
  const Everybody found = look_around(now_ns);
  const auto& [all, where, self, free_bytes] = found;
  const bool sent =
      send_requests(plan_reclaim(all, self, free_bytes, usable_bytes(), rules_), found, now_ns);
  return sent || free_bytes >= bytes ||
         std::any_of(all.begin(), all.end(), [&](const Contender& c) {
           return &c != &all[self] && c.reclaim_bytes > 0;  // also of slow members
         });
}

bool LedgerMember::is_memory_coming(std::chrono::nanoseconds patience) const {
  const Everybody found = look_around(monotonic_ns());
  return kvelastic::is_memory_coming(found.all, found.self,
                                     static_cast<std::uint64_t>(patience.count()));
}

bool LedgerMember::send_requests(const std::vector<ReclaimRequest>& plan,
                                 const Everybody& everybody, std::uint64_t now_ns) {
  bool any = false;
  for (const ReclaimRequest& request : plan) {
    const auto [index, incarnation] = everybody.where[request.contender];
    LedgerSlot& victim = layout_->slots[index];
    if (victim.incarnation.load() != incarnation) continue;
    if (open_requests(victim) == 0) victim.reclaim_since_ns = now_ns;
    victim.reclaim_bytes[static_cast<std::size_t>(request.depth) - 1].fetch_add(request.bytes);
    if (debug_logging()) {
      debug_log("ledger: reclaim request to process %u: %s", victim.identity.pid,
                size_text(request.bytes).c_str());
    }
    ring_bell(victim.bell);
    any = true;
  }
  return any;
}

bool LedgerMember::request_excess() {
  const auto left_for_caches = [this] {
    return size_of(*layout_).left_for_caches(pledged_bytes());
  };
  const auto excess = [&] {
    return saturating_sub(add_up(0).granted * kGrantUnitBytes, left_for_caches());
  };
  if (!is_member() || excess() == 0) return false;
  const std::uint64_t now_ns = monotonic_ns();
  std::uint64_t request_ns = layout_->excess_request_ns.load();
  // A time in the future is invalid and counts as long ago.
  const bool is_recent = request_ns != 0 && now_ns - request_ns < rules_.patience_ns;
  if (is_recent || !layout_->excess_request_ns.compare_exchange_strong(request_ns, now_ns)) {
    return true;
  }
  (void)reap_dead(*layout_, LivenessCheck(file_));
  if (!is_member()) return false;
  const Everybody found = look_around(now_ns);
  (void)send_requests(plan_excess(found.all, excess(), left_for_caches(), rules_), found, now_ns);
  return true;
}

void LedgerMember::end_memory_request() {
  if (is_member() && slot().request_bytes.exchange(0) > 0)
    wake_requesters();  // memory kept for this member is now available to others
}

void LedgerMember::wait(std::uint32_t seen, std::chrono::nanoseconds timeout) const {
  futex_wait(slot().bell, seen, timeout);
}

LedgerMember::OpenReclaim LedgerMember::open_reclaim() const {
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
  // Open requests count from now. No member is woken: a release of memory has woken the waiting
  // ones already, and an immediate retry without memory would loop.
  mine.reclaim_since_ns = monotonic_ns();
}

Status LedgerMember::check_integrity(std::uint64_t pages, std::uint64_t page_bytes) const {
  if (!is_member()) return ok();
  const std::uint64_t granted = granted_of(slot().units.load());
  if (granted == pages * units_of(page_bytes)) return LedgerView(layout_).check_integrity();
  return Error{Errc::kIntegrity, "the ledger has granted " +
                                     std::to_string(granted * kGrantUnitBytes) + " bytes, and " +
                                     std::to_string(pages * page_bytes) + " are held"};
}

}  // namespace kvelastic
