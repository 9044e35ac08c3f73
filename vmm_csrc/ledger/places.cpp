#include "ledger/places.h"

#include <algorithm>
#include <set>
#include <utility>

#include "segment/record.h"

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

Result<std::shared_ptr<Places>> Places::create(std::vector<Place> places,
                                               std::uint64_t copy_bytes) {
  const auto refused = [](const std::string& why) { return Error{Errc::kInvalidArgument, why}; };
  if (places.empty()) return refused("an instance's pages must lie on one device at least");
  if (copy_bytes == 0) return refused("a copy of a page has 0 bytes, must have more");
  std::sort(places.begin(), places.end(),
            [](const Place& a, const Place& b) { return a.member->device() < b.member->device(); });
  std::set<std::uint32_t> ranks;
  std::string_view before;
  std::uint64_t copies = 0;
  for (const Place& place : places) {
    const std::string device(place.member->device());
    if (place.ranks.empty()) return refused("no rank has its pages on " + device);
    if (copies > 0 && device == before) return refused(device + " is named twice");
    for (const std::uint32_t rank : place.ranks) {
      if (!ranks.insert(rank).second) {
        return refused("rank " + std::to_string(rank) + " is named twice");
      }
    }
    before = place.member->device();
    copies += place.ranks.size();
  }
  return std::shared_ptr<Places>(new Places(std::move(places), copies, copy_bytes));
}

Places::Places(std::vector<Place> places, std::uint64_t copies, std::uint64_t copy_bytes)
    : places_(std::move(places)),
      only_(places_.size() == 1 ? places_.front().member.get() : nullptr),
      copies_(copies),
      copy_bytes_(copy_bytes) {
  for (const Place& place : places_) min_bytes_ += place.member->min_bytes();
}

/// Whole pages of all copies in a guarantee; at least one, as for a limit.
std::uint64_t Places::pages_of(std::uint64_t min_bytes) const {
  return min_bytes == 0 ? 0 : std::max<std::uint64_t>(min_bytes / page_bytes(), 1);
}

/// With several devices, the message names the device.
Error Places::named(const Place& place, Error error) const {
  if (places_.size() == 1) return error;
  return {error.code, std::string(place.member->device()) + ": " + error.message};
}

// ----------------------------------------------------------------------------------------- pages

std::uint64_t Places::grant(std::uint64_t pages) {
  // Grants that are returned wake other instances, which would retry in the same way. So a full
  // device is detected before any grant is taken.
  if (places_.size() > 1) pages = std::min(pages, room());
  for (std::size_t i = 0; i < places_.size() && pages > 0; ++i) {
    const std::uint64_t granted = places_[i].member->grant(pages, cost_bytes(places_[i]));
    for (std::size_t earlier = i; earlier-- > 0 && granted < pages;) {
      places_[earlier].member->give_back(pages - granted, cost_bytes(places_[earlier]));
    }
    pages = granted;
  }
  return pages;
}

void Places::arrived(std::uint64_t pages) {
  for (const Place& place : places_) place.member->arrived(pages, cost_bytes(place));
}

void Places::leaving(std::uint64_t pages) {
  for (const Place& place : places_) place.member->leaving(pages, cost_bytes(place));
}

void Places::give_back(std::uint64_t pages) {
  for (const Place& place : places_) place.member->give_back(pages, cost_bytes(place));
}

std::uint64_t Places::room() const {
  std::uint64_t pages = ~std::uint64_t{0};
  for (const Place& place : places_) {
    pages = std::min(pages, place.member->room(cost_bytes(place)));
    if (pages == 0) break;
  }
  return pages;
}

std::uint64_t Places::reach() const {
  std::uint64_t pages = ~std::uint64_t{0};
  for (const Place& place : places_) {
    pages = std::min(pages, place.member->reach(cost_bytes(place)));
  }
  return pages;
}

std::uint64_t Places::granted_bytes() const {
  std::uint64_t bytes = 0;
  for (const Place& place : places_) bytes += place.member->granted_bytes();
  return bytes;
}

std::uint64_t Places::capacity_of_several() const {
  std::uint64_t least = ~std::uint64_t{0};
  for (const Place& place : places_) {
    const std::uint64_t here = place.member->capacity_bytes();
    const std::uint64_t ranks = place.ranks.size();
    least = std::min(
        least, ranks == copies_ ? here : here / ranks * copies_ + here % ranks * copies_ / ranks);
  }
  return least;
}

Sight Places::see_devices(const std::function<std::vector<std::optional<DeviceMemory>>()>& look) {
  Sight sight = Sight::kNone;
  for (int looks = 0; looks < kDeviceLooks; ++looks) {
    std::vector<LedgerMember::Moment> before;
    for (const Place& place : places_) before.push_back(place.member->moment());
    const std::vector<std::optional<DeviceMemory>> by_rank = look();
    sight = Sight::kNone;
    for (std::size_t i = 0; i < places_.size(); ++i) {
      std::optional<DeviceMemory> least;
      for (const std::uint32_t rank : places_[i].ranks) {
        if (rank >= by_rank.size() || !by_rank[rank]) continue;
        if (!least || by_rank[rank]->free_bytes < least->free_bytes) least = by_rank[rank];
      }
      if (!least) continue;
      const Sight here =
          places_[i].member->see_device(before[i], least->total_bytes, least->free_bytes);
      sight = sight == Sight::kNone ? here : std::min(sight, here);
    }
    if (sight != Sight::kChanged) break;
  }
  return sight;
}

// --------------------------------------------------------------------- guarantee, priority, limit

Status Places::set_min(std::uint64_t min_bytes) {
  if (Status own = refuse_in_a_child(); !own) return own;
  const std::lock_guard lock(mutex_);
  std::vector<std::uint64_t> before;
  for (const Place& place : places_) before.push_back(place.member->min_bytes());
  for (std::size_t i = 0; i < places_.size(); ++i) {
    Status set = places_[i].member->set_min(pages_of(min_bytes) * cost_bytes(places_[i]));
    if (set) continue;
    // A part is refused only if it grows, so these are decreases and cannot be refused.
    while (i-- > 0) (void)places_[i].member->set_min(before[i]);
    return named(places_[before.size() - 1], set.error());
  }
  min_bytes_ = min_bytes;
  return ok();
}

Status Places::set_priority(std::int64_t priority) {
  for (const Place& place : places_) {
    if (Status set = place.member->set_priority(priority); !set) return set;
  }
  return ok();
}

void Places::set_limit(std::uint64_t bytes) {
  for (const Place& place : places_) {
    place.member->set_limit(scaled(bytes, place.ranks.size(), copies_));
  }
}

// -------------------------------------------------------------------------------- reserve, sleep

struct Places::Claim {
  enum class Fate : std::uint8_t { kOpen, kMet, kGivenUp };

  bool is_wake = false;
  std::vector<std::uint64_t> before{}, after{};  // reserves by placement, unless it is a wake
  Fate fate = Fate::kOpen;                       // guarded by mutex_
};

/// Restores the first `count` placements to their state before the claim. Pre: mutex_ is held.
void Places::undo(const Claim& claim, std::size_t count) {
  while (count-- > 0) {
    LedgerMember& member = *places_[count].member;
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
Places::Claimed Places::begin(Claim claim) {
  claim_ = std::make_shared<Claim>(std::move(claim));
  Claimed claimed = claim_;
  const bool waits = std::any_of(places_.begin(), places_.end(),
                                 [](const Place& place) { return place.member->is_claiming(); });
  if (!waits) finish_claim();
  return claimed;
}

/// No effect without an open claim. Pre: mutex_ is held.
void Places::give_up_claim() {
  const std::shared_ptr<Claim> claim = std::exchange(claim_, nullptr);
  if (!claim) return;
  undo(*claim, places_.size());
  claim->fate = Claim::Fate::kGivenUp;
}

/// All claimed memory is available. Pre: mutex_ is held, and a claim is open.
void Places::finish_claim() {
  const std::shared_ptr<Claim> claim = std::exchange(claim_, nullptr);
  for (std::size_t i = 0; i < claim->after.size(); ++i) {
    if (claim->after[i] < claim->before[i]) {
      (void)places_[i].member->claim_reserve(claim->after[i]);
    }
  }
  claim->fate = Claim::Fate::kMet;
}

void Places::fall_asleep() {
  if (!refuse_in_a_child()) return;
  const std::lock_guard lock(mutex_);
  give_up_claim();
  for (const Place& place : places_) place.member->fall_asleep();
}

bool Places::is_asleep() const {
  return std::any_of(places_.begin(), places_.end(),
                     [](const Place& place) { return place.member->is_asleep(); });
}

Result<Places::Claimed> Places::claim_wake() {
  if (Status own = refuse_in_a_child(); !own) return own.error();
  const std::lock_guard lock(mutex_);
  if (!is_asleep()) return Claimed(kNothingClaimed);
  if (claim_) return Claimed(claim_);  // a wake: a sleeping instance's reserve never waits
  Claim claim;
  claim.is_wake = true;
  for (std::size_t i = 0; i < places_.size(); ++i) {
    Status claimed = places_[i].member->claim_wake();
    if (claimed) continue;
    undo(claim, i);
    return named(places_[i], claimed.error());
  }
  return begin(std::move(claim));
}

Result<Places::Claimed> Places::claim_reserve(std::vector<std::uint64_t> bytes) {
  if (Status own = refuse_in_a_child(); !own) return own.error();
  if (bytes.size() != places_.size()) {
    return Error{Errc::kInvalidArgument, "reserves for " + std::to_string(bytes.size()) +
                                             " devices were given; the instance has pages on " +
                                             std::to_string(places_.size())};
  }
  const std::lock_guard lock(mutex_);
  give_up_claim();
  Claim claim;
  for (const Place& place : places_) claim.before.push_back(place.member->reserve_bytes());
  claim.after = std::move(bytes);
  for (std::size_t i = 0; i < places_.size(); ++i) {
    if (claim.after[i] <= claim.before[i]) continue;
    Status claimed = places_[i].member->claim_reserve(claim.after[i]);
    if (claimed) continue;
    undo(claim, i);
    return named(places_[i], claimed.error());
  }
  return begin(std::move(claim));
}

bool Places::claim_is_met() {
  if (!refuse_in_a_child()) return true;
  const std::lock_guard lock(mutex_);
  if (!claim_) return true;
  bool met = true;
  for (const Place& place : places_) met = place.member->claim_is_met() && met;
  if (met) finish_claim();
  return met;
}

Status Places::fail_claim() {
  if (Status own = refuse_in_a_child(); !own) return own;
  const std::lock_guard lock(mutex_);
  return claim_ ? fail_open_claim() : ok();
}

/// Pre: mutex_ is held, and a claim is open.
Status Places::fail_open_claim() {
  for (const Place& place : places_) {
    Status failed = place.member->fail_claim();
    if (failed) continue;
    give_up_claim();
    return named(place, failed.error());
  }
  finish_claim();  // the memory became available at this moment
  return ok();
}

Status Places::wait_for_claim(Claimed claimed, std::chrono::nanoseconds timeout) {
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
    for (std::size_t i = 0; i < places_.size(); ++i) {
      if (!places_[i].member->is_claiming()) continue;
      places_[i].member->wait(seen[i], left);
      break;
    }
  }
}

// ------------------------------------------------------------------------------- memory requests

bool Places::request_memory(std::uint64_t pages) {
  const std::uint64_t now_ns = monotonic_ns();
  // One waiting time in all ledgers, so that two waiting instances have the same order in each.
  if (now_ns - request_seen_ns_.exchange(now_ns) >= rules().request_expiry_ns ||
      request_since_ns_ == 0) {
    request_since_ns_ = now_ns;
  }
  bool hope = true, keeps = true;
  for (const Place& place : places_) {
    const std::uint64_t here =
        places_.size() > 1 ? place.member->room(cost_bytes(place)) : std::uint64_t{0};
    if (here < pages || place.member->has_memory_request()) {
      hope = place.member->request_memory_with({request_since_ns_, keeps},
                                               pages * cost_bytes(place)) &&
             hope;
    }
    keeps = keeps && here > 0;
  }
  return hope;
}

bool Places::is_memory_coming(std::chrono::nanoseconds patience) const {
  return std::all_of(places_.begin(), places_.end(), [&](const Place& place) {
    return place.member->room(cost_bytes(place)) > 0 || place.member->is_memory_coming(patience);
  });
}

void Places::end_memory_request() {
  request_since_ns_ = 0;
  for (const Place& place : places_) place.member->end_memory_request();
}

bool Places::request_excess() {
  bool over = false;
  for (const Place& place : places_) over = place.member->request_excess() || over;
  return over;
}

Places::Bells Places::bells() const {
  Bells seen;
  seen.reserve(places_.size());
  for (const Place& place : places_) seen.push_back(place.member->bell());
  return seen;
}

void Places::wait(const Bells& seen, std::chrono::nanoseconds timeout) const {
  std::size_t lacking = 0;
  while (lacking + 1 < places_.size() &&
         places_[lacking].member->room(cost_bytes(places_[lacking])) > 0) {
    ++lacking;
  }
  places_[lacking].member->wait(seen[lacking], timeout);
}

// ------------------------------------------------------------------------------ reclaim requests

Places::OpenReclaim Places::open_reclaim() const {
  OpenReclaim open;
  for (std::size_t i = 0; i < places_.size(); ++i) {
    const LedgerMember::OpenReclaim here = places_[i].member->open_reclaim();
    if (here.bytes == 0 || (open.pages > 0 && here.depth > open.depth)) continue;
    if (open.pages == 0 || here.depth < open.depth) {
      open = {0, here.depth, std::vector<std::uint64_t>(places_.size(), 0)};
    }
    open.bytes[i] = here.bytes;
    open.pages = std::max(open.pages, quotient_up(here.bytes, cost_bytes(places_[i])));
  }
  return open;
}

void Places::handled(const OpenReclaim& open, std::uint64_t given) {
  for (std::size_t i = 0; i < places_.size(); ++i) {
    // Pages released for another device count here as a request of a greater depth.
    places_[i].member->handled(open.bytes[i] > 0 ? open.bytes[i] : given * cost_bytes(places_[i]));
  }
}

// ----------------------------------------------------------------------------------------- facts

void Places::publish_parts(std::uint64_t in_use_bytes, std::uint64_t evictable_bytes,
                           std::uint64_t parked_bytes, bool active) {
  for (const Place& place : places_) {
    const auto here = [&](std::uint64_t bytes) {
      return scaled(bytes, place.ranks.size(), copies_);
    };
    place.member->publish(here(in_use_bytes), here(evictable_bytes), here(parked_bytes),
                          cost_bytes(place), active);
  }
}

void Places::report_busy(bool busy) {
  for (const Place& place : places_) place.member->report_busy(busy);
}

Status Places::add_worker(std::uint32_t rank, std::uint32_t pid, std::uint64_t start_ticks) {
  for (const Place& place : places_) {
    if (std::find(place.ranks.begin(), place.ranks.end(), rank) == place.ranks.end()) continue;
    return place.member->add_worker(pid, start_ticks);
  }
  return Error{Errc::kInvalidArgument, "no pages of rank " + std::to_string(rank) + " are here"};
}

Status Places::check_integrity(std::uint64_t pages) const {
  for (const Place& place : places_) {
    if (Status sound = place.member->check_integrity(pages, cost_bytes(place)); !sound) {
      return named(place, sound.error());
    }
  }
  return ok();
}

}  // namespace kvelastic
