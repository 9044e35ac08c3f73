// Block keys, copies in tiers, and writeback.
#include <algorithm>
#include <string>
#include <utility>

#include "pool/blocks.h"

namespace kvelastic {

// --- keys and copies ---------------------------------------------------------------------------

Status Blocks::name(std::span<const BlockId> ids, std::span<const BlockKey> keys) {
  for (const BlockId id : ids) {
    const Result<Place> at = find(id);
    if (!at) return at.error();
    if (!is_taken(*at)) {
      return Error{Errc::kUnknownBlock,
                   "block " + std::to_string(id) + " is free: it holds nothing to be named"};
    }
  }
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const Place at = *find(ids[i]);
    Identity& identity = identities_[dense(at)];
    if (identity.key == keys[i]) continue;
    has_identities_ = true;
    set_clean(at, false);
    if (is_cached(at)) list_of(at).remove(dense(at));
    identity.key = keys[i];
    identity.leaving = 0;
    if (is_cached(at)) list_of(at).append(dense(at));
  }
  return ok();
}

std::uint64_t Blocks::mark_clean(std::span<const BlockId> ids, std::span<const BlockKey> keys) {
  std::uint64_t marked = 0;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const Result<Place> at = find(ids[i]);
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
      const Place at{index, slot};
      if (!is_taken(at) || !identities_[dense(at)].clean) continue;
      set_clean(at, false);
      ++forgotten;
    }
  }
  // A writeback in progress goes to a tier that no longer has the copies.
  for (const auto& [ticket, blocks] : leaving_) {
    for (const std::uint32_t block : blocks) {
      if (identities_[block].leaving == ticket) identities_[block].leaving = 0;
    }
  }
  return forgotten;
}

/// A cached block keeps its order by time: among the clean blocks it is the newest, because dirty
/// blocks are cleaned oldest first.
void Blocks::set_clean(Place at, bool clean) {
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

// --- leaving -----------------------------------------------------------------------------------

/// Pre: the block is cached.
bool Blocks::can_leave(Place at) const {
  const Identity& identity = identities_[dense(at)];
  return !identity.clean && identity.leaving == 0 && !identity.key.is_none();
}

/// Pre: its page is unlisted.
void Blocks::leave(Place at, Leaving& leaving) {
  Identity& identity = identities_[dense(at)];
  identity.leaving = leaving.ticket;
  leaving.ids.push_back(id_of(at));
  leaving.keys.push_back(identity.key);
  ++pages_[at.page].reading;
}

void Blocks::leave_by_pages(std::uint64_t most, Leaving& leaving) {
  std::vector<PageIndex> seen;
  // Allocate before a page is unlisted: a failure must change nothing.
  seen.reserve(evictable_pages_);
  while (leaving.ids.size() < most) {
    const std::optional<PageIndex> index = evictable_.lowest_from(1);
    if (!index) break;
    unlist(*index);  // until the end, so that a page without blocks to copy is checked only once
    seen.push_back(*index);
    std::uint32_t left = pages_[*index].cached;
    for (std::uint32_t slot = 0; left > 0 && leaving.ids.size() < most; ++slot) {
      const Place at{*index, slot};
      if (!is_cached(at)) continue;
      --left;
      if (can_leave(at)) leave(at, leaving);
    }
  }
  for (const PageIndex index : seen) enlist(index);
}

Leaving Blocks::begin_leaving(std::uint64_t most, LeaveFirst first) {
  Leaving leaving;
  if (!has_identities_ || most == 0) return leaving;
  most = std::min(most, copyable_blocks());
  leaving.ids.reserve(most);
  leaving.keys.reserve(most);
  std::vector<std::uint32_t> blocks;
  blocks.reserve(most);
  if (++newest_leaving_ == 0) ++newest_leaving_;
  auto& kept = leaving_[newest_leaving_];  // allocate before anything changes
  leaving.ticket = newest_leaving_;
  if (first == LeaveFirst::kOfOnePage) leave_by_pages(most, leaving);
  const BlockList& copyable = lists_[kCopyable];
  for (std::uint32_t at = copyable.oldest(); at != 0 && leaving.ids.size() < most;
       at = copyable.after(at)) {
    const Place block = place(at - 1);
    if (!can_leave(block)) continue;
    unlist(block.page);
    leave(block, leaving);
    enlist(block.page);
  }
  for (const BlockId id : leaving.ids) blocks.push_back(dense(*find(id)));
  kept = std::move(blocks);
  leaving_blocks_ += leaving.ids.size();
  if (leaving.ids.empty()) leaving_.erase(std::exchange(leaving.ticket, 0));
  return leaving;
}

std::vector<std::uint8_t> Blocks::still_leaving(std::uint32_t ticket) const {
  std::vector<std::uint8_t> still;
  const auto found = leaving_.find(ticket);
  if (found == leaving_.end()) return still;
  for (const std::uint32_t block : found->second) {
    still.push_back(identities_[block].leaving == ticket ? 1 : 0);
  }
  return still;
}

std::uint64_t Blocks::end_leaving(std::uint32_t ticket, std::span<const std::uint8_t> copied) {
  const auto found = leaving_.find(ticket);
  if (found == leaving_.end()) return 0;
  const std::vector<std::uint32_t> blocks = std::move(found->second);
  leaving_.erase(found);
  leaving_blocks_ -= blocks.size();
  std::uint64_t cleaned = 0;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const Place at = place(blocks[i]);
    unlist(at.page);
    --pages_[at.page].reading;
    enlist(at.page);
    Identity& identity = identities_[blocks[i]];
    if (identity.leaving != ticket) continue;
    identity.leaving = 0;
    if (copied[i] == 0 || !is_taken(at)) continue;
    set_clean(at, true);
    ++cleaned;
  }
  return cleaned;
}

Status Blocks::check_copies() const {
  const auto broken = [](std::string what) { return Status(Error{Errc::kIntegrity, what}); };
  std::unordered_map<PageIndex, std::uint32_t> reading;
  std::uint64_t leaving = 0;
  for (const auto& [ticket, blocks] : leaving_) {
    leaving += blocks.size();
    for (const std::uint32_t block : blocks) ++reading[place(block).page];
  }
  if (leaving != leaving_blocks_) return broken("leaving blocks are not those of the tickets");
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
      const Place at{index, slot};
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
