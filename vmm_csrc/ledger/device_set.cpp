#include "ledger/device_set.h"

#include <algorithm>
#include <set>
#include <utility>

#include "segment/control_block.h"

namespace kvelastic {
namespace {

/// Retries of observing the devices while grants change.
constexpr int kDeviceLooks = 4;

constexpr std::uint64_t quotient_up(std::uint64_t value, std::uint64_t by) {
  return value / by + (value % by > 0 ? 1 : 0);
}

/// value * part / whole without overflow. Pre: part <= whole.
constexpr std::uint64_t scaled(std::uint64_t value, std::uint64_t part, std::uint64_t whole) {
  return part == whole ? value : value / whole * part + value % whole * part / whole;
}

}  // namespace

Result<std::shared_ptr<DeviceSet>> DeviceSet::create(std::vector<Placement> placements,
                                                     std::uint64_t copy_bytes) {
  const auto refused = [](const std::string& why) { return Error{Errc::kInvalidArgument, why}; };
  if (placements.empty()) return refused("an instance's pages must lie on one device at least");
  if (copy_bytes == 0) return refused("a copy of a page has 0 bytes, must have more");
  std::sort(placements.begin(), placements.end(), [](const Placement& a, const Placement& b) {
    return a.member->device() < b.member->device();
  });
  std::set<std::uint32_t> ranks;
  std::string_view before;
  std::uint64_t copies = 0;
  for (const Placement& placement : placements) {
    const std::string device(placement.member->device());
    if (placement.ranks.empty()) return refused("no rank has its pages on " + device);
    if (copies > 0 && device == before) return refused(device + " is named twice");
    for (const std::uint32_t rank : placement.ranks) {
      if (!ranks.insert(rank).second) {
        return refused("rank " + std::to_string(rank) + " is named twice");
      }
    }
    before = placement.member->device();
    copies += placement.ranks.size();
  }
  return std::shared_ptr<DeviceSet>(new DeviceSet(std::move(placements), copies, copy_bytes));
}

DeviceSet::DeviceSet(std::vector<Placement> placements, std::uint64_t copies,
                     std::uint64_t copy_bytes)
    : placements_(std::move(placements)),
      only_(placements_.size() == 1 ? placements_.front().member.get() : nullptr),
      copies_(copies),
      copy_bytes_(copy_bytes) {
  for (const Placement& placement : placements_) min_bytes_ += placement.member->min_bytes();
}

/// Whole pages of all copies in a guarantee; at least one, as for a limit.
std::uint64_t DeviceSet::pages_of(std::uint64_t min_bytes) const {
  return min_bytes == 0 ? 0 : std::max<std::uint64_t>(min_bytes / page_bytes(), 1);
}

/// With several devices, the message names the device.
Error DeviceSet::named(const Placement& placement, Error error) const {
  if (placements_.size() == 1) return error;
  return {error.code, std::string(placement.member->device()) + ": " + error.message};
}

// ----------------------------------------------------------------------------------------- pages

std::uint64_t DeviceSet::grant(std::uint64_t pages) {
  // Grants that are returned wake other instances, which would retry in the same way. So a full
  // device is detected before any grant is taken.
  if (placements_.size() > 1) pages = std::min(pages, room());
  for (std::size_t i = 0; i < placements_.size() && pages > 0; ++i) {
    const std::uint64_t granted = placements_[i].member->grant(pages, cost_bytes(placements_[i]));
    for (std::size_t earlier = i; earlier-- > 0 && granted < pages;) {
      placements_[earlier].member->give_back(pages - granted, cost_bytes(placements_[earlier]));
    }
    pages = granted;
  }
  return pages;
}

void DeviceSet::arrived(std::uint64_t pages) {
  for (const Placement& placement : placements_)
    placement.member->arrived(pages, cost_bytes(placement));
}

void DeviceSet::leaving(std::uint64_t pages) {
  for (const Placement& placement : placements_)
    placement.member->leaving(pages, cost_bytes(placement));
}

void DeviceSet::give_back(std::uint64_t pages) {
  for (const Placement& placement : placements_)
    placement.member->give_back(pages, cost_bytes(placement));
}

std::uint64_t DeviceSet::room() const {
  std::uint64_t pages = ~std::uint64_t{0};
  for (const Placement& placement : placements_) {
    pages = std::min(pages, placement.member->room(cost_bytes(placement)));
    if (pages == 0) break;
  }
  return pages;
}

std::uint64_t DeviceSet::reach() const {
  std::uint64_t pages = ~std::uint64_t{0};
  for (const Placement& placement : placements_) {
    pages = std::min(pages, placement.member->reach(cost_bytes(placement)));
  }
  return pages;
}

std::uint64_t DeviceSet::granted_bytes() const {
  std::uint64_t bytes = 0;
  for (const Placement& placement : placements_) bytes += placement.member->granted_bytes();
  return bytes;
}

std::uint64_t DeviceSet::capacity_of_several() const {
  std::uint64_t least = ~std::uint64_t{0};
  for (const Placement& placement : placements_) {
    const std::uint64_t here = placement.member->capacity_bytes();
    const std::uint64_t ranks = placement.ranks.size();
    least = std::min(
        least, ranks == copies_ ? here : here / ranks * copies_ + here % ranks * copies_ / ranks);
  }
  return least;
}

Sight DeviceSet::see_devices(
    const std::function<std::vector<std::optional<DeviceMemory>>()>& look) {
  Sight sight = Sight::kNone;
  for (int looks = 0; looks < kDeviceLooks; ++looks) {
    std::vector<LedgerMember::Moment> before;
    for (const Placement& placement : placements_) before.push_back(placement.member->moment());
    const std::vector<std::optional<DeviceMemory>> by_rank = look();
    sight = Sight::kNone;
    for (std::size_t i = 0; i < placements_.size(); ++i) {
      std::optional<DeviceMemory> least;
      for (const std::uint32_t rank : placements_[i].ranks) {
        if (rank >= by_rank.size() || !by_rank[rank]) continue;
        if (!least || by_rank[rank]->free_bytes < least->free_bytes) least = by_rank[rank];
      }
      if (!least) continue;
      const Sight here =
          placements_[i].member->see_device(before[i], least->total_bytes, least->free_bytes);
      sight = sight == Sight::kNone ? here : std::min(sight, here);
    }
    if (sight != Sight::kChanged) break;
  }
  return sight;
}

// --------------------------------------------------------------------- guarantee, priority, limit

Status DeviceSet::set_min(std::uint64_t min_bytes) {
  if (Status own = refuse_in_a_child(); !own) return own;
  const std::lock_guard lock(mutex_);
  std::vector<std::uint64_t> before;
  for (const Placement& placement : placements_) before.push_back(placement.member->min_bytes());
  for (std::size_t i = 0; i < placements_.size(); ++i) {
    Status set = placements_[i].member->set_min(pages_of(min_bytes) * cost_bytes(placements_[i]));
    if (set) continue;
    // A part is refused only if it grows, so these are decreases and cannot be refused.
    for (std::size_t done = 0; done < i; ++done) {
      (void)placements_[done].member->set_min(before[done]);
    }
    return named(placements_[i], set.error());
  }
  min_bytes_ = min_bytes;
  return ok();
}

Status DeviceSet::set_priority(std::int64_t priority) {
  for (const Placement& placement : placements_) {
    if (Status set = placement.member->set_priority(priority); !set) return set;
  }
  return ok();
}

void DeviceSet::set_limit(std::uint64_t bytes) {
  for (const Placement& placement : placements_) {
    placement.member->set_limit(scaled(bytes, placement.ranks.size(), copies_));
  }
}

// -------------------------------------------------------------------------------- reserve, sleep

struct DeviceSet::Claim {
  enum class Fate : std::uint8_t { kOpen, kMet, kGivenUp };

  bool is_wake = false;
  std::vector<std::uint64_t> before{}, after{};  // reserves by placement, unless it is a wake
  Fate fate = Fate::kOpen;                       // guarded by mutex_
};

/// Restores the first `count` placements to their state before the claim. Pre: mutex_ is held.
void DeviceSet::undo(const Claim& claim, std::size_t count) {
  while (count-- > 0) {
    LedgerMember& member = *placements_[count].member;
    member.give_up_claim();
    if (claim.is_wake) {
      if (!member.is_asleep()) member.fall_asleep();
    } else if (claim.after[count] > claim.before[count]) {
      (void)member.claim_reserve(claim.before[count]);  // a decrease cannot be refused
    }
  }
}

/// Opens a claim that all members have made, and finishes it if no member waits for memory. Pre:
/// mutex_ is held, and no claim is open.
DeviceSet::Claimed DeviceSet::begin(Claim claim) {
  claim_ = std::make_shared<Claim>(std::move(claim));
  Claimed claimed = claim_;
  const bool waits =
      std::any_of(placements_.begin(), placements_.end(),
                  [](const Placement& placement) { return placement.member->is_claiming(); });
  if (!waits) finish_claim();
  return claimed;
}

/// No effect without an open claim. Pre: mutex_ is held.
void DeviceSet::give_up_claim() {
  const std::shared_ptr<Claim> claim = std::exchange(claim_, nullptr);
  if (!claim) return;
  undo(*claim, placements_.size());
  claim->fate = Claim::Fate::kGivenUp;
}

/// All claimed memory is available. Pre: mutex_ is held, and a claim is open.
void DeviceSet::finish_claim() {
  const std::shared_ptr<Claim> claim = std::exchange(claim_, nullptr);
  for (std::size_t i = 0; i < claim->after.size(); ++i) {
    if (claim->after[i] < claim->before[i]) {
      (void)placements_[i].member->claim_reserve(claim->after[i]);
    }
  }
  claim->fate = Claim::Fate::kMet;
}

void DeviceSet::fall_asleep() {
  if (!refuse_in_a_child()) return;
  const std::lock_guard lock(mutex_);
  give_up_claim();
  for (const Placement& placement : placements_) placement.member->fall_asleep();
}

bool DeviceSet::is_asleep() const {
  return std::any_of(placements_.begin(), placements_.end(),
                     [](const Placement& placement) { return placement.member->is_asleep(); });
}

Result<DeviceSet::Claimed> DeviceSet::claim_wake() {
  if (Status own = refuse_in_a_child(); !own) return own.error();
  const std::lock_guard lock(mutex_);
  if (!is_asleep()) return Claimed(kNothingClaimed);
  if (claim_) return Claimed(claim_);  // a wake: a sleeping instance's reserve never waits
  Claim claim;
  claim.is_wake = true;
  for (std::size_t i = 0; i < placements_.size(); ++i) {
    Status claimed = placements_[i].member->claim_wake();
    if (claimed) continue;
    undo(claim, i);
    return named(placements_[i], claimed.error());
  }
  return begin(std::move(claim));
}

Result<DeviceSet::Claimed> DeviceSet::claim_reserve(std::vector<std::uint64_t> bytes) {
  if (Status own = refuse_in_a_child(); !own) return own.error();
  if (bytes.size() != placements_.size()) {
    return Error{Errc::kInvalidArgument, "reserves for " + std::to_string(bytes.size()) +
                                             " devices were given; the instance has pages on " +
                                             std::to_string(placements_.size())};
  }
  const std::lock_guard lock(mutex_);
  give_up_claim();
  Claim claim;
  for (const Placement& placement : placements_)
    claim.before.push_back(placement.member->reserve_bytes());
  claim.after = std::move(bytes);
  for (std::size_t i = 0; i < placements_.size(); ++i) {
    if (claim.after[i] <= claim.before[i]) continue;
    Status claimed = placements_[i].member->claim_reserve(claim.after[i]);
    if (claimed) continue;
    undo(claim, i);
    return named(placements_[i], claimed.error());
  }
  return begin(std::move(claim));
}

bool DeviceSet::claim_is_met() {
  if (!refuse_in_a_child()) return true;
  const std::lock_guard lock(mutex_);
  if (!claim_) return true;
  bool met = true;
  for (const Placement& placement : placements_) met = placement.member->claim_is_met() && met;
  if (met) finish_claim();
  return met;
}

Status DeviceSet::fail_claim() {
  if (Status own = refuse_in_a_child(); !own) return own;
  const std::lock_guard lock(mutex_);
  return claim_ ? fail_open_claim() : ok();
}

/// Pre: mutex_ is held, and a claim is open.
Status DeviceSet::fail_open_claim() {
  for (const Placement& placement : placements_) {
    Status failed = placement.member->fail_claim();
    if (failed) continue;
    give_up_claim();
    return named(placement, failed.error());
  }
  finish_claim();  // the memory became available at this moment
  return ok();
}

Status DeviceSet::wait_for_claim(Claimed claimed, std::chrono::nanoseconds timeout) {
  if (Status own = refuse_in_a_child(); !own) return own;
  if (claimed == kNothingClaimed) return ok();
  // Bounds the timeout so that the clock does not overflow.
  const auto until = std::chrono::steady_clock::now() +
                     std::min<std::chrono::nanoseconds>(timeout, std::chrono::hours(24));
  const std::chrono::nanoseconds patience(rules().patience_ns);
  for (;;) {
    const Bells seen = bells();
    (void)claim_is_met();
    const auto now = std::chrono::steady_clock::now();
    {
      const std::lock_guard lock(mutex_);
      if (claimed->fate == Claim::Fate::kOpen && now >= until) {
        if (Status failed = fail_open_claim(); !failed) return failed;
      }
      if (claimed->fate == Claim::Fate::kMet) return ok();
      if (claimed->fate == Claim::Fate::kGivenUp) {
        return Error{Errc::kReserve,
                     "the claim of a reserve was withdrawn: the instance was put to sleep, "
                     "or requested another reserve"};
      }
    }
    const std::chrono::nanoseconds left = std::min<std::chrono::nanoseconds>(until - now, patience);
    for (std::size_t i = 0; i < placements_.size(); ++i) {
      if (!placements_[i].member->is_claiming()) continue;
      placements_[i].member->wait(seen[i], left);
      break;
    }
  }
}

// ------------------------------------------------------------------------------- memory requests

bool DeviceSet::request_memory(std::uint64_t pages) {
  const std::uint64_t now_ns = monotonic_ns();
  // One waiting time in all ledgers, so that two waiting instances have the same order in each.
  if (now_ns - request_seen_ns_.exchange(now_ns) >= rules().request_expiry_ns ||
      request_since_ns_ == 0) {
    request_since_ns_ = now_ns;
  }
  bool hope = true, keeps = true;
  for (const Placement& placement : placements_) {
    const std::uint64_t here =
        placements_.size() > 1 ? placement.member->room(cost_bytes(placement)) : std::uint64_t{0};
    if (here < pages || placement.member->has_memory_request()) {
      hope = placement.member->request_memory_with({request_since_ns_, keeps},
                                                   pages * cost_bytes(placement)) &&
             hope;
    }
    keeps = keeps && here > 0;
  }
  return hope;
}

bool DeviceSet::is_memory_coming(std::chrono::nanoseconds patience) const {
  return std::all_of(placements_.begin(), placements_.end(), [&](const Placement& placement) {
    return placement.member->room(cost_bytes(placement)) > 0 ||
           placement.member->is_memory_coming(patience);
  });
}

void DeviceSet::end_memory_request() {
  request_since_ns_ = 0;
  for (const Placement& placement : placements_) placement.member->end_memory_request();
}

bool DeviceSet::request_excess() {
  bool over = false;
  for (const Placement& placement : placements_) over = placement.member->request_excess() || over;
  return over;
}

DeviceSet::Bells DeviceSet::bells() const {
  Bells seen;
  seen.reserve(placements_.size());
  for (const Placement& placement : placements_) seen.push_back(placement.member->bell());
  return seen;
}

void DeviceSet::wait(const Bells& seen, std::chrono::nanoseconds timeout) const {
  std::size_t lacking = 0;
  while (lacking + 1 < placements_.size() &&
         placements_[lacking].member->room(cost_bytes(placements_[lacking])) > 0) {
    ++lacking;
  }
  placements_[lacking].member->wait(seen[lacking], timeout);
}

// ------------------------------------------------------------------------------ reclaim requests

DeviceSet::OpenReclaim DeviceSet::open_reclaim() const {
  OpenReclaim open;
  for (std::size_t i = 0; i < placements_.size(); ++i) {
    const LedgerMember::OpenReclaim here = placements_[i].member->open_reclaim();
    if (here.bytes == 0 || (open.pages > 0 && here.depth > open.depth)) continue;
    if (open.pages == 0 || here.depth < open.depth) {
      open = {0, here.depth, std::vector<std::uint64_t>(placements_.size(), 0)};
    }
    open.bytes[i] = here.bytes;
    open.pages = std::max(open.pages, quotient_up(here.bytes, cost_bytes(placements_[i])));
  }
  return open;
}

void DeviceSet::handled(const OpenReclaim& open, std::uint64_t given) {
  for (std::size_t i = 0; i < placements_.size(); ++i) {
    // Pages released for another device count here as a request of a greater depth.
    placements_[i].member->handled(open.bytes[i] > 0 ? open.bytes[i]
                                                     : given * cost_bytes(placements_[i]));
  }
}

// ----------------------------------------------------------------------------------------- facts

void DeviceSet::publish_parts(std::uint64_t in_use_bytes, std::uint64_t evictable_bytes,
                              std::uint64_t parked_bytes, bool active) {
  for (const Placement& placement : placements_) {
    const auto here = [&](std::uint64_t bytes) {
      return scaled(bytes, placement.ranks.size(), copies_);
    };
    placement.member->publish(here(in_use_bytes), here(evictable_bytes), here(parked_bytes),
                              cost_bytes(placement), active);
  }
}

void DeviceSet::report_busy(bool busy) {
  for (const Placement& placement : placements_) placement.member->report_busy(busy);
}

Status DeviceSet::add_worker(std::uint32_t rank, std::uint32_t pid, std::uint64_t start_ticks) {
  for (const Placement& placement : placements_) {
    if (std::find(placement.ranks.begin(), placement.ranks.end(), rank) == placement.ranks.end())
      continue;
    return placement.member->add_worker(pid, start_ticks);
  }
  return Error{Errc::kInvalidArgument, "no pages of rank " + std::to_string(rank) + " are here"};
}

Status DeviceSet::check_integrity(std::uint64_t pages) const {
  for (const Placement& placement : placements_) {
    if (Status sound = placement.member->check_integrity(pages, cost_bytes(placement)); !sound) {
      return named(placement, sound.error());
    }
  }
  return ok();
}

}  // namespace kvelastic
