#include "ledger/reclaim.h"

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <optional>
#include <tuple>

#include "ledger/device_account.h"

namespace kvelastic {
namespace {

bool is_below_guarantee(const Contender& c) {
  return c.granted_bytes < c.min_bytes;
}

std::uint64_t bytes_at(const Contender& c, Depth step) {
  switch (step) {
    case Depth::kParked:
      return c.parked_bytes;
    case Depth::kCached:
      return c.cached_bytes;
    case Depth::kInUse:
      return saturating_sub(c.granted_bytes, c.parked_bytes + c.cached_bytes);
  }
  return 0;
}

constexpr std::uint64_t kNoBound = ~std::uint64_t{0};

/// How deep the requester may reclaim the victim's memory, how much the victim keeps, and how much
/// the requester may hold as a result.
struct Right {
  Depth depth;
  std::uint64_t kept_bytes;
  std::uint64_t holds_bytes = kNoBound;
};

/// By priority and idleness, and by fairness among equal priorities.
std::optional<Right> right_over(const Contender& victim, const Contender& requester,
                                std::uint64_t fair_bytes, const ReclaimRules& rules) {
  if (victim.priority < requester.priority) return Right{Depth::kInUse, victim.min_bytes};
  if (!is_busy(victim, rules)) return Right{Depth::kCached, victim.min_bytes};
  // Only equals share: a higher priority keeps the memory it works with.
  const bool waited = requester.request_ns >= rules.fair_cached_ns;
  if (victim.priority > requester.priority || !waited) return std::nullopt;
  const Depth depth = requester.request_ns >= rules.fair_in_use_ns ? Depth::kInUse : Depth::kCached;
  // Whole pages only: a page released for a fraction would be requested back for the rest.
  const std::uint64_t page_bytes = std::max<std::uint64_t>(victim.page_bytes, 1);
  const std::uint64_t kept_bytes = std::max(victim.min_bytes, fair_bytes);
  const std::uint64_t spare_bytes = saturating_sub(victim.granted_bytes, kept_bytes);
  return Right{depth, kept_bytes + spare_bytes % page_bytes, fair_bytes};
}

/// The missing part of its fair share, rounded down to whole pages.
std::uint64_t lacks_of(const Contender& c, std::uint64_t fair_bytes) {
  const std::uint64_t lacking = saturating_sub(fair_bytes, c.granted_bytes);
  return lacking - lacking % std::max<std::uint64_t>(c.page_bytes, 1);
}

/// Parked pages hold nothing, so an equal gets them at once until it has its share, in whole pages.
/// Beyond that two busy equals would pass pages back and forth.
std::optional<Right> right_to_parked(const Contender& victim, const Contender& requester,
                                     std::uint64_t fair_bytes) {
  if (victim.priority > requester.priority) return std::nullopt;
  const std::uint64_t share_bytes = requester.granted_bytes + lacks_of(requester, fair_bytes);
  return Right{Depth::kParked, victim.min_bytes, share_bytes};
}

/// By the requester's guarantee: from all members, until it has its guarantee.
std::optional<Right> right_of_guarantee(const Contender& victim, const Contender& requester) {
  if (!is_below_guarantee(requester)) return std::nullopt;
  return Right{Depth::kInUse, victim.min_bytes, requester.min_bytes};
}

/// True if an earlier reclaim request is still open: the member is stopped or busy.
bool is_slow(const Contender& c, const ReclaimRules& rules) {
  return c.reclaim_bytes > 0 && c.reclaim_ns >= rules.patience_ns;
}

}  // namespace

bool is_busy(const Contender& c, const ReclaimRules& rules) {
  if (c.request_bytes > 0) return true;
  return c.reported == Reported::kNothing ? c.idle_ns < rules.idle_ns
                                          : c.reported == Reported::kBusy;
}

std::uint64_t fair_share_bytes(std::span<const Contender> all, std::uint64_t capacity_bytes,
                               const ReclaimRules& rules) {
  const auto busy =
      std::count_if(all.begin(), all.end(), [&](const Contender& c) { return is_busy(c, rules); });
  return capacity_bytes / static_cast<std::uint64_t>(std::max<std::ptrdiff_t>(busy, 1));
}

bool outranks(const Contender& a, const Contender& b, std::uint64_t fair_bytes) {
  const auto rank = [&](const Contender& c) {
    const std::uint64_t waited = c.request_bytes > 0 ? c.request_ns + 1 : 0;
    return std::tuple(is_below_guarantee(c), c.priority, lacks_of(c, fair_bytes) > 0, waited);
  };
  return rank(a) > rank(b);
}

std::uint64_t kept_bytes(std::span<const Contender> all, std::size_t self,
                         std::uint64_t capacity_bytes, const ReclaimRules& rules) {
  const std::uint64_t fair_bytes = fair_share_bytes(all, capacity_bytes, rules);
  const Contender& b = all[self];
  std::uint64_t bytes = 0;
  for (const Contender& a : all) {
    if (&a == &b || a.request_bytes == 0 || !a.keeps || !outranks(a, b, fair_bytes)) continue;
    Contender plain = a;
    plain.min_bytes = 0;
    if (outranks(plain, b, 0)) {
      bytes += a.request_bytes;
      continue;
    }
    const std::uint64_t of_share = outranks(plain, b, fair_bytes) ? lacks_of(a, fair_bytes) : 0;
    bytes +=
        std::min(a.request_bytes, std::max(saturating_sub(a.min_bytes, a.granted_bytes), of_share));
  }
  return bytes;
}

std::vector<ReclaimRequest> plan_reclaim(std::span<const Contender> all,
                                         std::size_t requester_index, std::uint64_t free_bytes,
                                         std::uint64_t capacity_bytes, const ReclaimRules& rules) {
  const Contender& requester = all[requester_index];
  std::uint64_t missing = saturating_sub(requester.request_bytes, free_bytes);
  for (const Contender& other : all) {
    if (&other == &requester || is_slow(other, rules)) continue;
    missing = saturating_sub(missing, other.reclaim_bytes);
  }
  if (missing == 0) return {};

  std::vector<std::size_t> order(all.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return std::tuple(all[a].priority, ~all[a].idle_ns) <
           std::tuple(all[b].priority, ~all[b].idle_ns);
  });

  const std::uint64_t fair_bytes = fair_share_bytes(all, capacity_bytes, rules);
  std::vector<ReclaimRequest> plan;
  std::vector<std::uint64_t> taken(all.size(), 0);
  for (const Depth step : {Depth::kParked, Depth::kCached, Depth::kInUse}) {
    for (const std::size_t i : order) {
      const Contender& victim = all[i];
      if (i == requester_index || missing == 0 || is_slow(victim, rules)) continue;
      // Memory that was already requested from it counts as released.
      const std::uint64_t left =
          saturating_sub(victim.granted_bytes, victim.reclaim_bytes + taken[i]);
      const std::uint64_t will_hold = requester.granted_bytes + requester.request_bytes - missing;
      std::uint64_t bytes = 0;
      for (const auto& right :
           {right_over(victim, requester, fair_bytes, rules), right_of_guarantee(victim, requester),
            right_to_parked(victim, requester, fair_bytes)}) {
        if (!right || right->depth < step) continue;
        bytes = std::max(bytes, std::min(saturating_sub(left, right->kept_bytes),
                                         saturating_sub(right->holds_bytes, will_hold)));
      }
      bytes = std::min({bytes, missing, bytes_at(victim, step)});
      if (bytes == 0) continue;
      missing -= bytes;
      taken[i] += bytes;
      const auto known = std::find_if(plan.begin(), plan.end(), [&](const ReclaimRequest& request) {
        return request.contender == i;
      });
      if (known == plan.end()) {
        plan.push_back({i, bytes, step});
      } else {
        known->bytes += bytes;
        known->depth = step;
      }
    }
  }
  return plan;
}

std::vector<ReclaimRequest> plan_excess(std::span<const Contender> all, std::uint64_t excess_bytes,
                                        std::uint64_t capacity_bytes, const ReclaimRules& rules) {
  std::vector<Contender> with_requester(all.begin(), all.end());
  for (Contender& c : with_requester) {
    // A guaranteed fraction of a page keeps the whole page.
    const std::uint64_t page_bytes = std::max<std::uint64_t>(c.page_bytes, 1);
    const std::uint64_t pages = c.min_bytes / page_bytes + (c.min_bytes % page_bytes > 0 ? 1 : 0);
    c.min_bytes = std::max<std::uint64_t>(pages, 1) * page_bytes;
  }
  Contender requester;
  requester.priority = std::numeric_limits<std::int64_t>::max();
  requester.request_bytes = excess_bytes;
  with_requester.push_back(requester);
  return plan_reclaim(with_requester, all.size(), 0, capacity_bytes, rules);
}

bool is_memory_coming(std::span<const Contender> all, std::size_t self, std::uint64_t patience_ns) {
  return std::any_of(all.begin(), all.end(), [&](const Contender& c) {
    return &c != &all[self] && c.reclaim_bytes > 0 && c.reclaim_ns < patience_ns;
  });
}

std::uint64_t reachable_bytes(std::span<const Contender> all, std::size_t requester,
                              std::uint64_t capacity_bytes, const ReclaimRules& rules) {
  const std::uint64_t fair_bytes = fair_share_bytes(all, capacity_bytes, rules);
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (i == requester) continue;
    std::uint64_t within = 0;
    for (const auto& right : {right_over(all[i], all[requester], fair_bytes, rules),
                              right_of_guarantee(all[i], all[requester]),
                              right_to_parked(all[i], all[requester], fair_bytes)}) {
      if (!right) continue;
      const std::uint64_t cached_bytes = right->depth == Depth::kParked ? 0 : all[i].cached_bytes;
      within = std::max(within,
                        std::min({saturating_sub(all[i].granted_bytes, right->kept_bytes),
                                  saturating_sub(right->holds_bytes, all[requester].granted_bytes),
                                  all[i].parked_bytes + cached_bytes}));
    }
    bytes += within;
  }
  return bytes;
}

}  // namespace kvelastic
