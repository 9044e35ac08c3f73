#include "tiers/tier_index.h"

#include <algorithm>

namespace kvelastic {
namespace {

Error no_key_given() {
  return {Errc::kInvalidArgument, "16 zero bytes are the key of no block; leave such blocks out"};
}

}  // namespace

Result<std::shared_ptr<TierIndex>> TierIndex::create(std::uint64_t slots, EvictionPolicy policy) {
  if (slots > kMostSlots) {
    return Error{Errc::kInvalidArgument, std::to_string(slots) + " slots; an index has at most " +
                                             std::to_string(kMostSlots)};
  }
  std::shared_ptr<TierIndex> index(new TierIndex(policy));
  if (Status grown = index->grow(slots); !grown) return grown.error();
  index->slots_open_ = slots;
  for (std::uint64_t slot = 0; slot < slots; ++slot) index->free_.add(slot);
  return index;
}

void TierIndex::has(std::span<const BlockKey> keys, std::span<bool> answers) const {
  const std::lock_guard lock(mutex_);
  look_up(keys, [&](std::size_t i, NodeId id) {
    answers[i] = id != kNoNode && nodes_[id].state == State::kReady;
    return true;
  });
}

TierIndex::Leading TierIndex::leading(std::span<const BlockKey> keys) const {
  const std::lock_guard lock(mutex_);
  Leading counts;
  look_up(keys, [&](std::size_t i, NodeId id) {
    const State state = id == kNoNode ? State::kUnused : nodes_[id].state;
    if (state != State::kReady && state != State::kPending) return false;
    if (state == State::kReady && counts.ready == i) ++counts.ready;
    ++counts.known;
    return true;
  });
  return counts;
}

std::size_t TierIndex::match(std::span<const BlockKey> keys) {
  const std::lock_guard lock(mutex_);
  std::size_t count = 0;
  // Times decrease along the keys, from a time that no later event has.
  time_ += keys.size();
  look_up(keys, [&](std::size_t i, NodeId id) {
    if (id == kNoNode || nodes_[id].state != State::kReady) return false;
    use(id, time_ - i);
    ++count;
    return true;
  });
  return count;
}

TierIndex::Held TierIndex::hold(std::span<const BlockKey> keys) {
  const std::lock_guard lock(mutex_);
  Held result;
  result.slots.reserve(keys.size());
  std::vector<KeyInSlot> held;
  held.reserve(keys.size());
  std::vector<KeyInSlot>& kept = holds_[last_ticket_ + 1];  // nothing below can fail
  result.ticket = ++last_ticket_;
  time_ += keys.size();
  look_up(keys, [&](std::size_t i, NodeId id) {
    if (id == kNoNode || nodes_[id].state != State::kReady) return false;
    use(id, time_ - i);
    const std::uint32_t slot = nodes_[id].slot;
    add_hold(slot);
    held.push_back({keys[i], slot});
    result.slots.push_back(slot);
    return true;
  });
  kept = std::move(held);
  return result;
}

Result<std::vector<KeyInSlot>> TierIndex::release(Ticket ticket) {
  const std::lock_guard lock(mutex_);
  const auto found = holds_.find(ticket);
  if (found == holds_.end()) {
    return Error{Errc::kInvalidArgument, "hold " + std::to_string(ticket) +
                                             " has ended or never was; release each one once"};
  }
  std::vector<KeyInSlot>& held = found->second;
  // Keep the freed ones, in place of the others.
  std::erase_if(held, [&](const KeyInSlot& record) { return !unhold(record.slot); });
  std::vector<KeyInSlot> freed = std::move(held);
  holds_.erase(found);
  return freed;
}

Result<TierIndex::Claimed> TierIndex::claim(std::span<const BlockKey> keys, Chain chain) {
  for (const BlockKey& key : keys) {
    if (key.is_none()) return no_key_given();
  }
  const std::lock_guard lock(mutex_);
  Claimed claimed;
  claimed.slots.reserve(keys.size());
  claimed.displaced.reserve(keys.size());
  std::vector<std::uint32_t> held;
  held.reserve(keys.size() + 1);
  const auto hold_if_ready = [&](NodeId id) {
    if (id == kNoNode || nodes_[id].state != State::kReady) return;
    add_hold(nodes_[id].slot);
    held.push_back(nodes_[id].slot);
  };
  // Nothing below can fail. Keys of this call must not be displaced by it.
  look_up(keys, [&](std::size_t, NodeId id) {
    hold_if_ready(id);
    return true;
  });
  if (chain.is_chain) hold_if_ready(find(chain.after));

  // With a chain the first key counts as the youngest, as in match().
  const std::uint64_t before = time_;
  const std::uint64_t count = keys.size();
  time_ += count;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    NodeId id = find(keys[i]);
    if (id != kNoNode && nodes_[id].has_slot()) {
      claimed.slots.push_back(kThereAlready);
    } else {
      const std::int64_t slot = take_slot(claimed.displaced);
      claimed.slots.push_back(slot);
      if (slot == kNoRoom) continue;
      id = find(keys[i]);  // a ghost may have been removed with the displaced record
      if (id == kNoNode) {
        id = add_node(keys[i], State::kPending);
      } else {
        nodes_[id].state = State::kPending;
        --ghosts_;
      }
      Node& node = nodes_[id];
      node.slot = static_cast<std::uint32_t>(slot);
      node.history = history_of_new(before + (chain.is_chain ? count - i : i + 1));
      slots_[node.slot].node = id;
      ++pending_;
    }
    if (chain.is_chain) link(id, i == 0 ? chain.after : keys[i - 1]);
  }
  for (const std::uint32_t slot : held) unhold(slot);
  return claimed;
}

Status TierIndex::check_all_pending(std::span<const BlockKey> keys) const {
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const NodeId id = find(keys[i]);
    if (id == kNoNode || !nodes_[id].is_pending()) {
      return Error{Errc::kInvalidArgument,
                   "key " + std::to_string(i) + " of " + std::to_string(keys.size()) +
                       " is not pending; claim it first, and end that once"};
    }
  }
  return ok();
}

Result<std::vector<KeyInSlot>> TierIndex::commit(std::span<const BlockKey> keys) {
  const std::lock_guard lock(mutex_);
  if (Status all = check_all_pending(keys); !all) return all.error();
  std::vector<KeyInSlot> gone;
  std::size_t doomed = 0;
  look_up(keys, [&](std::size_t, NodeId id) {
    doomed += nodes_[id].state == State::kDoomed || nodes_[id].slot >= slots_open_ ? 1 : 0;
    return true;
  });
  gone.reserve(doomed);
  for (const BlockKey& key : keys) {
    const NodeId id = find(key);
    if (id == kNoNode || !nodes_[id].is_pending()) continue;  // named twice
    Node& node = nodes_[id];
    if (node.state == State::kDoomed || node.slot >= slots_open_) {
      gone.push_back({key, node.slot});
      forget(id);
      continue;
    }
    node.state = State::kReady;
    --pending_;
    ++ready_;
    offer(id);
  }
  return gone;
}

Status TierIndex::abandon(std::span<const BlockKey> keys) {
  const std::lock_guard lock(mutex_);
  if (Status all = check_all_pending(keys); !all) return all;
  for (const BlockKey& key : keys) {
    const NodeId id = find(key);
    if (id != kNoNode && nodes_[id].is_pending()) forget(id);
  }
  return ok();
}

std::int64_t TierIndex::slot_of(const BlockKey& key) const {
  const std::lock_guard lock(mutex_);
  const NodeId id = find(key);
  if (id == kNoNode || nodes_[id].state != State::kReady) return -1;
  return nodes_[id].slot;
}

std::vector<KeyInSlot> TierIndex::erase(std::span<const BlockKey> keys) {
  const std::lock_guard lock(mutex_);
  std::vector<KeyInSlot> freed;
  freed.reserve(keys.size());
  for (const BlockKey& key : keys) {
    const NodeId id = find(key);
    if (id == kNoNode) continue;
    Node& node = nodes_[id];
    if (node.state == State::kPending) node.state = State::kDoomed;
    if (node.state != State::kReady) continue;
    const std::uint32_t slot = node.slot;
    if (forget(id)) freed.push_back({key, slot});
  }
  return freed;
}

Result<bool> TierIndex::restore(const BlockKey& key, std::uint64_t slot, const BlockKey& parent) {
  if (key.is_none()) return no_key_given();
  const std::lock_guard lock(mutex_);
  if (slot >= slots_open_ || !(free_.contains(slot) || closed_.contains(slot))) return false;
  NodeId id = find(key);
  if (id != kNoNode && nodes_[id].has_slot()) return false;
  if (id == kNoNode) {
    id = add_node(key, State::kReady);
  } else {
    nodes_[id].state = State::kReady;
    --ghosts_;
  }
  free_.remove(slot);
  closed_.remove(slot);
  Node& node = nodes_[id];
  node.slot = static_cast<std::uint32_t>(slot);
  node.history = history_of_new(++time_);
  slots_[slot].node = id;
  ++ready_;
  link(id, parent);
  offer(id);
  return true;
}

std::vector<KeyInSlot> TierIndex::displace(std::uint64_t count) {
  const std::lock_guard lock(mutex_);
  std::vector<KeyInSlot> displaced;
  displaced.reserve(std::min(count, ready_));
  while (displaced.size() < count) {
    const auto record = displace_next();
    if (!record) break;
    displaced.push_back(*record);
  }
  return displaced;
}

std::vector<std::int64_t> TierIndex::close(std::uint64_t first, std::uint64_t count) {
  const std::lock_guard lock(mutex_);
  std::vector<std::int64_t> closed;
  closed.reserve(std::min(count, free_.size()));
  const std::uint64_t end =
      first >= slots_open_ ? first : first + std::min(count, slots_open_ - first);
  for (std::uint64_t slot = first; slot < end; ++slot) {
    if (!free_.contains(slot)) continue;
    free_.remove(slot);
    closed_.add(slot);
    closed.push_back(static_cast<std::int64_t>(slot));
  }
  return closed;
}

TierIndex::Closed TierIndex::close_by_policy(std::uint64_t count) {
  const std::lock_guard lock(mutex_);
  Closed closed;
  closed.slots.reserve(std::min(count, free_.size() + ready_));
  closed.displaced.reserve(std::min(count, ready_));
  while (closed.slots.size() < count) {
    const std::int64_t slot = take_slot(closed.displaced);
    if (slot == kNoRoom) break;
    closed_.add(static_cast<std::uint64_t>(slot));
    closed.slots.push_back(slot);
  }
  return closed;
}

Status TierIndex::open(std::span<const std::int64_t> slots) {
  const std::lock_guard lock(mutex_);
  for (const std::int64_t slot : slots) {
    if (slot < 0 || static_cast<std::uint64_t>(slot) >= slots_open_ ||
        !closed_.contains(static_cast<std::uint64_t>(slot))) {
      return Error{Errc::kInvalidArgument,
                   "slot " + std::to_string(slot) + " is not closed; open closed ones only"};
    }
  }
  for (const std::int64_t slot : slots) {
    closed_.remove(static_cast<std::uint64_t>(slot));
    free_.add(static_cast<std::uint64_t>(slot));
  }
  return ok();
}

Result<std::vector<KeyInSlot>> TierIndex::resize(std::uint64_t slots) {
  if (slots > kMostSlots) {
    return Error{Errc::kInvalidArgument, std::to_string(slots) + " slots; an index has at most " +
                                             std::to_string(kMostSlots)};
  }
  const std::lock_guard lock(mutex_);
  std::vector<KeyInSlot> displaced;
  if (slots >= slots_open_) {
    if (Status grown = grow(slots); !grown) return grown.error();
    for (std::uint64_t slot = slots_open_; slot < slots; ++slot) {
      // A slot that was above the size may still be written or held.
      if (slots_[slot].node == kNoNode && slots_[slot].holds == 0) free_.add(slot);
    }
    slots_open_ = slots;
    return displaced;
  }
  displaced.reserve(std::min(ready_, slots_open_ - slots));
  const std::uint64_t before = slots_open_;
  slots_open_ = slots;
  for (std::uint64_t slot = slots; slot < before; ++slot) {
    free_.remove(slot);
    closed_.remove(slot);
    const NodeId id = slots_[slot].node;
    if (id == kNoNode || nodes_[id].state != State::kReady) continue;
    const BlockKey key = nodes_[id].key;
    ++displaced_;
    if (forget(id)) displaced.push_back({key, static_cast<std::uint32_t>(slot)});
  }
  return displaced;
}

TierIndex::Stats TierIndex::stats() const {
  const std::lock_guard lock(mutex_);
  return {slots_open_, ready_, pending_, closed_.size(), held_, displaced_};
}

}  // namespace kvelastic
