// TierIndex: whether everything agrees.
#include "tiers/tier_index.h"

namespace kvelastic {
namespace {

Error broken(std::string what) {
  return {Errc::kIntegrity, "tier index: " + std::move(what)};
}

}  // namespace

Status TierIndex::check_integrity() const {
  const std::lock_guard lock(mutex_);
  if (Status nodes = check_nodes(); !nodes) return nodes;
  return check_slots();
}

Status TierIndex::check_nodes() const {
  std::vector<std::uint32_t> children(std::size_t{nodes_touched_} + 1, 0);
  std::uint64_t ready = 0, pending = 0, ghosts = 0, unused = 0, guarded = 0;
  for (NodeId id = 1; id <= nodes_touched_; ++id) {
    const Node& node = nodes_[id];
    const std::string name = "node " + std::to_string(id);
    const bool offered = order_.contains(id);
    const bool is_protected = policy_ == EvictionPolicy::kSlru && protected_.contains(id);
    if (is_protected) ++guarded;
    if (node.state != State::kReady && (offered || is_protected)) {
      return broken(name + " is not ready and could be displaced");
    }
    if (node.state == State::kUnused) {
      ++unused;
      continue;
    }
    if (node.key.is_none() || find(node.key) != id)
      return broken(name + " is not found by its key");
    if (node.parent != kNoNode) {
      if (node.parent > nodes_touched_ || nodes_[node.parent].state == State::kUnused) {
        return broken(name + " continues a node that is unused");
      }
      ++children[node.parent];
    }
    if (node.state == State::kGhost) {
      ++ghosts;
      if (node.children == 0 || node.parent != kNoNode) {
        return broken(name + " is a ghost without children, or with a parent");
      }
      continue;
    }
    if (node.slot >= slots_.size() || slots_[node.slot].node != id) {
      return broken(name + " is not in its slot");
    }
    if (node.is_pending()) {
      ++pending;
      continue;
    }
    ++ready;
    if (node.slot >= slots_open_) return broken(name + " is ready above the slots");
    if (!offered && !is_held(id)) return broken(name + " could never be displaced");
    if (offered && node.rank() < order_.known_rank(id)) {
      return broken(name + " goes later than its rank says");
    }
    if (is_protected != (policy_ == EvictionPolicy::kSlru && node.history.level == kProtected)) {
      return broken(name + " is in one segment and counted in the other");
    }
  }
  for (NodeId id = 1; id <= nodes_touched_; ++id) {
    if (nodes_[id].state != State::kUnused && nodes_[id].children != children[id]) {
      return broken("node " + std::to_string(id) + " has " + std::to_string(children[id]) +
                    " children and counts " + std::to_string(nodes_[id].children));
    }
  }
  std::uint64_t listed = 0;
  for (NodeId id = unused_; id != kNoNode && listed <= unused; id = nodes_[id].parent) ++listed;
  if (listed != unused) return broken("the list of unused nodes has lost some");
  std::uint64_t cells = 0;
  for (std::size_t at = 0; at < cells_.size(); ++at) cells += cells_[at].node != kNoNode ? 1 : 0;
  if (cells != ready + pending + ghosts) return broken("cells and keys are not as many");
  if (ready != ready_ || pending != pending_ || ghosts != ghosts_) {
    return broken("counts of records or ghosts are wrong");
  }
  if (ghosts > ready + pending) return broken("more ghosts than records");
  if (!order_.is_ordered() || order_.size() > ready)
    return broken("the order of eviction is wrong");
  if (policy_ == EvictionPolicy::kSlru &&
      (!protected_.is_ordered() || protected_.size() != guarded)) {
    return broken("the protected segment is wrong");
  }
  return ok();
}

Status TierIndex::check_slots() const {
  std::vector<std::uint32_t> holds(slots_.size(), 0);
  for (const auto& [ticket, held] : holds_) {
    for (const KeyInSlot& record : held) ++holds[record.slot];
  }
  std::uint64_t held = 0, taken = 0, free = 0, closed = 0;
  for (std::uint64_t slot = 0; slot < slots_.size(); ++slot) {
    const Slot& of = slots_[slot];
    const std::string name = "slot " + std::to_string(slot);
    if (of.holds != holds[slot]) return broken(name + " is held by other holds than it counts");
    if (of.holds != 0) ++held;
    if (of.node != kNoNode) {
      ++taken;
      if (nodes_[of.node].slot != slot || !nodes_[of.node].has_slot()) {
        return broken(name + " has a record that is elsewhere");
      }
    }
    const bool is_empty = slot < slots_open_ && of.node == kNoNode && of.holds == 0;
    const bool is_closed = closed_.contains(slot);
    const bool is_free = is_empty && !is_closed;
    if (is_free) ++free;
    if (is_closed) ++closed;
    if (is_closed && !is_empty) return broken(name + " is closed and taken");
    if (is_free != free_.contains(slot)) return broken(name + " is free and taken");
  }
  if (taken != ready_ + pending_) return broken("records and taken slots are not as many");
  if (held != held_ || free != free_.size() || closed != closed_.size())
    return broken("counts of slots are wrong");
  return ok();
}

}  // namespace kvelastic
