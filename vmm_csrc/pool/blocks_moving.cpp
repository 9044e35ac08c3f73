// Blocks that cannot be released at once: pinned blocks, and blocks that move to another page.
#include "pool/blocks.h"

namespace kvelastic {

// --- pins --------------------------------------------------------------------------------------

Result<PinTicket> Blocks::pin(std::span<const BlockId> ids, PinKind kind) {
  std::vector<std::uint32_t> blocks;
  blocks.reserve(ids.size());
  for (const BlockId id : ids) {
    Result<BlockPosition> at = find(id);
    if (!at) return at.error();
    if (!is_taken(*at)) {
      return Error{Errc::kUnknownBlock,
                   "block " + std::to_string(id) + " is free: there is nothing to pin"};
    }
    blocks.push_back(dense(*at));
  }
  const PinTicket ticket = pins_.add(blocks, kind);
  // Cached blocks are used while they are pinned, and cached again afterwards.
  for (const std::uint32_t block : blocks) {
    const BlockPosition at = position_of(block);
    if (!is_cached(at)) continue;
    cached_word(at) &= ~(std::uint64_t{1} << (at.slot % 64));
    make_used(at);
    pins_.set_then(block, Pins::Then::kCached);
  }
  return ticket;
}

bool Blocks::unpin(PinTicket ticket) {
  std::vector<BlockId> unused, unused_cached;
  unused.reserve(pins_.blocks_of(ticket));  // allocate before anything changes
  unused_cached.reserve(pins_.blocks_of(ticket));
  const bool ended = pins_.end(ticket, [&](std::uint32_t block, Pins::Then then) {
    if (then == Pins::Then::kFree) unused.push_back(id_of(position_of(block)));
    if (then == Pins::Then::kCached) unused_cached.push_back(id_of(position_of(block)));
  });
  (void)free(unused);
  (void)cache(unused_cached);
  return ended;
}

std::uint64_t Blocks::reusable_blocks() const {
  if (closed_count_ == 0) return pins_.reusable();
  std::uint64_t count = 0;
  pins_.each_reusable([&](std::uint32_t block) {
    count += pages_[position_of(block).page].closed ? 0 : 1;
    return true;
  });
  return count;
}

void Blocks::reuse(std::uint64_t count, std::vector<BlockId>& out,
                   std::vector<EvictedBlock>& evicted) {
  if (count == 0) return;
  pins_.each_reusable([&](std::uint32_t block) {
    const BlockPosition at = position_of(block);
    if (pages_[at.page].closed) return true;
    if (is_waiting(at, Pins::Then::kCached)) {
      evicted.push_back({id_of(at), is_clean(at)});
    }
    forget(at);
    pins_.set_then(block, Pins::Then::kUsed);
    out.push_back(id_of(at));
    return --count > 0;
  });
}

void Blocks::evict_waiting(std::vector<EvictedBlock>& evicted) {
  for (const std::uint32_t block : pins_.waiting_blocks(true)) {
    pins_.set_then(block, Pins::Then::kFree);
    evicted.push_back({id_of(position_of(block)), is_clean(position_of(block))});
  }
}

std::vector<BlockId> Blocks::waiting_ids(bool strict) const {
  std::vector<BlockId> ids;
  const auto see = [&](std::uint32_t block) {
    ids.push_back(id_of(position_of(block)));
    return true;
  };
  if (strict) {
    for (const std::uint32_t block : pins_.waiting_blocks()) see(block);
  } else {
    pins_.each_reusable(see);
  }
  return ids;
}

void Blocks::drop_pins(std::vector<EvictedBlock>& evicted) {
  evict_waiting(evicted);
  const std::vector<BlockId> unused = waiting_ids();
  pins_.drop();
  (void)free(unused);
}

// --- compaction ------------------------------------------------------------------------------

/// Clean pages are not worth a move: evicting them loses nothing.
std::optional<PageIndex> Blocks::compactable_page() const {
  std::optional<PageIndex> index = evictable_.lowest_from(1);
  if (!index) index = clean_pages_.lowest_from(1);
  if (!index) return std::nullopt;
  const Page& page = pages_[*index];
  // Parked pages do not count as holes: filling one to empty another gains nothing.
  const std::uint64_t own = page.closed ? 0 : free_in(page);
  const std::uint64_t holes = free_blocks_ - parked_.size() * blocks_per_page_ - own;
  if (holes < page.cached) return std::nullopt;
  return index;
}

bool Blocks::take_compaction(std::vector<BlockMove>& moves) {
  const std::optional<PageIndex> index = compactable_page();
  if (!index) return false;
  unlist(*index);  // so that it is not chosen as a hole
  std::vector<BlockId> holes;
  alloc(pages_[*index].cached, Fit::kFullest, holes);
  enlist(*index);
  auto hole = holes.begin();
  for (std::uint32_t slot = 0; hole != holes.end(); ++slot) {
    if (is_cached({*index, slot})) moves.push_back({geometry_.first_id(*index) + slot, *hole++});
  }
  return true;
}

bool Blocks::finish_move(const BlockMove& move, bool copied) {
  const BlockPosition from = *find(move.from);
  const BlockPosition to = *find(move.to);
  const bool moves = copied && is_cached(from);
  unlist(to.page);
  --pages_[to.page].used;
  --used_blocks_;
  if (moves) {
    const bool clean = is_clean(from);
    if (has_identities_) identities_[dense(to)] = {identities_[dense(from)].key, 0, clean};
    ++pages_[to.page].cached;
    pages_[to.page].clean += clean ? 1 : 0;
    cached_word(to) |= std::uint64_t{1} << (to.slot % 64);
    list_of(from).replace(dense(from), dense(to));
    cached_at_ms_[dense(to)] = cached_at_ms_[dense(from)];
  } else {
    taken_word(to) &= ~(std::uint64_t{1} << (to.slot % 64));
  }
  enlist(to.page);
  if (!moves) return false;
  unlist(from.page);
  const std::uint64_t mask = ~(std::uint64_t{1} << (from.slot % 64));
  taken_word(from) &= mask;
  cached_word(from) &= mask;
  --pages_[from.page].cached;
  pages_[from.page].clean -= is_clean(from) ? 1 : 0;
  enlist(from.page);
  return true;
}

}  // namespace kvelastic
