// Finds the lowest rank among nodes whose ranks mostly increase: an indexed heap with four children
// per node.
//
// An increased rank need not be updated at once: `TierIndex::victim` compares the top entry with
// the node's current rank, so a use costs nothing here. A decreased rank must be updated. Entries
// contain their ranks, so a step down reads one cache line and no node.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/lazy_array.h"
#include "tiers/tier_eviction.h"

namespace kvelastic {

class RankHeap {
 public:
  struct Entry {
    Rank rank() const { return {level, time}; }
    std::uint64_t time;
    std::uint32_t level;
    std::uint32_t node;
  };

  /// Makes room for nodes 0 .. nodes-1 and keeps the entries. Untouched parts use no memory.
  Status grow(std::size_t nodes) {
    if (Status grown = entries_.grow(nodes); !grown) return grown;
    return places_.grow(nodes);
  }

  bool empty() const { return size_ == 0; }
  std::size_t size() const { return size_; }
  bool contains(std::uint32_t node) const { return places_[node] != 0; }
  /// Pre: not empty.
  Entry top() const { return entries_[0]; }
  /// The rank of a node as last updated. Pre: contains(node).
  Rank known_rank(std::uint32_t node) const { return entries_[places_[node] - 1].rank(); }

  /// Adds a node. Constant time if its rank is higher than all others. Pre: !contains(node).
  void push(std::uint32_t node, Rank rank) { rise(size_++, {rank.time, rank.level, node}); }

  /// Removes a node. Idempotent.
  void remove(std::uint32_t node) {
    if (!contains(node)) return;
    const std::size_t hole = places_[node] - 1;
    places_[node] = 0;
    const Entry last = entries_[--size_];
    if (last.node == node) return;
    if (hole > 0 && last.rank() < entries_[parent_of(hole)].rank()) {
      rise(hole, last);
    } else {
      sink(hole, last);
    }
  }

  /// Sets the node's rank. Pre: contains(node).
  void update(std::uint32_t node, Rank rank) {
    const std::size_t at = places_[node] - 1;
    const Entry entry{rank.time, rank.level, node};
    if (rank < entries_[at].rank()) {
      rise(at, entry);
    } else {
      sink(at, entry);
    }
  }

  /// True if no entry's rank is below its parent's and every node leads to its entry.
  bool is_ordered() const {
    for (std::size_t at = 0; at < size_; ++at) {
      if (places_[entries_[at].node] != at + 1) return false;
      if (at > 0 && entries_[at].rank() < entries_[parent_of(at)].rank()) return false;
    }
    return true;
  }

 private:
  static constexpr std::size_t kChildren = 4;
  static std::size_t parent_of(std::size_t at) { return (at - 1) / kChildren; }

  void place(std::size_t at, const Entry& entry) {
    entries_[at] = entry;
    places_[entry.node] = static_cast<std::uint32_t>(at + 1);
  }

  void rise(std::size_t at, const Entry& entry) {
    while (at > 0 && entry.rank() < entries_[parent_of(at)].rank()) {
      place(at, entries_[parent_of(at)]);
      at = parent_of(at);
    }
    place(at, entry);
  }

  void sink(std::size_t at, const Entry& entry) {
    for (;;) {
      const std::size_t first = at * kChildren + 1;
      if (first >= size_) break;
      std::size_t lowest = first;
      for (std::size_t child = first + 1; child < std::min(first + kChildren, size_); ++child) {
        if (entries_[child].rank() < entries_[lowest].rank()) lowest = child;
      }
      if (!(entries_[lowest].rank() < entry.rank())) break;
      place(at, entries_[lowest]);
      at = lowest;
    }
    place(at, entry);
  }

  LazyArray<Entry> entries_;
  LazyArray<std::uint32_t> places_;  ///< by node: index in entries_ plus one; 0: not contained
  std::size_t size_ = 0;
};

}  // namespace kvelastic
