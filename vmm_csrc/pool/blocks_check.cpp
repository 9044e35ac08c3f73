#include <bit>
#include <string>

#include "pool/blocks.h"

namespace kvelastic {

// --- checks ----------------------------------------------------------------------------------

Status Blocks::check_integrity() const {
  const auto broken = [](std::string what) { return Status(Error{Errc::kIntegrity, what}); };
  std::uint64_t mapped = 0, parked = 0, used = 0, cached = 0, open = 0, closed_cached = 0,
                closed = 0;
  for (PageIndex index = 0; index < fresh_; ++index) {
    const Page& page = pages_[index];
    std::uint64_t taken_bits = 0, cached_bits = 0;
    for (std::uint64_t w = 0; w < words_per_page_; ++w) {
      const std::uint64_t taken_here = taken_[index * words_per_page_ + w];
      const std::uint64_t cached_here = cached_[index * words_per_page_ + w];
      taken_bits += std::popcount(taken_here);
      cached_bits += std::popcount(cached_here);
      if ((cached_here & ~taken_here) != 0) {
        return broken("page " + std::to_string(index) + " has a cached block that is free");
      }
    }
    if (taken_bits != std::uint64_t{page.used} + page.cached || cached_bits != page.cached) {
      return broken("page " + std::to_string(index) + " counts " + std::to_string(page.used) +
                    " used and " + std::to_string(page.cached) + " cached blocks, its bits say " +
                    std::to_string(taken_bits - cached_bits) + " and " +
                    std::to_string(cached_bits));
    }
    if (page.state != PageState::kMapped) {
      if (taken_bits != 0) {
        return broken("page " + std::to_string(index) + " is not mapped and has blocks in use");
      }
      continue;
    }
    ++mapped;
    closed += page.closed ? 1 : 0;
    used += page.used;
    cached += page.cached;
    (page.closed ? closed_cached : open) += page.closed ? page.cached : free_in(page);
    if (taken_bits == 0 && page.reading == 0) {
      ++parked;
      const std::vector<PageIndex>& list = page.closed ? drained_ : parked_;
      if (page.parked_at >= list.size() || list[page.parked_at] != index) {
        return broken("page " + std::to_string(index) + " is empty and not parked");
      }
    }
  }
  if (fresh_ > 0 && pages_[0].state == PageState::kMapped) --used;  // the null block
  if (closed != closed_count_) {
    return broken(std::to_string(closed) + " pages are closed, " + std::to_string(closed_count_) +
                  " were counted");
  }
  if (mapped != mapped_pages_ || parked != parked_pages() || used != used_blocks_ ||
      cached != cached_blocks_ || open != free_blocks_ || closed_cached != closed_cached_) {
    return broken("the totals say mapped " + std::to_string(mapped_pages_) + ", parked " +
                  std::to_string(parked_pages()) + ", used " + std::to_string(used_blocks_) +
                  ", cached " + std::to_string(cached_blocks_) + ", free " +
                  std::to_string(free_blocks_) + "; recounted: " + std::to_string(mapped) + ", " +
                  std::to_string(parked) + ", " + std::to_string(used) + ", " +
                  std::to_string(cached) + ", " + std::to_string(open));
  }
  std::uint64_t listed_blocks = 0;
  for (const Cached as : {kClean, kKeyless, kCopyable}) {
    const BlockList& list = lists_[as];
    std::uint64_t listed = 0;
    for (std::uint32_t at = list.oldest(); at != 0 && listed <= list.size(); at = list.after(at)) {
      ++listed;
      if (cached_as(position_of(at - 1)) != as) {
        return broken("block " + std::to_string(id_of(position_of(at - 1))) +
                      " is in the wrong list");
      }
    }
    if (listed != list.size()) return broken("a list of cached blocks is not whole");
    listed_blocks += listed;
  }
  if (listed_blocks != cached) {
    return broken(std::to_string(listed_blocks) + " cached blocks are listed for eviction, " +
                  std::to_string(cached) + " are cached");
  }
  return check_copies();
}

}  // namespace kvelastic
