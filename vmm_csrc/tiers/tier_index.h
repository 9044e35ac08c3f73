// The index of a tier: its keys, their slots, and the next record to displace.
//
//   absent -- claim --> pending -- commit --> ready -- displaced, erased --> absent
//                          '----- abandon ----^ (absent)
//
// A *slot* holds one record. A *node* describes a key: it has a slot
// (pending or ready), or it is a *ghost* that only records with slots continue. A node knows its
// parent, which it continues, and the number of its children, so leaves are displaced before inner
// nodes. A child may arrive before its parent, which is a ghost until then. A ghost has no parent
// and is removed with its last child. Ghosts therefore never outnumber records, and all memory is
// bounded by the number of slots: about 200 bytes each.
//
// A *hold* protects records: they are not displaced. A record erased during a hold is no longer
// found, but its slot becomes free only when its last hold ends.
//
// Keys are found by open addressing with linear probing over 8-byte cells; cells and nodes of the
// next keys are prefetched. No key allocates memory: tables grow with the slots, and results are
// reserved before a change. So every error, including std::bad_alloc, leaves the state unchanged.
//
// Thread-safe: one mutex, held for one call; no other lock is taken under it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/free_slots.h"
#include "base/lazy_array.h"
#include "base/status.h"
#include "pool/block_keys.h"
#include "tiers/rank_heap.h"
#include "tiers/tier_eviction.h"

namespace kvelastic {

/// A record: its key and its current or former slot.
struct KeyInSlot {
  BlockKey key;
  std::uint32_t slot = 0;
};

class TierIndex {
 public:
  using Ticket = std::uint64_t;

  static constexpr std::uint64_t kMostSlots = FreeSlots::kMostSlots;
  static constexpr std::int64_t kThereAlready = -1;
  static constexpr std::int64_t kNoRoom = -2;

  struct Held {
    Ticket ticket = 0;
    std::vector<std::int64_t> slots;
  };
  struct Claimed {
    std::vector<std::int64_t> slots;  ///< one per key; or kThereAlready, kNoRoom
    std::vector<KeyInSlot> displaced;
  };
  struct Closed {
    std::vector<std::int64_t> slots;
    std::vector<KeyInSlot> displaced;
  };
  /// The parent of a claim.
  struct Chain {
    bool is_chain = false;  ///< each key continues the one before it
    BlockKey after;         ///< the parent of the first key; the zero key: none
  };
  struct Stats {
    std::uint64_t slots = 0;
    std::uint64_t ready = 0;
    std::uint64_t pending = 0;
    std::uint64_t closed = 0;     ///< slots without a record that claims do not use
    std::uint64_t held = 0;       ///< held slots, including those of erased records
    std::uint64_t displaced = 0;  ///< records displaced by claims and resizes since creation
  };

  /// Fails with kInvalidArgument above kMostSlots.
  static Result<std::shared_ptr<TierIndex>> create(std::uint64_t slots, EvictionPolicy policy);

  /// Returns for each key whether it is ready. Changes nothing. Pre: as many answers as keys.
  void has(std::span<const BlockKey> keys, std::span<bool> answers) const;
  /// How many leading keys are ready, and how many are ready or pending. Changes nothing.
  struct Leading {
    std::size_t ready = 0;
    std::size_t known = 0;
  };
  Leading leading(std::span<const BlockKey> keys) const;
  /// Returns how many leading keys are ready, and counts as a use. Within one call the first key is
  /// the youngest, so no key is older than its children.
  std::size_t match(std::span<const BlockKey> keys);
  /// Leases the leading ready keys until release(); counts as a use. May be empty.
  Held hold(std::span<const BlockKey> keys);
  /// Ends a hold. Returns the erased records whose slots are free now. Fails with kInvalidArgument
  /// if the ticket is unknown or has ended.
  Result<std::vector<KeyInSlot>> release(Ticket ticket);
  /// Assigns a slot to each new key, which is pending then: free slots first, lowest first, then
  /// slots chosen by the policy. Never displaces held or pending records, keys of this call, or
  /// their parent. Fails with kInvalidArgument for the zero key.
  Result<Claimed> claim(std::span<const BlockKey> keys, Chain chain);
  /// Makes written keys ready. Returns the ones that were erased, or cut off by a resize, in
  /// between: they are gone and their slots free. Fails with kInvalidArgument unless all keys are
  /// pending.
  Result<std::vector<KeyInSlot>> commit(std::span<const BlockKey> keys);
  /// Frees the slots of keys that were not written. All must be pending.
  Status abandon(std::span<const BlockKey> keys);
  /// Returns the slot, or -1 if the key is not ready.
  std::int64_t slot_of(const BlockKey& key) const;
  /// Erases ready and pending keys and returns the ones whose slots are free now. release() returns
  /// held ones, commit() pending ones.
  std::vector<KeyInSlot> erase(std::span<const BlockKey> keys);
  /// Adds a record found in a slot as ready, with its `parent` if known. False if the key exists
  /// or the slot is taken or invalid. Fails with kInvalidArgument for the zero key.
  Result<bool> restore(const BlockKey& key, std::uint64_t slot, const BlockKey& parent);
  /// Displaces up to `count` records by the policy and returns them; their slots are free then.
  /// Never displaces held or pending records.
  std::vector<KeyInSlot> displace(std::uint64_t count);
  /// Closes the free slots among `count` from `first` on, and returns them. Only restore() uses
  /// closed slots.
  std::vector<std::int64_t> close(std::uint64_t first, std::uint64_t count);
  /// Closes up to `count` slots: free ones first, lowest first, then those of displaced records.
  Closed close_by_policy(std::uint64_t count);
  /// Opens closed slots. Fails with kInvalidArgument, with none opened, if a slot is not closed.
  Status open(std::span<const std::int64_t> slots);
  /// Sets the number of slots and returns the displaced records above it. release() returns held
  /// ones, commit() pending ones.
  Result<std::vector<KeyInSlot>> resize(std::uint64_t slots);

  Stats stats() const;
  /// Fails with kIntegrity, naming the inconsistency.
  Status check_integrity() const;

 private:
  using NodeId = std::uint32_t;
  static constexpr NodeId kNoNode = 0;

  enum class State : std::uint8_t {
    kUnused,   ///< no key: in the list of unused nodes, or never used
    kGhost,    ///< no slot
    kPending,  ///< a slot that is being written
    kDoomed,   ///< pending and erased: removed when its writer is done
    kReady,
  };

  struct alignas(64) Node {
    BlockKey key;
    History history;
    std::uint32_t hash;
    std::uint32_t slot;
    NodeId parent;  ///< kUnused: the next unused node
    std::uint32_t children;
    State state;

    bool has_slot() const { return state >= State::kPending; }
    bool is_pending() const { return state == State::kPending || state == State::kDoomed; }
    bool is_inner() const { return children != 0; }
    Rank rank() const { return rank_of(history, is_inner()); }
  };
  struct Cell {
    std::uint32_t hash;
    NodeId node;  ///< kNoNode: an empty cell
  };
  struct Slot {
    NodeId node;          ///< kNoNode: free, or a record that is erased and held
    std::uint32_t holds;  ///< number of holds on it
  };

  explicit TierIndex(EvictionPolicy policy) : policy_(policy) {}

  // --- tier_index_table.cpp: keys, nodes, links. Each expects the mutex to be held.
  static std::uint32_t hash_of(const BlockKey& key);
  NodeId find(const BlockKey& key, std::uint32_t hash) const;
  NodeId find(const BlockKey& key) const { return find(key, hash_of(key)); }
  /// Calls `visit(i, node)` for each key until it returns false; prefetches the next ones.
  template <typename F>
  void look_up(std::span<const BlockKey> keys, F visit) const;
  void add_cell(std::uint32_t hash, NodeId node);
  void remove_cell(NodeId node);
  NodeId add_node(const BlockKey& key, State state);
  void remove_node(NodeId id);
  /// Makes `parent_key` the child's parent, unless the child has one.
  void link(NodeId child, const BlockKey& parent_key);
  void unlink(NodeId child);
  /// Removes a node's record: it becomes a ghost if it has children, else the node is removed.
  void drop(NodeId id);
  /// Grows the tables to this many slots; on an error nothing changes.
  Status grow(std::uint64_t slots);

  // --- tier_index_victims.cpp: who goes first. Each expects the mutex to be held.
  void use(NodeId id, std::uint64_t now);
  /// Makes a ready record displaceable, unless it is held.
  void offer(NodeId id);
  /// Ends that; no effect if it is not displaceable.
  void withdraw(NodeId id);
  /// The next record to displace; kNoNode: none.
  NodeId victim();
  void shrink_protected();

  bool is_held(NodeId id) const { return slots_[nodes_[id].slot].holds != 0; }
  void add_hold(std::uint32_t slot);
  /// True if the slot's record was erased and no hold is left.
  bool unhold(std::uint32_t slot);
  void free_slot(std::uint32_t slot);
  /// Drops a record. True if its slot is free now, false if holds remain.
  bool forget(NodeId id);
  /// Displaces the policy's next record, if any, and returns it; its slot is free then.
  std::optional<KeyInSlot> displace_next();
  /// Takes the lowest free slot, displacing a record if no slot is free.
  std::int64_t take_slot(std::vector<KeyInSlot>& displaced);
  Status check_all_pending(std::span<const BlockKey> keys) const;
  Status check_nodes() const;
  Status check_slots() const;

  mutable std::mutex mutex_;
  const EvictionPolicy policy_;
  LazyArray<Node> nodes_;  ///< 0 is none
  LazyArray<Cell> cells_;
  LazyArray<Slot> slots_;  ///< of the largest size ever: records above slots_open_ may be held
  FreeSlots free_;         ///< below slots_open_
  FreeSlots closed_;       ///< below slots_open_; as free, and given out by none but restore()
  RankHeap order_;         ///< ready nodes; held ones may be missing. Its ranks may be too low
  RankHeap protected_;     ///< slru: nodes of the protected segment, by the time of their use
  std::unordered_map<Ticket, std::vector<KeyInSlot>> holds_;
  std::uint64_t slots_open_ = 0;  ///< slots below this are given out
  NodeId unused_ = kNoNode;
  NodeId nodes_touched_ = 0;  ///< nodes 1 .. this have been used
  std::uint32_t cell_mask_ = 0;
  std::uint64_t time_ = 0;  ///< of the last event; goes up by one for each
  Ticket last_ticket_ = 0;
  std::uint64_t ready_ = 0;
  std::uint64_t pending_ = 0;
  std::uint64_t ghosts_ = 0;
  std::uint64_t held_ = 0;
  std::uint64_t displaced_ = 0;
};

template <typename F>
void TierIndex::look_up(std::span<const BlockKey> keys, F visit) const {
  constexpr std::size_t kAtOnce = 16;
  std::uint32_t hashes[kAtOnce];
  for (std::size_t first = 0; first < keys.size(); first += kAtOnce) {
    const std::size_t count = std::min(kAtOnce, keys.size() - first);
    for (std::size_t i = 0; i < count; ++i) {
      hashes[i] = hash_of(keys[first + i]);
      __builtin_prefetch(&cells_[hashes[i] & cell_mask_]);
    }
    for (std::size_t i = 0; i < count; ++i) {
      __builtin_prefetch(&nodes_[cells_[hashes[i] & cell_mask_].node]);
    }
    for (std::size_t i = 0; i < count; ++i) {
      if (!visit(first + i, find(keys[first + i], hashes[i]))) return;
    }
  }
}

inline std::uint32_t TierIndex::hash_of(const BlockKey& key) {
  // Keys are mixed well where they come from a hash; those of a test are not.
  return static_cast<std::uint32_t>(
      fold(key.low ^ 0x9E3779B97F4A7C15u, key.high ^ 0xD1B54A32D192ED03u) >> 16);
}

inline TierIndex::NodeId TierIndex::find(const BlockKey& key, std::uint32_t hash) const {
  for (std::uint32_t at = hash & cell_mask_;; at = (at + 1) & cell_mask_) {
    const Cell cell = cells_[at];
    if (cell.node == kNoNode) return kNoNode;
    if (cell.hash == hash && nodes_[cell.node].key == key) return cell.node;
  }
}

}  // namespace kvelastic
