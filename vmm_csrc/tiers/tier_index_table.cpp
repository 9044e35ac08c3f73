// TierIndex: keys, nodes, and who continues whom.
#include <algorithm>
#include <bit>

#include "tiers/tier_index.h"

namespace kvelastic {

void TierIndex::add_cell(std::uint32_t hash, NodeId node) {
  std::uint32_t at = hash & cell_mask_;
  while (cells_[at].node != kNoNode) at = (at + 1) & cell_mask_;
  cells_[at] = {hash, node};
}

void TierIndex::remove_cell(NodeId node) {
  std::uint32_t hole = nodes_[node].hash & cell_mask_;
  while (cells_[hole].node != node) hole = (hole + 1) & cell_mask_;
  // What lies behind moves up, unless it would come before its home; so no cell is left that says
  // "removed", and a search ends at the first empty one.
  for (std::uint32_t at = (hole + 1) & cell_mask_; cells_[at].node != kNoNode;
       at = (at + 1) & cell_mask_) {
    const std::uint32_t from_home = (at - cells_[at].hash) & cell_mask_;
    const std::uint32_t from_hole = (at - hole) & cell_mask_;
    if (from_home < from_hole) continue;
    cells_[hole] = cells_[at];
    hole = at;
  }
  cells_[hole] = {0, kNoNode};
}

TierIndex::NodeId TierIndex::add_node(const BlockKey& key, State state) {
  NodeId id = unused_;
  if (id != kNoNode) {
    unused_ = nodes_[id].parent;
  } else {
    id = ++nodes_touched_;
  }
  const std::uint32_t hash = hash_of(key);
  nodes_[id] = {key, {}, hash, 0, kNoNode, 0, state};
  add_cell(hash, id);
  if (state == State::kGhost) ++ghosts_;
  return id;
}

void TierIndex::remove_node(NodeId id) {
  remove_cell(id);
  nodes_[id].state = State::kUnused;
  nodes_[id].parent = unused_;
  unused_ = id;
}

void TierIndex::link(NodeId child, const BlockKey& parent_key) {
  if (nodes_[child].parent != kNoNode || parent_key.is_none()) return;
  if (nodes_[child].key == parent_key) return;
  NodeId parent = find(parent_key);
  if (parent == kNoNode) parent = add_node(parent_key, State::kGhost);
  nodes_[child].parent = parent;
  ++nodes_[parent].children;
}

void TierIndex::unlink(NodeId child) {
  const NodeId id = nodes_[child].parent;
  if (id == kNoNode) return;
  nodes_[child].parent = kNoNode;
  Node& parent = nodes_[id];
  if (--parent.children != 0) return;
  // A leaf now, and as old as its child: often the next one to be displaced.
  __builtin_prefetch(&cells_[parent.hash & cell_mask_]);
  __builtin_prefetch(&slots_[parent.slot]);
  __builtin_prefetch(&nodes_[parent.parent]);
  if (parent.state == State::kGhost) {
    --ghosts_;
    remove_node(id);
  } else if (order_.contains(id) && parent.rank() < order_.known_rank(id)) {
    order_.update(id, parent.rank());  // a leaf now, and it was known as an inner one
  }
}

void TierIndex::drop(NodeId id) {
  withdraw(id);
  unlink(id);
  Node& node = nodes_[id];
  if (node.children == 0) {
    remove_node(id);
    return;
  }
  node.state = State::kGhost;
  ++ghosts_;
}

Status TierIndex::grow(std::uint64_t slots) {
  if (slots <= slots_.size() && cells_.size() != 0) return ok();
  // A record and a ghost for each slot, and none. Cells are never more than half full.
  const std::uint64_t nodes = 2 * slots + 1;
  if (Status grown = nodes_.grow(nodes); !grown) return grown;
  if (Status grown = order_.grow(nodes); !grown) return grown;
  if (policy_ == EvictionPolicy::kSlru) {
    if (Status grown = protected_.grow(nodes); !grown) return grown;
  }
  if (Status grown = free_.grow(slots); !grown) return grown;
  if (Status grown = closed_.grow(slots); !grown) return grown;
  LazyArray<Cell> cells;
  if (Status made = cells.allocate(std::bit_ceil(2 * nodes)); !made) return made;
  if (Status grown = slots_.grow(slots); !grown) return grown;
  cells_.swap(cells);
  cell_mask_ = static_cast<std::uint32_t>(cells_.size() - 1);
  for (NodeId id = 1; id <= nodes_touched_; ++id) {
    if (nodes_[id].state != State::kUnused) add_cell(nodes_[id].hash, id);
  }
  return ok();
}

}  // namespace kvelastic
