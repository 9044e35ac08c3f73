// Who gives memory to whom: pure functions over plain values, no clock, no memory, no lock.
//
// An instance that cannot get a page asks. Others give back down a ladder, never below their
// guarantee, in the order of their priority and then of their idleness:
//
//   parked   pages that hold nothing: as cached contents, and at once from equals until the asker
//            has its fair share.
//   cached   contents that nobody refers to now: from those of lower priority, from those who are
//            idle, from all if the asker is below its guarantee, and from equals who have more than
//            their fair share once the asker has waited.
//   in use   the instance refuses blocks, its engine preempts: from those of lower priority, from
//            all if the asker is below its guarantee, and from equals above their fair share, later
//            still.
//
// The whole of one rung is asked for before the next one is touched.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kvelastic {

/// How far down the ladder an instance is asked to go.
enum class Depth : std::uint32_t { kParked = 1, kCached = 2, kInUse = 3 };
inline constexpr std::size_t kDepths = 3;

/// What an engine has reported of its requests.
enum class Reported : std::uint32_t { kNothing = 0, kBusy = 1, kIdle = 2 };

/// One instance of a device, at one moment.
struct Contender {
  std::uint64_t granted_bytes = 0;
  std::uint64_t min_bytes = 0;
  std::int64_t priority = 0;
  std::uint64_t parked_bytes = 0;
  std::uint64_t cached_bytes = 0;
  std::uint64_t page_bytes = 0;  ///< what it gives is a multiple of this; 0: of one byte
  std::uint64_t idle_ns = 0;     ///< since its last alloc or free
  /// Whether the engine has unfinished requests; kNothing: it is judged by idle_ns.
  Reported reported = Reported::kNothing;
  std::uint64_t ask_bytes = 0;  ///< what it waits for; 0: nothing
  std::uint64_t ask_ns = 0;     ///< how long it has waited
  /// Memory that comes free is kept for its ask. False: it waits for another device first, and
  /// would have no use for it yet (see places.h).
  bool keeps = true;
  std::uint64_t wanted_bytes = 0;  ///< asked of it and not dealt with yet
  std::uint64_t wanted_ns = 0;     ///< since the oldest of that, or since it last dealt with some
};

/// Times after which one thing becomes another. All may be set for a test.
struct ReclaimRules {
  /// Without an alloc or a free for so long an instance that reports nothing is idle: others may
  /// take its cache.
  std::uint64_t idle_ns = 500'000'000;
  /// An instance that has not dealt with a request for so long is not counted on: the next is
  /// asked.
  std::uint64_t patience_ns = 20'000'000;
  /// After so long an ask may take cached contents of busy equals that have more than their share.
  std::uint64_t fair_cached_ns = 300'000'000;
  /// After so long, also blocks in use of theirs.
  std::uint64_t fair_in_use_ns = 2'000'000'000;
  /// What is to be reserved, by a wake say, is refused when others have not given it for so long.
  std::uint64_t reserve_wait_ns = 5'000'000'000;
  /// An ask that nobody has repeated for so long is no ask any more.
  std::uint64_t ask_lease_ns = 250'000'000;
};

/// What one instance is asked for.
struct Demand {
  std::size_t contender;
  std::uint64_t bytes;
  Depth depth;
};

/// What each of `all` may keep when busy equals compete: the capacity over those who work or ask.
std::uint64_t fair_share_bytes(std::span<const Contender> all, std::uint64_t capacity_bytes,
                               const ReclaimRules& rules);

/// Whether `a` is served before `b` when both wait: who is below the guarantee, then the higher
/// priority, then who lacks a page or more of the fair share, then who has waited longer. `b` may
/// also be one who does not wait (ask_bytes 0).
bool outranks(const Contender& a, const Contender& b, std::uint64_t fair_bytes);

/// How many of the bytes that come free `all[self]` has to leave to those who wait: to each that
/// outranks it all that is asked for; only what is lacking of the guarantee, or of the share, where
/// that alone is why. Without the share a page that an equal has to give would go to and fro:
/// whoever has more waits longer, and would take it back.
std::uint64_t kept_bytes(std::span<const Contender> all, std::size_t self,
                         std::uint64_t capacity_bytes, const ReclaimRules& rules);

/// Whom to ask for what, so that `all[asker]` gets its ask_bytes beyond the `free_bytes` that are
/// there for it already. What others have been asked for lately counts as on its way. May come to
/// less than is missing: nobody else has to give anything. Deterministic; the order of the demands
/// is the order to ask in.
std::vector<Demand> plan_reclaim(std::span<const Contender> all, std::size_t asker,
                                 std::uint64_t free_bytes, std::uint64_t capacity_bytes,
                                 const ReclaimRules& rules);

/// Whom to ask for what, so that all of them together hold `excess_bytes` less: as plan_reclaim for
/// one who outranks everybody, so guarantees are kept, and one page of each, which no pool gives.
std::vector<Demand> plan_excess(std::span<const Contender> all, std::uint64_t excess_bytes,
                                std::uint64_t capacity_bytes, const ReclaimRules& rules);

/// Whether any but `all[self]` has been asked for memory, and is counted on: it was asked, or gave
/// some, within `patience_ns`.
bool is_memory_coming(std::span<const Contender> all, std::size_t self, std::uint64_t patience_ns);

/// What others would have to give if `all[asker]` asked for it now: parked and cached pages.
std::uint64_t reachable_bytes(std::span<const Contender> all, std::size_t asker,
                              std::uint64_t capacity_bytes, const ReclaimRules& rules);

}  // namespace kvelastic
