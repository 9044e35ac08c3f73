// Which record goes first when a tier is full: pure functions of what happened to each record.
//
// A policy is the answer to two questions: what a use makes of a record's history, and where the
// history stands in the order of eviction. `TierIndex` keeps one History a record and knows no
// policy; the record with the lowest Rank goes.
//
//   lru    least recently used            Mattson, Gecsei, Slutz, Traiger: Evaluation Techniques
//   for
//                                         Storage Hierarchies, IBM Systems Journal 9(2), 1970
//   lfu    least often used, then lru     Aho, Denning, Ullman: Principles of Optimal Page
//                                         Replacement, JACM 18(1), 1971. Counts do not age
//   slru   segmented lru                  Karedla, Love, Wherry: Caching Strategies to Improve Disk
//                                         System Performance, IEEE Computer 27(3), 1994
//   fifo   in the order they came         Belady: A Study of Replacement Algorithms for a
//                                         Virtual-Storage Computer, IBM Systems Journal 5(2), 1966
//
// SLRU has two segments. A record comes into the probationary one; a use takes it into the
// protected one, which holds at most `protected_most()` records: its least recently used ones go
// back to the young end of the probationary one. So a long prompt that is used once displaces none
// that came back. The bound of the protected segment is enforced when room is needed, not at each
// use; the same records are protected then.
#pragma once

#include <compare>
#include <cstdint>
#include <limits>
#include <optional>
#include <string_view>

namespace kvelastic {

enum class EvictionPolicy : std::uint8_t { kLru, kLfu, kSlru, kFifo };

inline std::optional<EvictionPolicy> eviction_policy_of(std::string_view name) {
  if (name == "lru") return EvictionPolicy::kLru;
  if (name == "lfu") return EvictionPolicy::kLfu;
  if (name == "slru") return EvictionPolicy::kSlru;
  if (name == "fifo") return EvictionPolicy::kFifo;
  return std::nullopt;
}

/// What a policy remembers of a record.
struct History {
  std::uint64_t time = 0;   ///< of its last use; fifo: when it came
  std::uint32_t level = 0;  ///< lfu: uses after the first; slru: 1 in the protected segment
};

/// Place in the order of eviction: the lowest goes first.
struct Rank {
  std::uint32_t level = 0;
  std::uint64_t time = 0;

  friend auto operator<=>(const Rank&, const Rank&) = default;
};

inline constexpr std::uint32_t kInnerBit = std::uint32_t{1} << 31;
inline constexpr std::uint32_t kMostUses = kInnerBit - 1;
inline constexpr std::uint32_t kProtected = 1;

/// A record that came just now. Times go up by themselves; they are no clock's.
constexpr History history_of_new(std::uint64_t now) {
  return {now, 0};
}

/// A record that is used now. Never ranks lower than before.
constexpr History history_after_use(EvictionPolicy policy, History before, std::uint64_t now) {
  switch (policy) {
    case EvictionPolicy::kLru:
      return {now, 0};
    case EvictionPolicy::kLfu:
      return {now, before.level < kMostUses ? before.level + 1 : kMostUses};
    case EvictionPolicy::kSlru:
      return {now, kProtected};
    case EvictionPolicy::kFifo:
      break;
  }
  return before;
}

/// A record that leaves the protected segment now (slru): the youngest of the probationary one.
constexpr History history_after_demotion(std::uint64_t now) {
  return {now, 0};
}

/// How many records the protected segment may hold: four of five.
constexpr std::uint64_t protected_most(std::uint64_t slots) {
  return slots - slots / 5;
}

/// Where a record stands. An inner one, which others continue, goes after every leaf: without it
/// they cannot be found.
constexpr Rank rank_of(History history, bool is_inner) {
  return {history.level | (is_inner ? kInnerBit : 0), history.time};
}

}  // namespace kvelastic
