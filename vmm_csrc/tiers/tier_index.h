// Which keys a tier has, in which slots, and which record goes when a slot is wanted.
//
//   absent -- claim --> pending -- commit --> ready -- displaced, erased --> absent
//                          '----- abandon ----^ (absent)
//
// A *slot* holds one record. A *node* is what is known of a key: one that has a slot (pending or
// ready), or a *ghost*, which has none but is continued by records that have. Each node knows the
// node that it continues (its parent) and how many continue it, so leaves are displaced before
// inner nodes, and a child may come before its parent: the parent is a ghost until it comes. A
// ghost knows no parent of its own and goes with its last child. So there are never more ghosts
// than records, and all memory is bounded by the number of slots: about 200 bytes each, touched or
// not.
//
// A *lease* holds records: they are not displaced, and one that is erased meanwhile is no hit any
// more, but its slot is free only when the last lease of it ends.
//
// Keys are found by open addressing with linear probing over 8 bytes a cell; cells and nodes of the
// next keys are fetched while one is looked at. Nothing is allocated for a key: tables are grown
// with the slots, results are reserved before anything is changed. So an std::bad_alloc, like every
// error, leaves everything as it was.
//
// Any thread may call anything: one mutex, which is held for the time of one call and under which
// no other lock is taken.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
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

/// A record: its key and where it lies, or lay.
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

  struct Leased {
    Ticket ticket = 0;
    std::vector<std::int64_t> slots;
  };
  struct Claimed {
    std::vector<std::int64_t> slots;  ///< one for each key; or kThereAlready, kNoRoom
    std::vector<KeyInSlot> displaced;
  };
  /// What a claim continues.
  struct Chain {
    bool is_chain = false;  ///< each key continues the one before it
    BlockKey after;         ///< what the first one continues; the key of no block: nothing
  };
  struct Stats {
    std::uint64_t slots = 0;
    std::uint64_t ready = 0;
    std::uint64_t pending = 0;
    std::uint64_t closed = 0;     ///< slots without a record that claims do not take
    std::uint64_t leased = 0;     ///< slots that leases hold, erased records among them
    std::uint64_t displaced = 0;  ///< records that claims and resizes have taken the slots of, ever
  };

  /// kInvalidArgument above kMostSlots.
  static Result<std::shared_ptr<TierIndex>> create(std::uint64_t slots, EvictionPolicy policy);

  /// Whether each key is ready. Changes nothing. Pre: as many answers as keys.
  void has(std::span<const BlockKey> keys, std::span<bool> answers) const;
  /// How many leading keys are ready, and how many are ready or pending. Changes nothing.
  struct Leading {
    std::size_t ready = 0;
    std::size_t known = 0;
  };
  Leading leading(std::span<const BlockKey> keys) const;
  /// How many leading keys are ready; a use of these. In one call the first key counts as used
  /// last: no key is older than what continues it.
  std::size_t match(std::span<const BlockKey> keys);
  /// The leading ready keys, held until release(); a use of these. There may be none.
  Leased lease(std::span<const BlockKey> keys);
  /// Ends a lease; the records that were erased meanwhile and that nobody holds any more: their
  /// slots are free now. kInvalidArgument where the ticket has ended or never was.
  Result<std::vector<KeyInSlot>> release(Ticket ticket);
  /// A slot for each new key, which is pending then. Takes free slots, the lowest first, then those
  /// of others by policy: never of leased or pending records, of keys of this call, or of what it
  /// continues. kInvalidArgument for the key of no block.
  Result<Claimed> claim(std::span<const BlockKey> keys, Chain chain);
  /// The records of these keys are written: ready. Answers those that are not, because they were
  /// erased or the index was made smaller meanwhile: they are gone and their slots free. All of the
  /// keys must be pending (kInvalidArgument).
  Result<std::vector<KeyInSlot>> commit(std::span<const BlockKey> keys);
  /// The records of these keys were not written; their slots are free. All must be pending.
  Status abandon(std::span<const BlockKey> keys);
  /// -1 where the key is not ready.
  std::int64_t slot_of(const BlockKey& key) const;
  /// Forgets ready and pending keys; answers those whose slots are free now. Leased ones come from
  /// release(), pending ones from commit().
  std::vector<KeyInSlot> erase(std::span<const BlockKey> keys);
  /// A record that was found in a slot, ready; `parent` is what it continues, if that is known.
  /// False where the key is there, the slot is taken or there is no such slot. kInvalidArgument for
  /// the key of no block.
  Result<bool> restore(const BlockKey& key, std::uint64_t slot, const BlockKey& parent);
  /// Free slots among `count` from `first` on are closed: only restore() uses them. Others stay.
  void close(std::uint64_t first, std::uint64_t count);
  /// These closed slots are free. kInvalidArgument where one is not closed, and none is opened.
  Status open(std::span<const std::int64_t> slots);
  /// As many slots from now on; answers the records displaced: with fewer slots, those that lie
  /// above. Leased ones come from release(), pending ones from commit().
  Result<std::vector<KeyInSlot>> resize(std::uint64_t slots);

  Stats stats() const;
  /// kIntegrity with what disagrees.
  Status check_integrity() const;

 private:
  using NodeId = std::uint32_t;
  static constexpr NodeId kNoNode = 0;

  enum class State : std::uint8_t {
    kUnused,   ///< no key: in the list of unused nodes, or never used
    kGhost,    ///< no slot
    kPending,  ///< a slot that is being written
    kDoomed,   ///< pending, and erased: gone as soon as its writer is done
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
    NodeId node;           ///< kNoNode: free, or a record that is erased and leased
    std::uint32_t leases;  ///< how many hold it
  };

  explicit TierIndex(EvictionPolicy policy) : policy_(policy) {}

  // --- tier_index_table.cpp: keys, nodes, links. Each expects the mutex to be held.
  static std::uint32_t hash_of(const BlockKey& key);
  NodeId find(const BlockKey& key, std::uint32_t hash) const;
  NodeId find(const BlockKey& key) const { return find(key, hash_of(key)); }
  /// Calls `visit(i, node)` for each key until it answers false; the next ones are on their way.
  template <typename F>
  void look_up(std::span<const BlockKey> keys, F visit) const;
  void add_cell(std::uint32_t hash, NodeId node);
  void remove_cell(NodeId node);
  NodeId add_node(const BlockKey& key, State state);
  void remove_node(NodeId id);
  /// `child` continues `parent_key` from now on, unless it is known to continue something.
  void link(NodeId child, const BlockKey& parent_key);
  void unlink(NodeId child);
  /// The record of a node is gone: a ghost if others continue it, else no node any more.
  void drop(NodeId id);
  /// Room for as many slots; on an error everything is as before.
  Status grow(std::uint64_t slots);

  // --- tier_index_victims.cpp: who goes first. Each expects the mutex to be held.
  void use(NodeId id, std::uint64_t now);
  /// A ready record may be displaced, unless it is leased.
  void offer(NodeId id);
  /// It may not any more, or is none.
  void withdraw(NodeId id);
  /// Who goes next; kNoNode: nobody may.
  NodeId victim();
  void shrink_protected();

  bool is_leased(NodeId id) const { return slots_[nodes_[id].slot].leases != 0; }
  void hold(std::uint32_t slot);
  /// True where the record of the slot was erased and nobody holds it any more.
  bool unhold(std::uint32_t slot);
  void free_slot(std::uint32_t slot);
  /// Drops a record. True where its slot is free now, false where leases hold it.
  bool forget(NodeId id);
  /// A slot for a new record, and whose it was.
  std::int64_t take_slot(std::vector<KeyInSlot>& displaced);
  Status check_all_pending(std::span<const BlockKey> keys) const;
  Status check_nodes() const;
  Status check_slots() const;

  mutable std::mutex mutex_;
  const EvictionPolicy policy_;
  LazyArray<Node> nodes_;  ///< 0 is none
  LazyArray<Cell> cells_;
  LazyArray<Slot> slots_;  ///< of the largest size ever: records above slots_open_ may be leased
  FreeSlots free_;         ///< below slots_open_
  FreeSlots closed_;       ///< below slots_open_; as free, and given out by none but restore()
  RankHeap order_;         ///< ready nodes; leased ones may be missing. Its ranks may be too low
  RankHeap protected_;     ///< slru: nodes of the protected segment, by the time of their use
  std::unordered_map<Ticket, std::vector<KeyInSlot>> leases_;
  std::uint64_t slots_open_ = 0;  ///< slots below this are given out
  NodeId unused_ = kNoNode;
  NodeId nodes_touched_ = 0;  ///< nodes 1 .. this have been used
  std::uint32_t cell_mask_ = 0;
  std::uint64_t time_ = 0;  ///< of the last event; goes up by one for each
  Ticket last_ticket_ = 0;
  std::uint64_t ready_ = 0;
  std::uint64_t pending_ = 0;
  std::uint64_t ghosts_ = 0;
  std::uint64_t leased_ = 0;
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
