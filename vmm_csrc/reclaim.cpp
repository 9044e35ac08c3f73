#include "reclaim.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <tuple>

namespace kvelastic {
namespace {

std::uint64_t above(std::uint64_t value, std::uint64_t floor) {
  return value > floor ? value - floor : 0;
}

bool is_below_guarantee(const Contender& c) {
  return c.granted_bytes < c.min_bytes;
}

bool is_busy(const Contender& c, const ReclaimRules& rules) {
  return c.idle_ns < rules.idle_ns || c.ask_bytes > 0;
}

/// How deep the asker may reach into `victim`'s memory, and how much of it stays out of reach.
struct Right {
  Depth depth;
  std::uint64_t kept_bytes;
  bool any = true;
};

Right right_over(const Contender& victim, const Contender& asker, std::uint64_t fair_bytes,
                 const ReclaimRules& rules) {
  if (is_below_guarantee(asker) || victim.priority < asker.priority) {
    return {Depth::kInUse, victim.min_bytes};
  }
  if (!is_busy(victim, rules)) return {Depth::kCached, victim.min_bytes};
  // Only equals share: who has the higher priority keeps what it works with.
  const bool waited = asker.ask_ns >= rules.fair_cached_ns;
  if (victim.priority > asker.priority || !waited) return {Depth::kParked, 0, false};
  const Depth depth = asker.ask_ns >= rules.fair_in_use_ns ? Depth::kInUse : Depth::kCached;
  return {depth, std::max(victim.min_bytes, fair_bytes)};
}

std::uint64_t bytes_at(const Contender& c, Depth rung) {
  switch (rung) {
    case Depth::kParked:
      return c.parked_bytes;
    case Depth::kCached:
      return c.cached_bytes;
    case Depth::kInUse:
      return above(c.granted_bytes, c.parked_bytes + c.cached_bytes);
  }
  return 0;
}

}  // namespace

bool outranks(const Contender& a, const Contender& b) {
  const auto rank = [](const Contender& c) {
    const std::uint64_t waited = c.ask_bytes > 0 ? c.ask_ns + 1 : 0;
    return std::tuple(is_below_guarantee(c), c.priority, waited);
  };
  return rank(a) > rank(b);
}

std::uint64_t fair_share_bytes(std::span<const Contender> all, std::uint64_t capacity_bytes,
                               const ReclaimRules& rules) {
  const auto busy =
      std::count_if(all.begin(), all.end(), [&](const Contender& c) { return is_busy(c, rules); });
  return capacity_bytes / static_cast<std::uint64_t>(std::max<std::ptrdiff_t>(busy, 1));
}

std::vector<Demand> plan_reclaim(std::span<const Contender> all, std::size_t asker_index,
                                 std::uint64_t free_bytes, std::uint64_t capacity_bytes,
                                 const ReclaimRules& rules) {
  const Contender& asker = all[asker_index];
  std::uint64_t missing = above(asker.ask_bytes, free_bytes);
  for (const Contender& other : all) {
    if (other.wanted_ns < rules.patience_ns) missing = above(missing, other.wanted_bytes);
  }
  if (missing == 0) return {};

  std::vector<std::size_t> order(all.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return std::tuple(all[a].priority, ~all[a].idle_ns) <
           std::tuple(all[b].priority, ~all[b].idle_ns);
  });

  const std::uint64_t fair_bytes = fair_share_bytes(all, capacity_bytes, rules);
  // What the asker may gain from equals by fairness alone: up to its own share, no further.
  std::uint64_t fair_gain_bytes = above(fair_bytes, asker.granted_bytes);
  std::vector<Demand> plan;
  std::vector<std::uint64_t> taken(all.size(), 0);
  for (const Depth rung : {Depth::kParked, Depth::kCached, Depth::kInUse}) {
    for (const std::size_t i : order) {
      const Contender& victim = all[i];
      if (i == asker_index || missing == 0) continue;
      const Right right = right_over(victim, asker, fair_bytes, rules);
      if (!right.any || right.depth < rung) continue;
      const bool by_fairness = right.kept_bytes > victim.min_bytes;
      // What it was asked for and has not given is as good as gone from its books.
      const std::uint64_t spare =
          above(victim.granted_bytes, right.kept_bytes + victim.wanted_bytes + taken[i]);
      std::uint64_t bytes = std::min({missing, spare, bytes_at(victim, rung)});
      if (by_fairness) bytes = std::min(bytes, fair_gain_bytes);
      if (bytes == 0) continue;
      if (by_fairness) fair_gain_bytes -= bytes;
      missing -= bytes;
      taken[i] += bytes;
      const auto known = std::find_if(plan.begin(), plan.end(),
                                      [&](const Demand& demand) { return demand.contender == i; });
      if (known == plan.end()) {
        plan.push_back({i, bytes, rung});
      } else {
        known->bytes += bytes;
        known->depth = rung;
      }
    }
  }
  return plan;
}

std::uint64_t reachable_bytes(std::span<const Contender> all, std::size_t asker,
                              std::uint64_t capacity_bytes, const ReclaimRules& rules) {
  const std::uint64_t fair_bytes = fair_share_bytes(all, capacity_bytes, rules);
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (i == asker) continue;
    const Right right = right_over(all[i], all[asker], fair_bytes, rules);
    if (!right.any) continue;
    bytes += std::min(above(all[i].granted_bytes, right.kept_bytes),
                      all[i].parked_bytes + all[i].cached_bytes);
  }
  return bytes;
}

}  // namespace kvelastic
