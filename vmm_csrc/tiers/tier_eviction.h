// Which record a full tier evicts: pure functions of each record's history.
//
// A policy defines how a use changes a record's history, and the history's rank in the eviction
// order. `TierIndex` keeps one History per record and knows no policy; it evicts the lowest Rank.
//
// clang-format off
//   lru    least recently used            Mattson, Gecsei, Slutz, Traiger: Evaluation Techniques for
//                                         Storage Hierarchies, IBM Systems Journal 9(2), 1970
//   lfu    least often used, then lru     Aho, Denning, Ullman: Principles of Optimal Page
//                                         Replacement, JACM 18(1), 1971. Counts do not age
//   slru   segmented lru                  Karedla, Love, Wherry: Caching Strategies to Improve Disk
//                                         System Performance, IEEE Computer 27(3), 1994
//   fifo   in the order of arrival        Belady: A Study of Replacement Algorithms for a
//                                         Virtual-Storage Computer, IBM Systems Journal 5(2), 1966
// clang-format on
//
// SLRU has two segments. A new record enters the probationary segment; a use moves it to the
// protected one, which holds at most `protected_most()` records. Its least recently used records
// return to the young end of the probationary segment. A long prompt that is used once therefore
// displaces no record that was reused. The bound is enforced when a slot is needed, not at each
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

/// A policy's memory of a record.
struct History {
  std::uint64_t time = 0;   ///< of its last use; fifo: when it came
  std::uint32_t level = 0;  ///< lfu: uses after the first; slru: 1 in the protected segment
};

/// Position in the eviction order: the lowest is evicted first.
struct Rank {
  std::uint32_t level = 0;
  std::uint64_t time = 0;

  friend auto operator<=>(const Rank&, const Rank&) = default;
};

inline constexpr std::uint32_t kInnerBit = std::uint32_t{1} << 31;
inline constexpr std::uint32_t kMostUses = kInnerBit - 1;
inline constexpr std::uint32_t kProtected = 1;

/// The history of a new record. Times are a counter, not a clock.
constexpr History history_of_new(std::uint64_t now) {
  return {now, 0};
}

/// The history after a use. Never ranks lower than before.
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

/// The history of a record that leaves the protected segment (slru).
constexpr History history_after_demotion(std::uint64_t now) {
  return {now, 0};
}

/// The bound of the protected segment: four fifths of the slots.
constexpr std::uint64_t protected_most(std::uint64_t slots) {
  return slots - slots / 5;
}

/// The rank of a record. An inner one, which others continue, is evicted after every leaf: without
/// it they cannot be found.
constexpr Rank rank_of(History history, bool is_inner) {
  return {history.level | (is_inner ? kInnerBit : 0), history.time};
}

}  // namespace kvelastic
