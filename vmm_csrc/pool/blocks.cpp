#include "pool/blocks.h"

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

namespace kvelastic {

Result<std::unique_ptr<Blocks>> Blocks::create(const Geometry& geometry) {
  std::unique_ptr<Blocks> blocks(new Blocks(geometry));
  const auto max_value = static_cast<std::uint32_t>(geometry.blocks_per_page);
  const std::size_t words = geometry.pages * blocks->words_per_page_;
  for (Status made : {blocks->pages_.allocate(geometry.pages), blocks->taken_.allocate(words),
                      blocks->cached_.allocate(words),
                      blocks->links_.allocate(geometry.pages * geometry.blocks_per_page),
                      blocks->pins_.allocate(geometry.pages * geometry.blocks_per_page),
                      blocks->partial_.allocate(geometry.pages, max_value),
                      blocks->identities_.allocate(geometry.pages * geometry.blocks_per_page),
                      blocks->cached_at_ms_.allocate(geometry.pages * geometry.blocks_per_page),
                      blocks->evictable_.allocate(geometry.pages, max_value),
                      blocks->clean_pages_.allocate(geometry.pages, max_value)}) {
    if (!made) return made.error();
  }
  return blocks;
}

Blocks::Blocks(const Geometry& geometry)
    : geometry_(geometry),
      blocks_per_page_(geometry.blocks_per_page),
      words_per_page_((geometry.blocks_per_page + 63) / 64),
      ids_per_page_(geometry.extent_bytes % geometry.block_bytes == 0
                        ? geometry.extent_bytes / geometry.block_bytes
                        : 0) {}

// --- pages -----------------------------------------------------------------------------------

std::optional<PageIndex> Blocks::take_unmapped() {
  PageIndex page = 0;
  if (!returned_.empty()) {
    page = *returned_.begin();
    returned_.erase(returned_.begin());
  } else if (fresh_ < geometry_.pages) {
    page = fresh_++;
  } else {
    return std::nullopt;
  }
  pages_[page].state = PageState::kInTransit;
  return page;
}

void Blocks::take_unmapped(std::span<const PageIndex> pages) {
  for (const PageIndex page : pages) {
    for (; fresh_ <= page; ++fresh_) returned_.insert(fresh_);
    returned_.erase(page);
    pages_[page].state = PageState::kInTransit;
  }
}

template <typename Fits>
std::optional<PageIndex> Blocks::find_run(std::uint64_t count, Fits fits) const {
  std::uint64_t length = 0;
  for (PageIndex index = 1; index < geometry_.pages; ++index) {
    length = fits(index) ? length + 1 : 0;
    if (length == count) return static_cast<PageIndex>(index + 1 - count);
  }
  return std::nullopt;
}

std::optional<PageIndex> Blocks::find_unmapped_run(std::uint64_t count) const {
  return find_run(count, [this](PageIndex index) {
    return index >= fresh_ || pages_[index].state == PageState::kUnmapped;
  });
}

std::optional<PageIndex> Blocks::find_parked_run(std::uint64_t count) const {
  if (parked_.size() < count) return std::nullopt;
  return find_run(count, [this](PageIndex index) {
    if (index >= fresh_ || pages_[index].state != PageState::kMapped) return false;
    const Page& page = pages_[index];
    return !page.closed && page.used == 0 && page.cached == 0 && page.reading == 0;
  });
}

void Blocks::add_page(PageIndex index) {
  Page& page = pages_[index];
  page.state = PageState::kMapped;
  ++mapped_pages_;
  if (index == 0) {
    taken_word({0, 0}) |= 1;
    page.used = 1;
  }
  enlist(index);
}

void Blocks::put_back(PageIndex page) {
  pages_[page].state = PageState::kUnmapped;
  returned_.insert(page);
}

std::optional<PageIndex> Blocks::take_parked() {
  const std::vector<PageIndex>& from = drained_.empty() ? parked_ : drained_;
  if (from.empty()) return std::nullopt;
  const PageIndex page = from.back();
  unlist(page);
  pages_[page].state = PageState::kInTransit;
  closed_count_ -= pages_[page].closed ? 1 : 0;
  pages_[page].closed = false;
  --mapped_pages_;
  return page;
}

bool Blocks::null_page_is_bare() const {
  return fresh_ > 0 && pages_[0].state == PageState::kMapped && pages_[0].used == 1 &&
         pages_[0].cached == 0 && pages_[0].reading == 0;
}

std::optional<PageIndex> Blocks::take_null_page() {
  if (!null_page_is_bare()) return std::nullopt;
  unlist(0);
  pages_[0].state = PageState::kInTransit;
  taken_word({0, 0}) = 0;  // the null block; add_page sets it again
  pages_[0].used = 0;
  --mapped_pages_;
  return PageIndex{0};
}

void Blocks::close_pages(std::uint64_t count) {
  const auto set_closed = [this](PageIndex index, bool closed) {
    if (pages_[index].closed == closed) return;
    unlist(index);
    pages_[index].closed = closed;
    enlist(index);
  };
  std::vector<PageIndex> chosen;
  for (PageIndex index = 1; count > 0 && index < fresh_; ++index) {
    if (pages_[index].state == PageState::kMapped) chosen.push_back(index);
  }
  if (chosen.size() > count) {
    std::nth_element(chosen.begin(), chosen.begin() + static_cast<std::ptrdiff_t>(count),
                     chosen.end(), [this](PageIndex a, PageIndex b) {
                       return std::pair(pages_[a].used, b) < std::pair(pages_[b].used, a);
                     });
    chosen.resize(count);
  }
  for (const PageIndex index : std::exchange(closed_, chosen)) {
    if (pages_[index].state == PageState::kMapped) set_closed(index, false);
  }
  for (const PageIndex index : chosen) set_closed(index, true);
  closed_count_ = chosen.size();
}

std::vector<std::pair<PageIndex, std::uint32_t>> Blocks::used_by_page() const {
  std::vector<std::pair<PageIndex, std::uint32_t>> used;
  for (PageIndex index = 1; index < fresh_; ++index) {
    if (pages_[index].state == PageState::kMapped) used.emplace_back(index, pages_[index].used);
  }
  return used;
}

bool Blocks::is_closed(BlockId id) const {
  Result<BlockPosition> at = find(id);
  return at && pages_[at->page].closed;
}

// --- blocks ----------------------------------------------------------------------------------

void Blocks::alloc(std::size_t count, Fit fit, std::vector<BlockId>& out) {
  while (count > 0) {
    const auto wanted = static_cast<std::uint32_t>(std::min<std::size_t>(count, blocks_per_page_));
    std::optional<PageIndex> page = partial_.lowest_from(fit == Fit::kFullest ? 1 : wanted);
    if (!page) page = partial_.highest();
    if (!page) page = parked_.back();
    const std::size_t here = std::min<std::size_t>(count, free_in(pages_[*page]));
    alloc_in_page(*page, here, out);
    count -= here;
  }
}

void Blocks::alloc_in_page(PageIndex index, std::size_t count, std::vector<BlockId>& out) {
  unlist(index);
  Page& page = pages_[index];
  page.used += static_cast<std::uint32_t>(count);
  used_blocks_ += count;
  const BlockId first = geometry_.first_id(index);
  for (std::size_t w = 0; count > 0; ++w) {
    std::uint64_t& word = taken_[index * words_per_page_ + w];
    // Bits beyond the page's last block are no blocks. The counts tell how many zero bits are real,
    // and lower bits are taken first, so those are never reached.
    for (std::uint64_t open = ~word; open != 0 && count > 0; open &= open - 1, --count) {
      word |= open & (~open + 1);
      const auto slot = static_cast<std::uint32_t>(w * 64 + std::countr_zero(open));
      forget({index, slot});
      out.push_back(first + static_cast<BlockId>(slot));
    }
  }
  enlist(index);
}

void Blocks::alloc_run(PageIndex first, std::uint64_t count, std::vector<BlockId>& out) {
  for (std::uint64_t at = 0; at < count; ++at) {
    alloc_in_page(static_cast<PageIndex>(first + at), blocks_per_page_, out);
  }
}

Result<Blocks::BlockPosition> Blocks::find(BlockId id) const {
  if (id == kNullBlock) {
    return Error{Errc::kNullBlock, "block 0 is the null block; it is never given back"};
  }
  if (id > 0) {
    const auto wide = static_cast<std::uint64_t>(id);
    // Compare before multiplying, so that a large id cannot overflow.
    if (wide < geometry_.pages * (geometry_.extent_bytes / geometry_.block_bytes + 1)) {
      const std::uint64_t page = ids_per_page_ != 0
                                     ? wide / ids_per_page_
                                     : wide * geometry_.block_bytes / geometry_.extent_bytes;
      if (page < geometry_.pages) {
        const auto index = static_cast<PageIndex>(page);
        const BlockId slot = id - geometry_.first_id(index);
        if (slot >= 0 && slot < static_cast<BlockId>(blocks_per_page_)) {
          return BlockPosition{index, static_cast<std::uint32_t>(slot)};
        }
      }
    }
  }
  return Error{Errc::kUnknownBlock,
               "block " + std::to_string(id) + " is not an id that this pool hands out"};
}

Error Blocks::wrong_state(BlockId id, const char* wanted) const {
  return {Errc::kDoubleFree, "block " + std::to_string(id) + " is not " + wanted +
                                 ": it was freed before, or named twice in one call"};
}

template <typename Step, typename Undo>
Status Blocks::for_all(std::span<const BlockId> ids, const char* wanted, Step step, Undo undo) {
  positions_.clear();
  for (const BlockId id : ids) {
    Result<BlockPosition> at = find(id);
    if (at && !step(*at)) at = wrong_state(id, wanted);
    if (!at) {
      for (std::size_t i = positions_.size(); i-- > 0;) undo(positions_[i]);
      return at.error();
    }
    positions_.push_back(*at);
  }
  return ok();
}

Status Blocks::free(std::span<const BlockId> ids) {
  // First the bits, which can be undone, then the counts, which cannot fail.
  Status marked = for_all(
      ids, "in use",
      [this](BlockPosition at) {
        if (!is_taken(at) || is_waiting(at, Pins::Then::kFree)) return false;
        taken_word(at) &= ~(std::uint64_t{1} << (at.slot % 64));
        return true;
      },
      [this](BlockPosition at) { taken_word(at) |= std::uint64_t{1} << (at.slot % 64); });
  if (!marked) return marked;
  for (std::size_t i = 0; i < positions_.size();) {
    const PageIndex index = positions_[i].page;
    unlist(index);
    Page& page = pages_[index];
    // Ids of a page mostly come together, so unlist and enlist it once for all of them.
    for (; i < positions_.size() && positions_[i].page == index; ++i) {
      const BlockPosition at = positions_[i];
      if (is_pinned(at)) {
        taken_word(at) |= std::uint64_t{1} << (at.slot % 64);
        pins_.set_then(dense(at), Pins::Then::kFree);
      } else if (is_cached(at)) {
        cached_word(at) &= ~(std::uint64_t{1} << (at.slot % 64));
        remove_cached(at);
      } else {
        --page.used;
        --used_blocks_;
      }
    }
    enlist(index);
  }
  return ok();
}

Status Blocks::cache(std::span<const BlockId> ids) {
  Status marked = for_all(
      ids, "in use",
      [this](BlockPosition at) {
        if (!is_taken(at) || is_cached(at)) return false;
        if (is_pinned(at) && !is_waiting(at, Pins::Then::kUsed)) return false;
        cached_word(at) |= std::uint64_t{1} << (at.slot % 64);
        return true;
      },
      [this](BlockPosition at) { cached_word(at) &= ~(std::uint64_t{1} << (at.slot % 64)); });
  if (!marked) return marked;
  for (const BlockPosition at : positions_) {
    if (is_pinned(at)) {
      cached_word(at) &= ~(std::uint64_t{1} << (at.slot % 64));
      pins_.set_then(dense(at), Pins::Then::kCached);
    } else {
      make_cached(at);
    }
  }
  return ok();
}

Status Blocks::touch(std::span<const BlockId> ids) {
  Status marked = for_all(
      ids, "cached",
      [this](BlockPosition at) {
        if (is_waiting(at, Pins::Then::kCached)) {
          pins_.set_then(dense(at), Pins::Then::kUsed);
          return true;
        }
        if (!is_cached(at)) return false;
        cached_word(at) &= ~(std::uint64_t{1} << (at.slot % 64));
        return true;
      },
      [this](BlockPosition at) {
        if (is_pinned(at)) return pins_.set_then(dense(at), Pins::Then::kCached);
        cached_word(at) |= std::uint64_t{1} << (at.slot % 64);
      });
  if (!marked) return marked;
  for (const BlockPosition at : positions_) {
    if (!is_pinned(at)) make_used(at);
  }
  return ok();
}

/// used -> cached; the block's bit is already set.
void Blocks::make_cached(BlockPosition at) {
  unlist(at.page);
  --pages_[at.page].used;
  --used_blocks_;
  add_cached(at);
  enlist(at.page);
}

/// cached -> used; the block's bit is already cleared.
void Blocks::make_used(BlockPosition at) {
  unlist(at.page);
  ++pages_[at.page].used;
  ++used_blocks_;
  remove_cached(at);
  enlist(at.page);
}

bool Blocks::evict_cheapest_page(std::vector<EvictedBlock>& evicted) {
  const std::optional<PageIndex> index = cheapest_page();
  if (!index) return false;
  unlist(*index);
  for (std::uint32_t slot = 0; pages_[*index].cached > 0; ++slot) {
    const BlockPosition at{*index, slot};
    if (!is_cached(at)) continue;
    evicted.push_back({id_of(at), is_clean(at)});
    make_free(at);
  }
  enlist(*index);
  return true;
}

bool Blocks::evict_oldest_block(std::vector<EvictedBlock>& evicted) {
  for (const BlockList& list : lists_) {
    if (list.oldest() == 0) continue;
    evict_oldest_of(list, evicted);
    return true;
  }
  return false;
}

void Blocks::evict_idle(std::uint32_t idle_ms, std::uint32_t copyable_idle_ms,
                        std::vector<EvictedBlock>& evicted) {
  for (const Cached as : {kClean, kKeyless, kCopyable}) {
    const std::uint32_t most_ms = as == kCopyable ? copyable_idle_ms : idle_ms;
    while (age_ms(as) >= most_ms) evict_oldest_of(lists_[as], evicted);
  }
}

/// Pre: the list is not empty.
void Blocks::evict_oldest_of(const BlockList& list, std::vector<EvictedBlock>& evicted) {
  const BlockPosition at = position_of(list.oldest() - 1);
  evicted.push_back({id_of(at), is_clean(at)});
  unlist(at.page);
  make_free(at);
  enlist(at.page);
}

void Blocks::clear(std::vector<EvictedBlock>& evicted) {
  while (evict_oldest_block(evicted)) {
  }
  evict_waiting(evicted);
  for (PageIndex index = 0; index < fresh_; ++index) {
    Page& page = pages_[index];
    const std::uint32_t null_block = index == 0 ? 1 : 0;
    if (page.state != PageState::kMapped || page.used == null_block) continue;
    unlist(index);
    used_blocks_ -= page.used - null_block;
    page.used = null_block;
    for (std::uint64_t w = 0; w < words_per_page_; ++w) {
      taken_[index * words_per_page_ + w] = w == 0 ? null_block : 0;
    }
    enlist(index);
  }
  for (const std::uint32_t block : pins_.pinned_blocks()) {
    const BlockPosition at = position_of(block);
    unlist(at.page);
    taken_word(at) |= std::uint64_t{1} << (at.slot % 64);
    ++pages_[at.page].used;
    ++used_blocks_;
    enlist(at.page);
    pins_.set_then(block, Pins::Then::kFree);
  }
}

std::optional<std::uint32_t> Blocks::cheapest_page_cost() const {
  const std::optional<PageIndex> index = cheapest_page();
  if (!index) return std::nullopt;
  return pages_[*index].cached;
}

std::optional<PageIndex> Blocks::cheapest_page() const {
  const std::optional<PageIndex> clean = clean_pages_.lowest_from(1);
  return clean ? clean : evictable_.lowest_from(1);
}

/// cached -> free. Pre: the page is unlisted.
void Blocks::make_free(BlockPosition at) {
  const std::uint64_t mask = ~(std::uint64_t{1} << (at.slot % 64));
  taken_word(at) &= mask;
  cached_word(at) &= mask;
  remove_cached(at);
}

Blocks::Cached Blocks::cached_as(BlockPosition at) const {
  if (!has_identities_) return kKeyless;
  const Identity& identity = identities_[dense(at)];
  return identity.clean ? kClean : identity.key.is_none() ? kKeyless : kCopyable;
}

void Blocks::add_cached(BlockPosition at) {
  const bool clean = is_clean(at);
  cached_at_ms_[dense(at)] = now_ms_;
  list_of(at).append(dense(at));
  ++pages_[at.page].cached;
  ++cached_blocks_;
  pages_[at.page].clean += clean ? 1 : 0;
  clean_blocks_ += clean ? 1 : 0;
}

void Blocks::remove_cached(BlockPosition at) {
  const bool clean = is_clean(at);
  list_of(at).remove(dense(at));
  --pages_[at.page].cached;
  --cached_blocks_;
  pages_[at.page].clean -= clean ? 1 : 0;
  clean_blocks_ -= clean ? 1 : 0;
}

// --- lists -----------------------------------------------------------------------------------

void Blocks::unlist(PageIndex index) {
  const Page& page = pages_[index];
  (page.closed ? closed_cached_ : free_blocks_) -= page.closed ? page.cached : free_in(page);
  if (page.used == 0 && page.cached == 0 && page.reading == 0) {
    // The last parked page takes this one's position.
    std::vector<PageIndex>& parked = page.closed ? drained_ : parked_;
    pages_[parked.back()].parked_at = page.parked_at;
    parked[page.parked_at] = parked.back();
    parked.pop_back();
    return;
  }
  if (const std::uint32_t open = free_in(page); open > 0 && !page.closed) {
    partial_.remove(index, open);
  }
  if (page.used > 0 || page.cached == 0) return;
  --evictable_pages_;
  if (page.reading > 0) return;
  if (page.clean == page.cached) {
    clean_pages_.remove(index, page.cached);
    --clean_page_count_;
  } else {
    evictable_.remove(index, page.cached - page.clean);
  }
}

void Blocks::enlist(PageIndex index) {
  Page& page = pages_[index];
  (page.closed ? closed_cached_ : free_blocks_) += page.closed ? page.cached : free_in(page);
  if (page.used == 0 && page.cached == 0 && page.reading == 0) {
    std::vector<PageIndex>& parked = page.closed ? drained_ : parked_;
    page.parked_at = static_cast<std::uint32_t>(parked.size());
    parked.push_back(index);
    return;
  }
  if (const std::uint32_t open = free_in(page); open > 0 && !page.closed) {
    partial_.push_back(index, open);
  }
  if (page.used > 0 || page.cached == 0) return;
  ++evictable_pages_;
  if (page.reading > 0) return;
  if (page.clean == page.cached) {
    clean_pages_.push_back(index, page.cached);
    ++clean_page_count_;
  } else {
    evictable_.push_back(index, page.cached - page.clean);
  }
}

std::optional<std::uint32_t> Blocks::occupancy(PageIndex index) const {
  if (index >= geometry_.pages || pages_[index].state != PageState::kMapped) return std::nullopt;
  const Page& page = pages_[index];
  return page.used + page.cached - (index == 0 ? 1 : 0);
}

}  // namespace kvelastic
