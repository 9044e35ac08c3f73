// TierIndex: uses, holds of slots, and who goes first.
#include "tiers/tier_index.h"

namespace kvelastic {

void TierIndex::use(NodeId id, std::uint64_t now) {
  Node& node = nodes_[id];
  const std::uint32_t before = node.history.level;
  node.history = history_after_use(policy_, node.history, now);
  if (policy_ == EvictionPolicy::kSlru && before != kProtected) {
    protected_.push(id, {0, node.history.time});
  }
}

void TierIndex::offer(NodeId id) {
  if (!order_.contains(id)) order_.push(id, nodes_[id].rank());
}

void TierIndex::withdraw(NodeId id) {
  order_.remove(id);
  if (policy_ == EvictionPolicy::kSlru) protected_.remove(id);
}

TierIndex::NodeId TierIndex::victim() {
  if (policy_ == EvictionPolicy::kSlru) shrink_protected();
  while (!order_.empty()) {
    const RankHeap::Entry top = order_.top();
    if (is_held(top.node)) {
      order_.remove(top.node);  // the end of its last hold offers it again
      continue;
    }
    const Rank rank = nodes_[top.node].rank();
    if (rank == top.rank()) return top.node;
    order_.update(top.node, rank);  // it was used, or is continued, since
  }
  return kNoNode;
}

void TierIndex::shrink_protected() {
  const std::uint64_t most = protected_most(slots_open_);
  while (protected_.size() > most) {
    const RankHeap::Entry top = protected_.top();
    Node& node = nodes_[top.node];
    if (node.history.time != top.time) {
      protected_.update(top.node, {0, node.history.time});  // it was used since
      continue;
    }
    protected_.remove(top.node);
    node.history = history_after_demotion(++time_);
    if (order_.contains(top.node) && node.rank() < order_.known_rank(top.node)) {
      order_.update(top.node, node.rank());
    }
  }
}

void TierIndex::add_hold(std::uint32_t slot) {
  if (slots_[slot].holds++ == 0) ++held_;
}

bool TierIndex::unhold(std::uint32_t slot) {
  Slot& of = slots_[slot];
  if (--of.holds != 0) return false;
  --held_;
  if (of.node != kNoNode) {
    if (nodes_[of.node].state == State::kReady) offer(of.node);
    return false;
  }
  free_slot(slot);
  return true;
}

void TierIndex::free_slot(std::uint32_t slot) {
  if (slot < slots_open_) free_.add(slot);
}

bool TierIndex::forget(NodeId id) {
  Node& node = nodes_[id];
  --(node.state == State::kReady ? ready_ : pending_);
  const std::uint32_t slot = node.slot;
  slots_[slot].node = kNoNode;
  drop(id);
  if (slots_[slot].holds != 0) return false;
  free_slot(slot);
  return true;
}

std::optional<KeyInSlot> TierIndex::displace_next() {
  const NodeId id = victim();
  if (id == kNoNode) return std::nullopt;
  const KeyInSlot object{nodes_[id].key, nodes_[id].slot};
  ++displaced_;
  forget(id);
  return object;
}

std::int64_t TierIndex::take_slot(std::vector<KeyInSlot>& displaced) {
  if (free_.size() == 0) {
    const auto object = displace_next();
    if (!object) return kNoRoom;
    displaced.push_back(*object);
  }
  return *free_.take_lowest();
}

}  // namespace kvelastic
