// Block keys, copies in tiers, and writeback.
#include <algorithm>
#include <string>
#include <utility>

#include "pool/blocks.h"

namespace kvelastic {

// --- keys and copies ---------------------------------------------------------------------------

Status Blocks::name(std::span<const BlockId> ids, std::span<const BlockKey> keys) {
  for (const BlockId id : ids) {
    const Result<BlockPosition> at = find(id);
    if (!at) return at.error();
    if (!is_taken(*at)) {
      return Error{Errc::kUnknownBlock,
                   "block " + std::to_string(id) + " is free: it holds nothing to be named"};
    }
  }
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const BlockPosition at = *find(ids[i]);
    Identity& identity = identities_[dense(at)];
    if (identity.key == keys[i]) continue;
    has_identities_ = true;
    set_clean(at, false);
    if (is_cached(at)) list_of(at).remove(dense(at));
    identity.key = keys[i];
    identity.ticket = 0;
    if (is_cached(at)) list_of(at).append(dense(at));
  }
  return ok();
}

std::uint64_t Blocks::mark_clean(std::span<const BlockId> ids, std::span<const BlockKey> keys) {
  std::uint64_t marked = 0;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const Result<BlockPosition> at = find(ids[i]);
    if (!at || !is_taken(*at) || keys[i].is_none() || identities_[dense(*at)].key != keys[i]) {
      continue;
    }
    set_clean(*at, true);
    ++marked;
  }
  return marked;
}

std::uint64_t Blocks::forget_copies() {
  std::uint64_t forgotten = 0;
  if (!has_identities_) return forgotten;
  for (PageIndex index = 0; index < fresh_; ++index) {
    for (std::uint32_t slot = 0; slot < blocks_per_page_; ++slot) {
      const BlockPosition at{index, slot};
      if (!is_taken(at) || !identities_[dense(at)].clean) continue;
      set_clean(at, false);
      ++forgotten;
    }
  }
  // A writeback in progress goes to a tier that no longer has the copies.
  for (const auto& [ticket, blocks] : writeback_) {
    for (const std::uint32_t block : blocks) {
      if (identities_[block].ticket == ticket) identities_[block].ticket = 0;
    }
  }
  return forgotten;
}

/// A cached block keeps its order by time: among the clean blocks it is the newest, because dirty
/// blocks are cleaned oldest first.
void Blocks::set_clean(BlockPosition at, bool clean) {
  Identity& identity = identities_[dense(at)];
  if (identity.clean == clean) return;
  if (!is_cached(at)) {
    identity.clean = clean;
    return;
  }
  const std::uint32_t cached_at_ms = cached_at_ms_[dense(at)];
  unlist(at.page);
  remove_cached(at);
  identity.clean = clean;
  add_cached(at);
  cached_at_ms_[dense(at)] = cached_at_ms;
  enlist(at.page);
}

// --- writeback -----------------------------------------------------------------------------------

/// Pre: the block is cached.
bool Blocks::can_write_back(BlockPosition at) const {
  const Identity& identity = identities_[dense(at)];
  return !identity.clean && identity.ticket == 0 && !identity.key.is_none();
}

/// Pre: its page is unlisted.
void Blocks::write_back(BlockPosition at, WritebackBatch& batch) {
  Identity& identity = identities_[dense(at)];
  identity.ticket = batch.ticket;
  batch.ids.push_back(id_of(at));
  batch.keys.push_back(identity.key);
  ++pages_[at.page].reading;
}

void Blocks::write_back_by_pages(std::uint64_t most, WritebackBatch& batch) {
  std::vector<PageIndex> seen;
  // Allocate before a page is unlisted: a failure must change nothing.
  seen.reserve(evictable_pages_);
  while (batch.ids.size() < most) {
    const std::optional<PageIndex> index = evictable_.lowest_from(1);
    if (!index) break;
    unlist(*index);  // until the end, so that a page without blocks to copy is checked only once
    seen.push_back(*index);
    std::uint32_t left = pages_[*index].cached;
    for (std::uint32_t slot = 0; left > 0 && batch.ids.size() < most; ++slot) {
      const BlockPosition at{*index, slot};
      if (!is_cached(at)) continue;
      --left;
      if (can_write_back(at)) write_back(at, batch);
    }
  }
  for (const PageIndex index : seen) enlist(index);
}

WritebackBatch Blocks::begin_writeback(std::uint64_t most, WriteFirst first) {
  WritebackBatch batch;
  if (!has_identities_ || most == 0) return batch;
  most = std::min(most, copyable_blocks());
  batch.ids.reserve(most);
  batch.keys.reserve(most);
  std::vector<std::uint32_t> blocks;
  blocks.reserve(most);
  if (++newest_ticket_ == 0) ++newest_ticket_;
  auto& kept = writeback_[newest_ticket_];  // allocate before anything changes
  batch.ticket = newest_ticket_;
  if (first == WriteFirst::kOfOnePage) write_back_by_pages(most, batch);
  const BlockList& copyable = lists_[kCopyable];
  for (std::uint32_t at = copyable.oldest(); at != 0 && batch.ids.size() < most;
       at = copyable.after(at)) {
    const BlockPosition block = position_of(at - 1);
    if (!can_write_back(block)) continue;
    unlist(block.page);
    write_back(block, batch);
    enlist(block.page);
  }
  for (const BlockId id : batch.ids) blocks.push_back(dense(*find(id)));
  kept = std::move(blocks);
  writeback_blocks_ += batch.ids.size();
  if (batch.ids.empty()) writeback_.erase(std::exchange(batch.ticket, 0));
  return batch;
}

std::vector<std::uint8_t> Blocks::still_unchanged(std::uint32_t ticket) const {
  std::vector<std::uint8_t> still;
  const auto found = writeback_.find(ticket);
  if (found == writeback_.end()) return still;
  for (const std::uint32_t block : found->second) {
    still.push_back(identities_[block].ticket == ticket ? 1 : 0);
  }
  return still;
}

std::uint64_t Blocks::end_writeback(std::uint32_t ticket, std::span<const std::uint8_t> copied) {
  const auto found = writeback_.find(ticket);
  if (found == writeback_.end()) return 0;
  const std::vector<std::uint32_t> blocks = std::move(found->second);
  writeback_.erase(found);
  writeback_blocks_ -= blocks.size();
  std::uint64_t cleaned = 0;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const BlockPosition at = position_of(blocks[i]);
    unlist(at.page);
    --pages_[at.page].reading;
    enlist(at.page);
    Identity& identity = identities_[blocks[i]];
    if (identity.ticket != ticket) continue;
    identity.ticket = 0;
    if (copied[i] == 0 || !is_taken(at)) continue;
    set_clean(at, true);
    ++cleaned;
  }
  return cleaned;
}

Status Blocks::check_copies() const {
  const auto broken = [](std::string what) { return Status(Error{Errc::kIntegrity, what}); };
  std::unordered_map<PageIndex, std::uint32_t> reading;
  std::uint64_t blocks_of_tickets = 0;
  for (const auto& [ticket, blocks] : writeback_) {
    blocks_of_tickets += blocks.size();
    for (const std::uint32_t block : blocks) ++reading[position_of(block).page];
  }
  if (blocks_of_tickets != writeback_blocks_)
    return broken("blocks under writeback are not those of the tickets");
  std::uint64_t clean_total = 0, clean_pages = 0;
  for (PageIndex index = 0; index < fresh_; ++index) {
    const Page& page = pages_[index];
    const auto read = reading.find(index);
    if (page.reading != (read == reading.end() ? 0 : read->second)) {
      return broken("page " + std::to_string(index) + " counts " + std::to_string(page.reading) +
                    " blocks that are read");
    }
    if (page.reading > 0 && page.state != PageState::kMapped) {
      return broken("page " + std::to_string(index) + " is read and not mapped");
    }
    std::uint32_t clean = 0;
    for (std::uint32_t slot = 0; has_identities_ && slot < blocks_per_page_; ++slot) {
      const BlockPosition at{index, slot};
      clean += is_cached(at) && identities_[dense(at)].clean ? 1 : 0;
    }
    if (clean != page.clean) {
      return broken("page " + std::to_string(index) + " counts " + std::to_string(page.clean) +
                    " clean blocks and has " + std::to_string(clean));
    }
    clean_total += clean;
    clean_pages += page.state == PageState::kMapped && page.used == 0 && page.cached > 0 &&
                           page.cached == clean && page.reading == 0
                       ? 1
                       : 0;
  }
  if (clean_total != clean_blocks_ || clean_pages != clean_page_count_) {
    return broken("clean blocks and pages are " + std::to_string(clean_total) + " and " +
                  std::to_string(clean_pages) + ", the totals say " +
                  std::to_string(clean_blocks_) + " and " + std::to_string(clean_page_count_));
  }
  return ok();
}

}  // namespace kvelastic
