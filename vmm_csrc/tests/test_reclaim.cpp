// The policy of who gives memory to whom: a table of cases, and rules that hold for every case.
#include <algorithm>
#include <cstdio>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "ledger/reclaim.h"

namespace kvelastic {
namespace {

constexpr std::uint64_t kMiB = 1 << 20;
constexpr std::uint64_t kMillisecond = 1'000'000;
const ReclaimRules kRules;
const std::uint64_t kBusy = 0;
const std::uint64_t kIdle = kRules.idle_ns;
const std::uint64_t kLongIdle = 10 * kRules.idle_ns;
const std::uint64_t kJustRequested = 0;

/// Sizes in MiB; what is neither parked nor cached is in use. Busy and of priority 0 unless said.
Contender holds(std::uint64_t granted, std::uint64_t parked = 0, std::uint64_t cached = 0) {
  Contender c;
  c.granted_bytes = granted * kMiB;
  c.parked_bytes = parked * kMiB;
  c.cached_bytes = cached * kMiB;
  c.idle_ns = kBusy;
  return c;
}

/// The same with something changed.
template <typename Change>
Contender with(Contender c, Change change) {
  change(c);
  return c;
}
Contender idle(Contender c, std::uint64_t idle_ns = kIdle) {
  c.idle_ns = idle_ns;
  return c;
}
Contender reports(Contender c, Reported reported) {
  c.reported = reported;
  return c;
}
Contender ranked(Contender c, std::int64_t priority) {
  c.priority = priority;
  return c;
}
Contender guarded(Contender c, std::uint64_t min) {
  c.min_bytes = min * kMiB;
  return c;
}
Contender requests(Contender c, std::uint64_t bytes, std::uint64_t since_ns = kJustRequested) {
  c.request_bytes = bytes * kMiB;
  c.request_ns = since_ns;
  return c;
}
Contender reclaimed(Contender c, std::uint64_t bytes, std::uint64_t since_ns) {
  c.reclaim_bytes = bytes * kMiB;
  c.reclaim_ns = since_ns;
  return c;
}

struct Expected {
  std::size_t contender;
  std::uint64_t mib;
  Depth depth;
  bool operator==(const Expected&) const = default;
};

struct PolicyCase {
  const char* what;
  std::vector<Contender> all;  ///< the first one asks
  std::uint64_t free_mib;
  std::uint64_t capacity_mib;
  std::vector<Expected> plan;
};

std::vector<Expected> plan_of(const PolicyCase& c, const ReclaimRules& rules = kRules) {
  std::vector<Expected> plan;
  for (const ReclaimRequest& request :
       plan_reclaim(c.all, 0, c.free_mib * kMiB, c.capacity_mib * kMiB, rules)) {
    CHECK(request.bytes % kMiB == 0);
    plan.push_back({request.contender, request.bytes / kMiB, request.depth});
  }
  return plan;
}

void check_cases(const std::vector<PolicyCase>& cases) {
  for (const PolicyCase& c : cases) {
    const std::vector<Expected> plan = plan_of(c);
    if (CHECK(plan == c.plan)) continue;
    std::fprintf(stderr, "  in the case: %s; it was\n", c.what);
    for (const Expected& e : plan) {
      std::fprintf(stderr, "    of %zu %llu MiB, depth %u\n", e.contender,
                   static_cast<unsigned long long>(e.mib), static_cast<unsigned>(e.depth));
    }
  }
}

constexpr Depth kParked = Depth::kParked;
constexpr Depth kCached = Depth::kCached;
constexpr Depth kInUse = Depth::kInUse;

}  // namespace

TEST(reclaim_requests_only_the_missing_bytes) {
  check_cases({
      {"nothing asked", {holds(0), idle(holds(50, 50))}, 0, 50, {}},
      {"alone", {requests(holds(50), 10)}, 0, 50, {}},
      {"enough is free", {requests(holds(0), 10), idle(holds(50, 50))}, 10, 60, {}},
      {"the rest is missing",
       {requests(holds(0), 10), idle(holds(50, 50))},
       4,
       54,
       {{1, 6, kParked}}},
      {"others have been asked for it just now",
       {requests(holds(0), 10), idle(reclaimed(holds(50, 50), 10, 0))},
       0,
       50,
       {}},
      {"others have been asked for a part of it",
       {requests(holds(0), 10), idle(reclaimed(holds(50, 50), 3, 0))},
       0,
       50,
       {{1, 7, kParked}}},
  });
}

TEST(reclaim_exhausts_each_step_before_the_next) {
  check_cases({
      {"parked of both before cached of one",
       {requests(holds(0), 30), idle(holds(40, 10, 30)), idle(holds(40, 10, 30), kLongIdle)},
       0,
       80,
       {{2, 20, kCached}, {1, 10, kParked}}},
      {"cached of both before blocks in use of the lower priority",
       {requests(ranked(holds(0), 1), 30), holds(40, 0, 10), idle(ranked(holds(40, 0, 20), 1))},
       0,
       80,
       {{1, 10, kCached}, {2, 20, kCached}}},
      {"and then blocks in use, of the lower priority only",
       {requests(ranked(holds(0), 1), 50), holds(40, 0, 10), idle(ranked(holds(40, 0, 20), 1))},
       0,
       80,
       {{1, 30, kInUse}, {2, 20, kCached}}},
  });
}

TEST(reclaim_orders_by_priority_and_then_by_idleness) {
  check_cases({
      {"the idler one first",
       {requests(holds(0), 10), idle(holds(20, 0, 20)), idle(holds(20, 0, 20), kLongIdle)},
       0,
       40,
       {{2, 10, kCached}}},
      {"the lower priority first, though it is busy and the other idle",
       {requests(ranked(holds(0), 2), 10), ranked(idle(holds(20, 0, 20), kLongIdle), 1),
        ranked(holds(20, 0, 20), 0)},
       0,
       40,
       {{2, 10, kCached}}},
      {"negative priorities too",
       {requests(ranked(holds(0), -5), 10), ranked(holds(20, 0, 20), -6),
        ranked(holds(20, 0, 20), -7)},
       0,
       40,
       {{2, 10, kCached}}},
      {"of those who are quite alike the first",
       {requests(holds(0), 10), idle(holds(20, 0, 20)), idle(holds(20, 0, 20))},
       0,
       40,
       {{1, 10, kCached}}},
      {"what the first has not the second gives",
       {requests(holds(0), 10), idle(holds(20, 0, 20)), idle(holds(20, 0, 4), kLongIdle)},
       0,
       40,
       {{2, 4, kCached}, {1, 6, kCached}}},
  });
}

TEST(reclaim_takes_idle_cache_but_no_blocks_used) {
  check_cases({
      {"an idle equal gives its cache only",
       {requests(holds(0), 40), idle(holds(40, 5, 15))},
       0,
       40,
       {{1, 20, kCached}}},
      {"an idle one of higher priority too",
       {requests(holds(0), 40), ranked(idle(holds(40, 5, 15)), 9)},
       0,
       40,
       {{1, 20, kCached}}},
      {"a nanosecond short of idle is busy",
       {requests(holds(0), 40), idle(holds(40, 5, 15), kIdle - 1)},
       0,
       40,
       {{1, 5, kParked}}},
      {"one that reports no unfinished request is idle at once",
       {requests(holds(0), 40), reports(holds(40, 5, 15), Reported::kIdle)},
       0,
       40,
       {{1, 20, kCached}}},
      {"one that reports unfinished requests is busy, however long it allocs nothing",
       {requests(holds(0), 40), reports(idle(holds(40, 5, 15), kLongIdle), Reported::kBusy)},
       0,
       40,
       {{1, 5, kParked}}},
      {"one that asks is busy, whatever it reports",
       {requests(holds(0), 40), requests(reports(holds(40, 5, 15), Reported::kIdle), 1)},
       0,
       40,
       {{1, 5, kParked}}},
      {"who asks is not idle, however long it has done nothing",
       {requests(holds(0), 40), requests(idle(holds(40, 5, 15), kLongIdle), 1)},
       0,
       40,
       {{1, 5, kParked}}},
      {"a busy one of higher priority keeps everything, however long one waits",
       {requests(holds(0), 40, 100 * kRules.fair_in_use_ns), ranked(holds(40, 5, 15), 1)},
       0,
       40,
       {}},
      {"an older ask changes nothing for an idle one's blocks in use",
       {requests(holds(0), 40, 100 * kRules.fair_in_use_ns), ranked(idle(holds(40, 5, 15)), 1)},
       0,
       40,
       {{1, 20, kCached}}},
  });
}

TEST(reclaim_takes_blocks_in_use_of_lower_priorities) {
  check_cases({
      {"everything of a busy one",
       {requests(ranked(holds(0), 1), 40), holds(40, 5, 15)},
       0,
       40,
       {{1, 40, kInUse}}},
      {"of the lowest first",
       {requests(ranked(holds(0), 2), 30), ranked(holds(20), 1), holds(20)},
       0,
       40,
       {{2, 20, kInUse}, {1, 10, kInUse}}},
      {"not of equals", {requests(ranked(holds(0), 1), 40), ranked(holds(40), 1)}, 0, 40, {}},
  });
}

TEST(reclaim_never_goes_below_a_guarantee) {
  check_cases({
      {"of an idle one",
       {requests(holds(0), 40), guarded(idle(holds(40, 40)), 30)},
       0,
       40,
       {{1, 10, kParked}}},
      {"of a lower priority",
       {requests(ranked(holds(0), 9), 40), guarded(holds(40, 5, 5), 25)},
       0,
       40,
       {{1, 15, kInUse}}},
      {"not even for one that is below its own",
       {guarded(requests(holds(0), 20), 20), guarded(holds(40), 35)},
       0,
       40,
       {{1, 5, kInUse}}},
      {"who has less than its guarantee gives nothing",
       {requests(ranked(holds(0), 9), 40), guarded(idle(holds(20, 20)), 30)},
       0,
       40,
       {}},
      {"nor does who has just that",
       {requests(ranked(holds(0), 9), 40), guarded(idle(holds(30, 30)), 30)},
       0,
       40,
       {}},
      {"what was asked of it before counts as given",
       {requests(ranked(holds(0), 9), 40), guarded(reclaimed(holds(40, 40), 8, 0), 30)},
       0,
       40,
       {{1, 2, kParked}}},
  });
}

TEST(reclaim_restores_guarantees_from_any_member) {
  check_cases({
      {"from a busy one of higher priority, what it uses",
       {guarded(requests(holds(4), 6), 10), ranked(holds(40), 7)},
       0,
       44,
       {{1, 6, kInUse}}},
      {"from busy equals at once",
       {guarded(requests(holds(4), 6), 10), holds(40, 2)},
       0,
       44,
       {{1, 6, kInUse}}},
      {"from the lowest priority first",
       {guarded(requests(holds(4), 6), 10), ranked(holds(20), 7), ranked(holds(20), 3)},
       0,
       44,
       {{2, 6, kInUse}}},
      {"who has it already is like all others",
       {guarded(requests(holds(10), 6), 10), ranked(holds(40), 7)},
       0,
       50,
       {}},
  });
}

/// What is asked for beyond the guarantee has no more right than any other ask.
TEST(reclaim_by_guarantee_stops_at_the_guarantee) {
  check_cases({
      {"from a busy one of higher priority",
       {guarded(requests(holds(8), 30), 10), ranked(holds(40), 7)},
       0,
       48,
       {{1, 2, kInUse}}},
      {"from a busy equal",
       {guarded(requests(holds(8), 30), 10), holds(40, 0, 20)},
       0,
       48,
       {{1, 2, kCached}}},
      {"from one that is idle as much as it wants, and then it has its guarantee",
       {guarded(requests(holds(8), 30), 10), ranked(holds(40), 7), idle(holds(20, 0, 20))},
       0,
       68,
       {{2, 20, kCached}}},
  });
}

TEST(reclaim_shares_fairly_among_busy_equals_that_wait) {
  const std::uint64_t cached_ns = kRules.fair_cached_ns;
  const std::uint64_t in_use_ns = kRules.fair_in_use_ns;
  check_cases({
      {"not at once", {requests(holds(10), 20, cached_ns - 1), holds(70, 0, 20)}, 0, 80, {}},
      {"then cached contents down to the fair share",
       {requests(holds(10), 60, cached_ns), holds(70, 10, 30)},
       0,
       80,
       {{1, 30, kCached}}},
      {"no blocks in use yet",
       {requests(holds(10), 60, in_use_ns - 1), holds(70, 5, 10)},
       0,
       80,
       {{1, 15, kCached}}},
      {"then blocks in use, down to the fair share",
       {requests(holds(10), 60, in_use_ns), holds(70, 5, 10)},
       0,
       80,
       {{1, 30, kInUse}}},
      {"who has its share gets nothing by waiting",
       {requests(holds(40), 60, 10 * in_use_ns), holds(40, 5, 10)},
       0,
       80,
       {}},
      {"nor who has more", {requests(holds(50), 60, 10 * in_use_ns), holds(30, 5, 10)}, 0, 80, {}},
      {"who has less than its share gives nothing",
       {requests(holds(10), 60, 10 * in_use_ns), holds(60), holds(20, 0, 10)},
       0,
       90,
       {{1, 20, kInUse}}},
      {"a guarantee above the share stays",
       {requests(holds(10), 60, in_use_ns), guarded(holds(70), 60)},
       0,
       80,
       {{1, 10, kInUse}}},
      {"past its share it does not go, though a guarantee leaves the other one more",
       {requests(holds(35), 60, in_use_ns), guarded(holds(65), 50)},
       0,
       80,
       {{1, 5, kInUse}}},
      {"an idle one has no share: only who works or asks counts",
       {requests(holds(10), 60, in_use_ns), holds(60), idle(holds(10))},
       0,
       80,
       {{1, 20, kInUse}}},
      {"from several, all together no more than to its share",
       {requests(holds(0), 60, in_use_ns), holds(45), holds(45)},
       0,
       90,
       {{1, 15, kInUse}, {2, 15, kInUse}}},
  });
}

TEST(reclaim_takes_parked_pages_first_without_waiting) {
  check_cases({
      {"of a busy equal, up to the requester's share",
       {requests(holds(30), 60), holds(50, 40)},
       0,
       80,
       {{1, 10, kParked}}},
      {"none for an requester that has its share",
       {requests(holds(40), 10), holds(40, 20)},
       0,
       80,
       {}},
      {"none of a busy one of higher priority",
       {requests(holds(0), 60), ranked(holds(80, 40), 1)},
       0,
       80,
       {}},
      {"before the cached contents of an idle one",
       {requests(holds(0), 30), idle(holds(40, 0, 40), kLongIdle), holds(40, 20)},
       0,
       80,
       {{2, 20, kParked}, {1, 10, kCached}}},
      {"never those of the guarantee",
       {requests(holds(0), 60), guarded(holds(80, 80), 50)},
       0,
       80,
       {{1, 30, kParked}}},
  });
}

/// Pages of 4 MiB and a share of 40.5 pages: the odd half must not go to and fro for ever.
TEST(reclaim_shares_in_whole_pages) {
  const auto paged = [](Contender c) {
    c.page_bytes = 4 * kMiB;
    return c;
  };
  const std::uint64_t long_ns = 10 * kRules.fair_in_use_ns;
  check_cases({
      {"half a page more than the share is no page more",
       {requests(paged(holds(160)), 4, long_ns), paged(holds(164))},
       0,
       324,
       {}},
      {"nor is half a page that is parked",
       {requests(paged(holds(160)), 4), paged(holds(164, 40))},
       0,
       324,
       {}},
      {"a page and a half more is one",
       {requests(paged(holds(156)), 8, long_ns), paged(holds(168))},
       0,
       324,
       {{1, 4, kInUse}}},
      {"other rights are not for whole pages",
       {requests(paged(ranked(holds(160), 1)), 2), paged(holds(164))},
       0,
       324,
       {{1, 2, kInUse}}},
  });
}

TEST(reclaim_skips_members_that_respond_slowly) {
  const std::uint64_t patience_ns = kRules.patience_ns;
  check_cases({
      {"just within the patience nobody else is asked",
       {requests(holds(0), 10), idle(reclaimed(holds(20, 20), 10, patience_ns - 1), kLongIdle),
        idle(holds(20, 20))},
       0,
       40,
       {}},
      {"then the next one is, and not the slow one again, although it has more",
       {requests(holds(0), 10), idle(reclaimed(holds(20, 20), 10, patience_ns), kLongIdle),
        idle(holds(20, 20))},
       0,
       40,
       {{2, 10, kParked}}},
      {"also where it was asked for only a little of much",
       {requests(holds(0), 10), idle(reclaimed(holds(1000, 1000), 1, patience_ns), kLongIdle),
        idle(holds(20, 20))},
       0,
       1020,
       {{2, 10, kParked}}},
      {"not on blocks in use either",
       {requests(ranked(holds(0), 5), 10), reclaimed(holds(20, 0, 5), 5, patience_ns),
        ranked(holds(20), 1)},
       0,
       40,
       {{2, 10, kInUse}}},
      {"what the requester itself is asked for does not come to it",
       {reclaimed(requests(holds(20), 10), 10, 0), idle(holds(20, 20))},
       0,
       40,
       {{1, 10, kParked}}},
  });
}

TEST(reclaim_ranks_contenders_in_order) {
  const Contender none = holds(10);
  const Contender early = requests(holds(10), 1, 100 * kMillisecond);
  const Contender late = requests(holds(10), 1, 99 * kMillisecond);
  const Contender now = requests(holds(10), 1, 0);
  const Contender higher = ranked(none, 1);
  const Contender poor = guarded(holds(10), 11);
  const Contender poor_higher = ranked(poor, 1);
  const Contender rich = guarded(holds(10), 10);
  const Contender lacks = holds(8);
  // Each one outranks all that come after it.
  const std::vector<Contender> order{requests(poor_higher, 1),
                                     poor_higher,
                                     requests(poor, 1),
                                     poor,
                                     requests(higher, 1),
                                     higher,
                                     requests(lacks, 1),
                                     lacks,
                                     early,
                                     late,
                                     now,
                                     none};
  for (std::size_t i = 0; i < order.size(); ++i) {
    for (std::size_t k = 0; k < order.size(); ++k) {
      if (!CHECK(outranks(order[i], order[k], 10 * kMiB) == (i < k))) {
        std::fprintf(stderr, "  of %zu and %zu\n", i, k);
      }
    }
  }
  CHECK(!outranks(rich, none, 0) && !outranks(none, rich, 0));
  // A part of a page is nothing that it could get.
  const Contender almost = with(lacks, [](Contender& c) { c.page_bytes = 3 * kMiB; });
  CHECK(!outranks(almost, holds(11), 10 * kMiB) && outranks(almost, holds(11), 11 * kMiB));
}

TEST(reclaim_keeps_freed_memory_for_higher_ranks) {
  const auto kept = [](std::vector<Contender> all, std::uint64_t capacity) {
    return kept_bytes(all, 0, capacity * kMiB, kRules) / kMiB;
  };
  const Contender early = requests(holds(20), 5, 100 * kMillisecond);
  const Contender late = requests(holds(20), 5, 99 * kMillisecond);
  CHECK(kept({late}, 40) == 0);
  CHECK(kept({holds(20), holds(20)}, 40) == 0);  // nobody asks
  CHECK(kept({late, early}, 40) == 5 && kept({early, late}, 40) == 0);
  CHECK(kept({late, early, early}, 60) == 10);
  CHECK(kept({early, ranked(late, 1)}, 40) == 5 && kept({ranked(late, 1), early}, 40) == 0);
  // Below its guarantee: no more than that, where the requester ranks lower in all else.
  CHECK(kept({early, guarded(ranked(late, -1), 22)}, 40) == 2);
  CHECK(kept({early, guarded(ranked(late, -1), 30)}, 40) == 5);
  // Of two that work, one that lacks of its half goes first, up to that, though it asks later ...
  const Contender more = requests(holds(23), 9, 100 * kMillisecond);
  const Contender less = requests(holds(17), 9, kJustRequested);
  CHECK(kept({more, less}, 40) == 3 && kept({less, more}, 40) == 0);
  // ... and where it has waited longer too, for all that it asks for.
  CHECK(kept({holds(23), less}, 40) == 9);
  // Guarantee and share: the larger of the two.
  CHECK(kept({more, guarded(less, 18)}, 40) == 3 && kept({more, guarded(less, 22)}, 40) == 5);
}

TEST(reclaim_does_not_thrash_between_equals) {
  // Two equals that both want all there is. What one has to give for fairness goes to the other.
  std::vector<Contender> all{requests(holds(26), 14, 20 * kRules.fair_in_use_ns),
                             requests(holds(14), 26, kRules.fair_in_use_ns)};
  std::uint64_t free = 0;
  std::uint64_t moved = 0;
  for (int step = 0; step < 100; ++step) {
    for (std::size_t i = 0; i < all.size(); ++i) {
      for (const ReclaimRequest& request : plan_reclaim(all, i, free, 40 * kMiB, kRules)) {
        all[request.contender].granted_bytes -= request.bytes;
        free += request.bytes;
        moved += request.bytes;
      }
      // Whoever looks first, and the one with the older ask always does, takes what is not kept.
      for (std::size_t k = 0; k < all.size(); ++k) {
        const std::uint64_t kept = kept_bytes(all, k, 40 * kMiB, kRules);
        const std::uint64_t gets = std::min(all[k].request_bytes, free - std::min(free, kept));
        all[k].granted_bytes += gets;
        free -= gets;
      }
    }
  }
  CHECK(all[0].granted_bytes == 20 * kMiB && all[1].granted_bytes == 20 * kMiB);
  CHECK(moved == 6 * kMiB);
}

TEST(reclaim_reach_is_the_immediately_available_memory) {
  const auto reach = [](const std::vector<Contender>& all, std::uint64_t capacity) {
    return reachable_bytes(all, 0, capacity * kMiB, kRules) / kMiB;
  };
  CHECK(reach({holds(0)}, 10) == 0);
  CHECK(reach({holds(0), idle(holds(40, 5, 10))}, 40) == 15);
  CHECK(reach({holds(0), holds(40, 0, 10)}, 40) == 0);
  CHECK(reach({holds(0), holds(40, 5, 10)}, 40) == 5);
  CHECK(reach({holds(18), holds(22, 5, 10)}, 40) == 2);  // up to its share
  CHECK(reach({ranked(holds(0), 1), holds(40, 5, 10)}, 40) == 15);
  CHECK(reach({holds(0), guarded(idle(holds(40, 20, 20)), 30)}, 40) == 10);
  CHECK(reach({holds(0), guarded(idle(holds(20, 20)), 30)}, 40) == 0);
  CHECK(reach({holds(0), idle(holds(40, 5, 10)), idle(holds(10, 10))}, 50) == 25);
  CHECK(reach({holds(99, 50, 49)}, 99) == 0);
}

// -------------------------------------------------------------------------------- every case

namespace {

struct Drawn {
  std::vector<Contender> all;
  std::size_t requester;
  std::uint64_t free_bytes, capacity_bytes;
};

Drawn draw(std::mt19937_64& dice) {
  const auto pick = [&](std::initializer_list<std::uint64_t> of) {
    return *(of.begin() + dice() % of.size());
  };
  Drawn drawn;
  drawn.all.resize(1 + dice() % 6);
  std::uint64_t granted = 0;
  for (Contender& c : drawn.all) {
    c.granted_bytes = dice() % 50;
    c.parked_bytes = dice() % (c.granted_bytes + 1);
    c.cached_bytes = dice() % (c.granted_bytes - c.parked_bytes + 1);
    c.min_bytes = pick({0, 0, dice() % 60});
    c.priority = static_cast<std::int64_t>(dice() % 3) - 1;
    c.idle_ns = pick({0, kIdle - 1, kIdle, kLongIdle, dice() % kLongIdle});
    c.reported = static_cast<Reported>(dice() % 3);
    c.request_bytes = pick({0, dice() % 40});
    c.request_ns = pick({0, kRules.fair_cached_ns, kRules.fair_in_use_ns, dice() % 3'000'000'000});
    c.reclaim_bytes = pick({0, 0, dice() % 30});
    c.reclaim_ns = pick({0, kRules.patience_ns - 1, kRules.patience_ns, 1'000'000'000});
    granted += c.granted_bytes;
  }
  drawn.requester = dice() % drawn.all.size();
  drawn.all[drawn.requester].request_bytes = 1 + dice() % 80;
  drawn.free_bytes = pick({0, 0, dice() % 20});
  drawn.capacity_bytes = granted + drawn.free_bytes + pick({0, dice() % 30});
  return drawn;
}

bool is_slow(const Contender& c) {
  return c.reclaim_bytes > 0 && c.reclaim_ns >= kRules.patience_ns;
}

bool is_busy(const Contender& c) {
  if (c.request_bytes > 0) return true;
  if (c.reported != Reported::kNothing) return c.reported == Reported::kBusy;
  return c.idle_ns < kRules.idle_ns;
}

std::uint64_t at_depth(const Contender& c, Depth depth) {
  if (depth == Depth::kParked) return c.parked_bytes;
  return depth == Depth::kCached ? c.parked_bytes + c.cached_bytes : c.granted_bytes;
}

}  // namespace

TEST(reclaim_rules_hold_for_every_plan) {
  std::mt19937_64 dice(20);
  int empty = 0;
  std::map<Depth, int> depths;
  for (int round = 0; round < 200'000; ++round) {
    const Drawn drawn = draw(dice);
    const auto& [all, requester_index, free_bytes, capacity_bytes] = drawn;
    const Contender& requester = all[requester_index];
    const std::vector<ReclaimRequest> plan =
        plan_reclaim(all, requester_index, free_bytes, capacity_bytes, kRules);
    empty += plan.empty() ? 1 : 0;

    std::uint64_t sum = 0, by_fairness = 0, by_guarantee = 0;
    std::vector<bool> seen(all.size(), false);
    const std::uint64_t fair = fair_share_bytes(all, capacity_bytes, kRules);
    bool good = true;
    for (const ReclaimRequest& request : plan) {
      good = good && CHECK(request.contender < all.size());
      const Contender& victim = all[request.contender];
      sum += request.bytes;
      ++depths[request.depth];
      good = good && CHECK(request.bytes > 0);
      good = good && CHECK(request.contender != requester_index);
      good = good && CHECK(!seen[request.contender]);
      seen[request.contender] = true;
      // Never below the guarantee, with all that it was asked for before.
      good = good &&
             CHECK(victim.granted_bytes >= victim.min_bytes + victim.reclaim_bytes + request.bytes);
      good = good && CHECK(request.bytes <= at_depth(victim, request.depth));
      good = good && CHECK(!is_slow(victim));

      if (victim.priority < requester.priority) continue;
      if (!is_busy(victim)) {
        if (request.depth <= Depth::kCached) continue;
      } else if (request.depth == Depth::kParked && victim.priority == requester.priority) {
        by_fairness += request.bytes;
        continue;
      } else if (victim.priority == requester.priority &&
                 requester.request_ns >= kRules.fair_cached_ns &&
                 (request.depth <= Depth::kCached ||
                  requester.request_ns >= kRules.fair_in_use_ns) &&
                 victim.granted_bytes - request.bytes >= fair) {
        // Between busy ones only equals share, after a time, and down to the share.
        by_fairness += request.bytes;
        continue;
      }
      // For the guarantee alone: of those who owe nothing else.
      by_guarantee += request.bytes;
    }
    if (by_guarantee > 0) {
      const bool idle_too = std::any_of(
          plan.begin(), plan.end(),
          [&](const ReclaimRequest& request) { return !is_busy(all[request.contender]); });
      // An idle one may have given cached contents first, for more than the guarantee.
      good = good && CHECK(requester.granted_bytes < requester.min_bytes);
      good = good && CHECK(idle_too || requester.granted_bytes + by_guarantee <=
                                           std::max(requester.min_bytes, fair));
    }
    if (by_fairness > 0) {
      good = good &&
             CHECK(requester.granted_bytes + by_fairness <= std::max(requester.min_bytes, fair));
    }
    good = good && CHECK(sum + free_bytes <= requester.request_bytes || plan.empty());

    // The same again for the same facts, and nothing of it depends on whom one asks first.
    const std::vector<ReclaimRequest> again =
        plan_reclaim(all, requester_index, free_bytes, capacity_bytes, kRules);
    good = good && CHECK(std::equal(plan.begin(), plan.end(), again.begin(), again.end(),
                                    [](const ReclaimRequest& a, const ReclaimRequest& b) {
                                      return a.contender == b.contender && a.bytes == b.bytes &&
                                             a.depth == b.depth;
                                    }));
    if (!good) {
      std::fprintf(stderr, "  in round %d\n", round);
      return;
    }
  }
  // The cases are of all kinds: checks of what never happens would prove nothing.
  CHECK(empty > 1000 && empty < 190'000);
  CHECK(depths[kParked] > 1000 && depths[kCached] > 1000 && depths[kInUse] > 1000);
}

TEST(reclaim_falls_short_only_after_taking_everything) {
  std::mt19937_64 dice(21);
  int short_plans = 0;
  for (int round = 0; round < 50'000; ++round) {
    Drawn drawn = draw(dice);
    Contender& requester = drawn.all[drawn.requester];
    requester.min_bytes = 0;
    requester.priority = 5;  // above all: it may take everything but guarantees
    requester.reclaim_bytes = 0;
    std::uint64_t there = drawn.free_bytes, coming = 0;
    for (std::size_t i = 0; i < drawn.all.size(); ++i) {
      Contender& c = drawn.all[i];
      if (i == drawn.requester) continue;
      if (c.reclaim_ns < kRules.patience_ns) coming += c.reclaim_bytes;
      const std::uint64_t kept = c.min_bytes + c.reclaim_bytes;
      if (!is_slow(c) && c.granted_bytes > kept) there += c.granted_bytes - kept;
    }
    std::uint64_t sum = drawn.free_bytes;
    for (const ReclaimRequest& request :
         plan_reclaim(drawn.all, drawn.requester, drawn.free_bytes, drawn.capacity_bytes, kRules)) {
      sum += request.bytes;
    }
    const std::uint64_t missing =
        requester.request_bytes > coming ? requester.request_bytes - coming : 0;
    if (missing <= drawn.free_bytes) continue;
    short_plans += there < missing ? 1 : 0;
    if (!CHECK(sum == std::min(there, missing))) {
      std::fprintf(stderr, "  in round %d\n", round);
      return;
    }
  }
  CHECK(short_plans > 1000);
}

/// Busy equals that take from each other by the rules come to rest, all at their fair shares.
TEST(reclaim_converges_to_equal_shares) {
  std::mt19937_64 dice(22);
  for (int round = 0; round < 500; ++round) {
    const std::size_t count = 2 + dice() % 4;
    const std::uint64_t capacity = count * 20;
    std::vector<Contender> all(count);
    for (std::uint64_t unit = 0; unit < capacity; ++unit) ++all[dice() % count].granted_bytes;
    std::uint64_t moved = 0;
    for (int step = 0; step < 100; ++step) {
      const std::size_t requester = dice() % count;
      for (Contender& c : all) c.request_bytes = 0;
      all[requester].request_bytes = 1 + dice() % 30;
      all[requester].request_ns = kRules.fair_in_use_ns;
      for (const ReclaimRequest& request : plan_reclaim(all, requester, 0, capacity, kRules)) {
        all[request.contender].granted_bytes -= request.bytes;
        all[requester].granted_bytes += request.bytes;
        moved += request.bytes;
      }
    }
    for (const Contender& c : all) CHECK(c.granted_bytes == 20);
    CHECK(moved <= capacity);  // each byte moves once at most: no page goes to and fro
  }
}

}  // namespace kvelastic
